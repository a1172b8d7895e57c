"""Enumerate the parallel configurations that are compared: how ranks are divided among data, tensor and pipeline
parallelism, in how many micro-batches a batch goes through, whether layers are recomputed, and how parameters rest."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import gcd

from nnscaler.planning.cost.model_protocol import AxisPlace
from nnscaler.planning.sharding.zero_stages import PLACEMENTS, WHOLE, AtRest, ParameterPlacement
from nnscaler.scheduling.registry import DEFAULT, planned_schedules
from nnscaler.scheduling.schedule import Ramp, ScheduleFigures, ScheduleKind
from nnscaler.transform.plan import CP, DP, EP, PP, TP


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
    chunks          stages on each pipeline device
    ep              of the ranks of dp, which it divides, how many divide the experts
    cp              ranks that share the tokens of a sequence
    within_layers   whether the stages of the pipeline are cut within numbered layers
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    micro_batches: int = 1
    recompute: bool | None = False
    parameters: ParameterPlacement = WHOLE
    schedule: ScheduleKind = DEFAULT
    chunks: int = 1
    ep: int = 1
    cp: int = 1
    within_layers: bool = False

    def __str__(self) -> str:
        named = ((DP, self.dp), (EP, self.ep), (CP, self.cp), (TP, self.tp), (PP, self.pp))
        sizes = " ".join(f"{n}={v}" for n, v in named if v > 1)
        sizes += f" zero={self.zero}" if self.zero else ""
        batches = f", {self.micro_batches} micro-batches" if self.micro_batches > 1 else ""
        order = "" if self.schedule is DEFAULT else f", {self.named}"
        order += ", cut within layers" if self.within_layers else ""
        return (sizes or "1 rank") + batches + order + (", recompute" if self.recompute else "")

    @property
    def order(self) -> tuple[int, ...]:
        """Key by which configurations that are alike otherwise are sorted."""
        again = (None, False, True).index(self.recompute)
        planned = planned_schedules()
        schedule = planned.index(self.schedule) if self.schedule in planned else len(planned)
        kinds = (again, self.zero, schedule, self.chunks, self.ep, self.cp, self.within_layers)
        return self.dp, self.tp, self.pp, self.micro_batches, *kinds

    @property
    def named(self) -> str:
        """The schedule as `--schedule` takes it: `zb-v`, `interleaved:3`."""
        chunks = "" if self.chunks == self.schedule.chunks else f":{self.chunks}"
        return f"{self.schedule.name}{chunks}"

    @property
    def figures(self) -> ScheduleFigures:
        """The figures that the planner assumes of the schedule."""
        assert self.schedule.figures is not None, "schedules without figures are not searched"
        return self.schedule.figures

    @property
    def stage_devices(self) -> tuple[int, ...]:
        """The pipeline device of each stage but those that all devices run."""
        places = self.schedule.places(self.pp, self.chunks)
        return tuple(devices[0] for devices in places if len(devices) == 1)

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

    def live(self, device: int) -> float:
        """Return the most micro-batches that are between forward and backward on a pipeline device."""
        return self.figures.in_flight(device, self.pp, self.chunks, self.micro_batches)

    @property
    def at_ends(self) -> tuple[int, int]:
        """As `live`, of the first and of the last stage alone."""
        return self.figures.at_ends(self.pp, self.chunks, self.micro_batches)

    @property
    def ramps(self) -> tuple[Ramp, ...]:
        """The forms of what each pipeline device adds to a step."""
        return self.figures.ramps(self.chunks, self.pp)

    @property
    def ramp(self) -> float:
        """How often a device's pass counts at least in what it adds to a step."""
        return self.figures.even(self.chunks, self.pp)

    @property
    def repeats(self) -> float:
        """How often the slowest device counts in a lower bound of a step, beside what all add."""
        return self.micro_batches - max(max(form) for form in self.ramps)

    @property
    def turns(self) -> float:
        """How often what every device takes as long for counts at least in a step, whatever its place."""
        return self.repeats + self.ramp * self.pp

    @property
    def each(self) -> float:
        """How often the time of one micro-batch through all layers counts in a lower bound of a step.

        By its schedule's figures, a step takes at least ramp * T + repeats * T / p, with T the time of one micro-batch
        on all p devices together: what all devices add, and the slowest one, which is no faster than the mean.
        """
        return self.turns / self.pp

    @property
    def passes(self) -> Ramp | None:
        """How often F, I and W of one micro-batch through all layers count in a lower bound of a step; None where that
        is `each` for all of them.

        Any form of a ramp bounds it, so with the mean for the busiest device: (m x + (p - 1) ramp) / p. It is the form
        that is longest where I takes 4 and W 2 of what F takes 3 of.
        """
        form = max(self.ramps, key=lambda form: 3 * form[0] + 4 * form[1] + 2 * form[2])
        if min(form) == max(form):
            return None
        f, i, w = ((self.micro_batches + (self.pp - 1) * often) / self.pp for often in form)
        return f, i, w


def divisors(number: int) -> list[int]:
    """Return all divisors of a number, ascending."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def configurations(
    ranks: int,
    batch: int,
    layers: int,
    schedules: Sequence[ScheduleKind],
    each: bool = False,
    recomputing: bool = True,
    experts: int = 1,
) -> Iterator[Configuration]:
    """Yield all configurations that divide the batch evenly and give every pipeline device a layer.

    `schedules`: of pipelines, the default one first. `each` says whether layers can be recomputed one by one,
    `recomputing` whether all can. Those configurations come before the ones that they contain. `experts` is a number
    that divides those of every layer; 1 for none.
    """
    again: tuple[bool | None, ...] = ((None,) if each else ()) + ((False, True) if layers and recomputing else (False,))
    for tp in divisors(ranks):
        for pp in divisors(ranks // tp):
            dp = ranks // tp // pp
            if batch % dp or pp > max(layers, 1):
                continue
            for micro_batches in divisors(batch // dp):
                ways = PLACEMENTS[: None if dp > 1 else 1]
                orders = tuple(orders_of(schedules, pp, micro_batches, layers))
                shared = divisors(gcd(dp, experts))
                for ep, recompute, parameters, (schedule, chunks) in product(shared, again, ways, orders):
                    yield Configuration(dp, tp, pp, micro_batches, recompute, parameters, schedule, chunks, ep)


def orders_of(
    schedules: Iterable[ScheduleKind], pp: int, micro_batches: int, layers: int
) -> Iterator[tuple[ScheduleKind, int]]:
    """Yield those of the schedules for so many devices and micro-batches, each with its numbers of stages on a device,
    whose figures hold, and whose every stage has a layer."""
    if pp == 1:
        yield DEFAULT, 1
        return
    for kind in schedules:
        assert kind.figures is not None
        for chunks in kind.figures.chunks:
            if kind.figures.holds(pp, micro_batches) and (kind is DEFAULT or pp * chunks <= layers):
                yield kind, chunks


def uneven_ramps() -> tuple[Ramp, ...]:
    """Return the ramps of all planned schedules in which F, I and W count unlike often: what is least in a whole pass
    need not be in these. Those of schedules that split few backwards are sums of these, whatever the devices."""
    figures = [kind.figures for kind in planned_schedules() if kind.figures is not None and not kind.figures.few]
    every = [form for own in figures for chunks in own.chunks for form in own.ramps(chunks, 2)]
    return tuple(dict.fromkeys(form for form in every if min(form) < max(form)))
