"""Records of a comparison: the run of a program and its oracle, each difference, and the result."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from torch import Tensor

from op_registry.call import dtype_name

from verify.external.comparison.reference_in_parts_and_noise import MicroMeans
from verify.external.observe_rank_run import RankRecord
from verify.external.program import ExternalProgram
from verify.external.reference import PlainReference
from verify.programs.causes.wrong_tensor import Cause, WrongTensor
from verify.results.float64_tolerance import Tolerance
from verify.results.report import Check
from verify.results.verdict import Verdict, merge

PartGradients = Callable[[int, int], Tensor]  # step and data part -> gradients over all addresses


# why a gradient is not compared
IN_STEP = (
    "the optimizer's step reduces gradients in tensors of its own, which are not seen: parameters after steps are "
    "compared, and an optimizer such as Adam hides a factor of their gradients"
)


@dataclass(frozen=True)
class ProgramRun:
    """One run of a program in one dtype, and its oracle.

    tolerance       what agrees
    part_gradients  make the gradients of one data part by itself
    micro_means     make losses and gradients of the plain model over micro-batches; none where that cannot be run
    unclipped       make the gradients of the whole batch as they are before they are clipped, where the reference has
                    those after; None where it has these
    """

    program: ExternalProgram
    reference: PlainReference
    records: tuple[RankRecord, ...]
    tolerance: Tolerance
    part_gradients: PartGradients
    micro_means: MicroMeans = lambda step: iter(())
    unclipped: Callable[[int], Tensor] | None = None

    @cached_property
    def sizes(self) -> Mapping[str, int]:
        """Return the size of each mesh axis."""
        return dict(self.program.mesh)

    @cached_property
    def at(self) -> Mapping[int, Mapping[str, int]]:
        """Return the coordinate of each rank."""
        return {record.rank: record.coordinate for record in self.records}

    def wrong_tensor(self, noun: str, rank: int, values: Mapping[int, Tensor], expected: Tensor) -> WrongTensor:
        """Return a rank's wrong value. `values`: by rank, those of all that hold the same elements."""
        pieces = {(r, 0): value.double() for r, value in values.items()}
        at = {(r, 0): coordinate for r, coordinate in self.at.items()}
        return WrongTensor(noun, pieces, expected, at, sizes=self.sizes, judged=((rank, 0),))

    @property
    def dtype(self) -> str:
        """Return the dtype of the run, as torch names it."""
        return dtype_name(self.reference.dtype)


@dataclass(frozen=True)
class Difference:
    """A value of one rank that is not the model's.

    code      of the finding
    name      in the plain model
    relative  difference
    verdict   INCONCLUSIVE where rounding may explain it
    cause     by arithmetic
    """

    code: str
    name: str
    rank: int
    step: int
    verdict: Verdict
    relative: float = 0.0
    expected: str = ""
    actual: str = ""
    cause: Cause = field(default_factory=lambda: Cause("differs", ""))
    layout: str = ""


@dataclass(frozen=True)
class ComparisonResult:
    """The result of one kind of comparison."""

    name: str
    count: int
    differences: tuple[Difference, ...]
    worst: float = 0.0

    @staticmethod
    def of_all(name: str, compared: Sequence[ComparisonResult]) -> ComparisonResult:
        """Return several comparisons as one."""
        differences = tuple(one for result in compared for one in result.differences)
        return ComparisonResult(name, sum(r.count for r in compared), differences, max(r.worst for r in compared))

    def check(self, level: Verdict) -> Check:
        """Return the row of the report."""
        bad = [d.verdict for d in self.differences]
        verdict = merge([level, *bad]) if self.count or bad else Verdict.INCONCLUSIVE
        refuted = sum(v is Verdict.REFUTED for v in bad)
        refuted = min(refuted, self.count or refuted)  # one tensor may differ in two ways
        detail = f"worst relative difference {self.worst:.2g}" if self.count else "nothing to compare"
        return Check(self.name, verdict, self.count, refuted, detail=detail)
