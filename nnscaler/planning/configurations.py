"""The configurations that are compared: how ranks are divided among data, tensor and pipeline parallelism, in how many
micro-batches a batch goes through, whether layers are recomputed, and how parameters rest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import gcd

from nnscaler.planning.cost.model import AxisPlace
from nnscaler.planning.sharding.parameter_placement import PLACEMENTS, WHOLE, AtRest, ParameterPlacement
from nnscaler.scheduling.one_f_one_b import ONE_F_ONE_B
from nnscaler.scheduling.schedule import ScheduleKind
from nnscaler.transform.plan import CP, DP, EP, PP, TP

SCHEDULES = (ONE_F_ONE_B,)  # that are searched


@dataclass(frozen=True, slots=True)
class Configuration:
    """One way to use a number of ranks.

    dp              ranks that share the batch
    tp              ranks that share operators
    pp              pipeline devices, outermost in rank order; then come dp, cp and tp
    micro_batches   parts into which the batch of a dp rank is cut in time
    recompute       whether all layers (True) or none (False) are recomputed in backward; None: those for which it pays
    parameters      how parameters, gradients and optimizer states rest over dp
    schedule        of the pipeline
    ep              of the ranks of dp, which it divides, how many divide the experts
    cp              ranks that share the tokens of a sequence
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    micro_batches: int = 1
    recompute: bool | None = False
    parameters: ParameterPlacement = WHOLE
    schedule: ScheduleKind = ONE_F_ONE_B
    ep: int = 1
    cp: int = 1

    def __str__(self) -> str:
        named = ((DP, self.dp), (EP, self.ep), (CP, self.cp), (TP, self.tp), (PP, self.pp))
        sizes = " ".join(f"{n}={v}" for n, v in named if v > 1)
        sizes += f" zero={self.zero}" if self.zero else ""
        batches = f", {self.micro_batches} micro-batches" if self.micro_batches > 1 else ""
        return (sizes or "1 rank") + batches + (", recompute" if self.recompute else "")

    @property
    def order(self) -> tuple[int, ...]:
        """Key by which configurations that are alike otherwise are sorted."""
        again = (None, False, True).index(self.recompute)
        schedule = SCHEDULES.index(self.schedule) if self.schedule in SCHEDULES else len(SCHEDULES)
        return self.dp, self.tp, self.pp, self.micro_batches, again, self.zero, schedule, self.ep, self.cp

    @property
    def ranks(self) -> int:
        return self.dp * self.cp * self.tp * self.pp

    @property
    def zero(self) -> int:
        """The stage of ZeRO; 0 for none."""
        return self.parameters.zero

    @property
    def rests(self) -> AtRest:
        """How parameters rest, and over how many ranks of dp and ep."""
        return self.parameters.over(self.dp, self.ep)

    @property
    def sharing(self) -> AxisPlace:
        """Where the ranks lie that share the batch, those of dp and ep together."""
        return AxisPlace(self.dp, self.tp * self.cp)

    @property
    def parts(self) -> int:
        """Number of parts into which the batch is cut."""
        return self.dp * self.micro_batches

    @property
    def places(self) -> dict[str, AxisPlace]:
        """By axis, where its groups lie among the ranks."""
        return {
            TP: AxisPlace(self.tp),
            CP: AxisPlace(self.cp, self.tp),
            EP: AxisPlace(self.ep, self.tp * self.cp),
            DP: AxisPlace(self.dp // self.ep, self.tp * self.cp * self.ep),
            PP: AxisPlace(self.pp, self.tp * self.cp * self.dp),
        }

    def live(self, device: int) -> int:
        """Return the most micro-batches that are between forward and backward on a pipeline device."""
        assert self.schedule.in_flight is not None, "schedules without figures are not searched"
        return self.schedule.in_flight(device, self.pp, self.micro_batches)

    @property
    def repeats(self) -> int:
        """How often the slowest stage counts in a step beside the sum of all stages."""
        assert self.schedule.repeats is not None, "schedules without figures are not searched"
        return self.schedule.repeats(self.pp, self.micro_batches)

    @property
    def turns(self) -> int:
        """How often what every stage takes as long for counts in a step, whatever its place."""
        return self.repeats + self.pp

    @property
    def each(self) -> float:
        """How often the time of one micro-batch through all layers counts in a lower bound of a step.

        By its schedule's estimate, a step takes at least T + repeats * T / p, with T the time of one micro-batch on all
        p devices together: the sum of all stages, and the largest one, which is no smaller than the mean.
        """
        return self.turns / self.pp


def divisors(number: int) -> list[int]:
    """Return all divisors of a number, ascending."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def configurations(
    ranks: int, batch: int, layers: int, each: bool = False, recomputing: bool = True, experts: int = 1
) -> Iterator[Configuration]:
    """Yield all configurations that divide the batch evenly and give every pipeline device a layer.

    `each` says whether layers can be recomputed one by one, `recomputing` whether all can. Those configurations come
    before the ones that they contain. `experts` is a number that divides those of every layer; 1 for none.
    """
    again: tuple[bool | None, ...] = ((None,) if each else ()) + ((False, True) if layers and recomputing else (False,))
    for tp in divisors(ranks):
        for pp in divisors(ranks // tp):
            dp = ranks // tp // pp
            if batch % dp or pp > max(layers, 1):
                continue
            for micro_batches in divisors(batch // dp):
                ways, schedules = PLACEMENTS[: None if dp > 1 else 1], SCHEDULES[: None if pp > 1 else 1]
                shared = divisors(gcd(dp, experts))
                for ep, recompute, parameters, schedule in product(shared, again, ways, schedules):
                    yield Configuration(dp, tp, pp, micro_batches, recompute, parameters, schedule, ep)
