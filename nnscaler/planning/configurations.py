"""The configurations that are compared: how ranks are divided among data, tensor and pipeline parallelism, in how many
micro-batches a batch goes through, whether layers are recomputed, and whether parameters rest in shards."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from nnscaler.planning.cost.model import AxisPlace


@dataclass(frozen=True, slots=True)
class Configuration:
    """One way to use a number of ranks.

    dp              ranks that share the batch
    tp              ranks that share operators
    pp              pipeline devices, outermost in rank order; then come dp and tp
    micro_batches   parts into which the batch of a dp rank is cut in time
    recompute       whether all layers (True) or none (False) are recomputed in backward; None: those for which it pays
    zero            whether parameters, gradients and optimizer states rest in shards over dp (ZeRO-3)
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    micro_batches: int = 1
    recompute: bool | None = False
    zero: bool = False

    def __str__(self) -> str:
        sizes = " ".join(f"{n}={v}" for n, v in (("dp", self.dp), ("tp", self.tp), ("pp", self.pp)) if v > 1)
        sizes += " zero=3" * self.zero
        batches = f", {self.micro_batches} micro-batches" if self.micro_batches > 1 else ""
        return (sizes or "1 rank") + batches + (", recompute" if self.recompute else "")

    @property
    def order(self) -> tuple[int, ...]:
        """Key by which configurations that are alike otherwise are sorted."""
        again = (None, False, True).index(self.recompute)
        return self.dp, self.tp, self.pp, self.micro_batches, again, int(self.zero)

    @property
    def ranks(self) -> int:
        return self.dp * self.tp * self.pp

    @property
    def shards(self) -> int:
        """Number of shards over dp in which parameters rest."""
        return self.dp if self.zero else 1

    @property
    def parts(self) -> int:
        """Number of parts into which the batch is cut."""
        return self.dp * self.micro_batches

    @property
    def places(self) -> dict[str, AxisPlace]:
        """By axis, where its groups lie among the ranks."""
        return {
            "tp": AxisPlace(self.tp),
            "dp": AxisPlace(self.dp, self.tp),
            "pp": AxisPlace(self.pp, self.tp * self.dp),
        }

    @property
    def each(self) -> float:
        """How often the time of one micro-batch through all layers counts in a lower bound of a 1F1B step.

        A step takes at least T + (m - 1) T / p, with T the time of one micro-batch on all p devices together: the fill
        and the drain of the pipeline, and the largest stage, which is no smaller than the mean.
        """
        return (self.micro_batches + self.pp - 1) / self.pp


def divisors(number: int) -> list[int]:
    """Return all divisors of a number, ascending."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def configurations(ranks: int, batch: int, layers: int, each: bool = False) -> Iterator[Configuration]:
    """Yield all configurations that divide the batch evenly and give every pipeline device a layer.

    `each` says whether layers can be recomputed one by one. Those configurations come before the ones that they
    contain.
    """
    again = ((None,) if each else ()) + ((False, True) if layers else (False,))
    for tp in divisors(ranks):
        for pp in divisors(ranks // tp):
            dp = ranks // tp // pp
            if batch % dp or pp > max(layers, 1):
                continue
            for micro_batches in divisors(batch // dp):
                for recompute, zero in product(again, (False, True) if dp > 1 else (False,)):
                    yield Configuration(dp, tp, pp, micro_batches, recompute, zero)
