"""The interface of a cost model: seconds of one shard of an operator, and of one collective."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from nnscaler.ir.operation_annotations import Signature

Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"]
Shape = tuple[int, ...]
Shapes = Sequence[Shape | None]
KINDS: tuple[Collective, ...] = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")


@dataclass(frozen=True, slots=True)
class AxisPlace:
    """Where a mesh axis lies among consecutive ranks.

    size    ranks of the axis
    inner   distance between two neighbours of the axis, in ranks
    """

    size: int
    inner: int = 1


SHARED = 0.75  # with a processor each it is nearly 1, and half where two share one


@dataclass(frozen=True, slots=True)
class Overheads:
    """Seconds that a step takes beside operators and collectives, while all ranks run.

    statement   to dispatch one statement of a program (part of `CostModel.compute`)
    again       in addition, for a statement that backward repeats
    step        once on every rank
    crowding    how many times longer operators take with 1, 2, ... ranks computing at once than one by one; the last is
                that of all ranks, which all other figures include. Empty: each rank computes on a device of its own
    hidden      the share of a collective that takes no time of a rank which begins it, computes, and waits for it
                later, while 1, 2, ... ranks do so. Empty: none of it, which is an upper estimate
    moved       beside its collective, for a parameter that is gathered from its parts (ZeRO), or its gradient divided
    halved      how many times longer than a whole backward its two halves take
    """

    statement: float = 0.0
    again: float = 0.0
    step: float = 0.0
    crowding: tuple[float, ...] = ()
    hidden: tuple[float, ...] = ()
    moved: float = 0.0
    halved: float = 1.0

    def relief(self, ranks: int) -> float:
        """Return the share of its time that a pass takes while only `ranks` ranks compute."""
        if not self.crowding:
            return 1.0
        return self.crowding[max(1, min(ranks, len(self.crowding))) - 1] / self.crowding[-1]

    @property
    def shared(self) -> bool:
        """Tell whether ranks share processors, so that one that waits gives its time to others: half of them take less
        than `SHARED` of the time alone."""
        return self.relief(len(self.crowding) // 2) < SHARED

    def exposed(self, begun: float, first: float, computed: float) -> float:
        """Return the seconds that collectives add to those of computing, where all but the `first` seconds of them may
        be under way meanwhile."""
        share = self.hidden[-1] if self.hidden else 0.0
        return begun - min(share * max(0.0, begun - first), computed)


class CostModel(Protocol):
    """Costs in seconds. Pure: the same question has the same answer."""

    @property
    def identity(self) -> str:
        """A hash of what the answers depend on."""

    @property
    def measured(self) -> bool:
        """True where a machine's times are known, of the halves of a backward too."""

    @property
    def overheads(self) -> Overheads:
        """Costs of a step beside its operators and collectives."""

    def among(self, ranks: int) -> CostModel:
        """Return the costs of a program that runs on so many ranks, while all of them compute."""

    def compute(self, signature: Signature, shapes_in: Shapes, shapes_out: Shapes, dtype: str) -> tuple[float, float]:
        """Return the seconds of one shard of an operation, forward and backward.

        `shapes_in`, `shapes_out`: of the shard's operands, None for an output that is not used; `dtype`: in which the
        operation computes, which its floating operands have.
        """

    def collective(self, kind: Collective, size: float, ranks: AxisPlace) -> float:
        """Return the seconds of one call by every rank of the axis.

        `size`: bytes of the tensor whole along the axis, as in `volume` of `nnscaler.ir.conversion_table_and_paths`; of
        the message, for `send` to the next rank of the axis.
        """

    def copied(self, size: float) -> float:
        """Return the seconds in which a rank copies so many bytes within its memory, beside what it computes."""
