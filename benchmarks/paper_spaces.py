"""The spaces of plans that `paper.py` compares, for models that run their layers once.

Enumerated are dp, tp and pp in powers of two with `STAGES` stages, for splits on tp as Megatron has them or as an
operator-wise search finds them, with layers recomputed or not; then regions in pieces, or interlaced pipelines. A plan
that does not fit into the memory of a rank is no plan. What cannot be chosen is not made, by these bounds:

* parameters at rest, divided by tp * pp, exceed a rank's memory: no plan of these axes fits;
* a plan fits: with recomputation, or regions in pieces, it would only take longer;
* what stays at rest does not fit: nothing of that plan is computed again in vain;
* a plan that does not fit takes longer than the best one that does, and so does its busiest device with what is
  recomputed on top (`Priced.bound`), on every cluster: recomputed or in pieces it is slower still;
* in as many pieces as there may be it does not fit: no fewer pieces do. Where some number fits, more take longer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise, product
from math import inf

from paper_models import PaperModel
from paper_simulated import MEMORY, SMALL, Costs, Priced, Simulated, measure

from nnscaler.communication.communicated_graph import Compute
from nnscaler.errors import NnscalerError
from nnscaler.ir.operation_annotations import signatures
from nnscaler.planning.constraints import megatron
from nnscaler.planning.named_policies import constrained_tensor_parallel, coshard_steps
from nnscaler.planning.plan_from_axes import make_plan
from nnscaler.transform.balanced_cuts_at_module_borders import balanced_cuts
from nnscaler.transform.partition_stages import random_operators, repeated_operations, with_repeated
from nnscaler.transform.plan import DP, PP, TP, AssignStep, ChunkStep, Plan, RecomputeStep, Step
from nnscaler.transform.select_operations import layers_of

STATE = 18  # bytes of a parameter in half precision, its gradient and its optimizer states
STAGES = (1, 2, 4)  # of pipelines: the paper's experiments have four at most
LAYERS = 5  # numbered modules that are layers, at least: the blocks of Swin, and not its four stages
PIECES = (2, 4, 8)
MEGATRON, ALPA, OURS = "Megatron-like", "Alpa-like", "ours"
WITHOUT_PIPELINE = "Alpa-like, pp=1"  # as the paper's artifact runs it
SYSTEMS = {"megatron": (MEGATRON,), "operators": (ALPA,)}

Axes = Mapping[str, int]


class Best:
    """The plans that fit, and the seconds of the best one of each system on each cluster. Ours has all plans."""

    def __init__(self, clusters: Sequence[str]) -> None:
        self.clusters = clusters
        self.found: list[Simulated] = []
        self._seconds: dict[tuple[str, str], float] = {}

    def add(self, plan: Simulated) -> None:
        """Add a plan."""
        self.found.append(plan)
        for cluster, seconds in plan.seconds.items():
            for system in {plan.system, OURS}:
                self._seconds[system, cluster] = min(seconds, self._seconds.get((system, cluster), inf))

    def may_be(self, systems: Sequence[str], bound: Mapping[str, float]) -> bool:
        """Return whether a plan that takes so long or longer may be the best one of some of the systems."""
        return any(bound[c] < self._seconds.get((s, c), inf) for s in systems for c in self.clusters)


@dataclass(frozen=True)
class Tried:
    """A plan without recomputation that does not fit, though what is at rest does.

    systems   whose space it is in
    policy    the ready policy that has its kind
    axes      their sizes
    text      in words
    priced    its figures
    """

    systems: tuple[str, ...]
    policy: str
    axes: Axes
    text: str
    priced: Priced

    @property
    def plan(self) -> Plan:
        return self.priced.plan


class Space:
    """The plans of one model of one size on so many GPUs."""

    def __init__(self, model: PaperModel, gpus: int, costs: Costs) -> None:
        self.model, self.gpus, self.costs = model, gpus, costs
        self.graph = model.graph(*model.sizes[gpus])
        self.known = signatures(self.graph)
        self.parameters = sum(t.elements for t in self.graph.with_role("parameter"))
        self.repeated = repeated_operations(self.graph, random_operators(self.known))
        self.layers = layers_of(self.graph, LAYERS, self.repeated)
        self.best = Best(tuple(costs))
        self.made = 0  # programs
        self.unlimited: dict[str, float] = {}  # by cluster, seconds of the fastest baseline if memory had no limit
        self.split, self.whole = cache(self._split), cache(self._whole)
        self.seconds, self.regions = cache(self._seconds), cache(self._regions)

    def baselines(self) -> list[Tried]:
        """Find the best plans of Megatron-like and of Alpa-like systems; return those that do not fit."""
        waiting = [tried for axes in self.configurations() for how in SYSTEMS for tried in self.plain(how, axes)]
        self.recompute(waiting)
        return waiting

    def configurations(self) -> Iterator[dict[str, int]]:
        """Yield sizes of dp, tp and pp, in powers of two, that may hold what is at rest."""
        sizes = [2**i for i in range(self.gpus.bit_length())]
        for tp, pp in product(sizes, STAGES):
            if self.gpus % (tp * pp) == 0 and self.parameters * STATE / (tp * pp) <= MEMORY:
                yield {DP: self.gpus // (tp * pp), TP: tp, PP: pp}

    def plain(self, how: str, axes: Axes) -> Iterator[Tried]:
        """Measure dp x tp x pp with 1F1B, one sample in a micro-batch; yield it where it does not fit."""
        systems = SYSTEMS[how]
        if axes[TP] == 1:  # the same plan in both spaces
            systems = (MEGATRON, ALPA) if how == "megatron" else ()
        if ALPA in systems and axes[PP] == 1:
            systems = (*systems, WITHOUT_PIPELINE)
        if systems:
            text = f"dp={axes[DP]} tp={axes[TP]} pp={axes[PP]}"
            policy = {"megatron": "megatron", "operators": "pipeline"}[how]
            yield from self.tried(systems, policy, axes, text, self.measured_plain(how, axes))

    def measured_plain(self, how: str, axes: Axes) -> Priced | None:
        """Price a plan without recomputation."""
        if axes[PP] == 1:
            return self.whole(how, axes[TP])
        return self.measured(self.with_axes(axes, (*self.split(how, axes[TP]), *self.stages(how, axes))))

    def _whole(self, how: str, tp: int) -> Priced | None:
        """Price a plan without recomputation and without a pipeline."""
        return self.measured(self.with_axes({DP: self.gpus // tp, TP: tp}, self.split(how, tp)))

    def with_axes(self, axes: Axes, steps: Sequence[Step]) -> Plan:
        """Return a plan with these axes, and one sample in a micro-batch."""
        mesh = tuple((name, size) for name, size in axes.items() if size > 1)
        return Plan(mesh, tuple(steps), self.model.batch // axes.get(DP, 1))

    def tried(
        self, systems: tuple[str, ...], policy: str, axes: Axes, text: str, priced: Priced | None
    ) -> Iterator[Tried]:
        """Note a plan without recomputation where it fits; yield it where it does not, and may with recomputation."""
        if priced is None:
            return
        for name, prediction in priced.prediction.items() if systems != (OURS,) else ():
            self.unlimited[name] = min(self.unlimited.get(name, inf), prediction.seconds)
        tried = Tried(systems, policy, axes, text, priced)
        if priced.fits:
            self.fits(tried, text, priced)
        elif max(priced.at_rest) <= MEMORY:
            yield tried

    def measured(self, plan: Plan) -> Priced | None:
        """Price a plan; None where it is not legal."""
        self.made += 1
        try:
            return measure(self.graph, self.known, plan, self.costs)
        except NnscalerError:
            return None

    def fits(self, tried: Tried, text: str, priced: Priced) -> None:
        """Note a plan that fits, of the kind of another one."""
        small = priced.with_micro_batches(SMALL // tried.axes[DP]) if tried.axes[DP] <= SMALL else {}
        for system in tried.systems:
            memory = max(priced.memory)
            self.best.add(Simulated(system, tried.policy, text, tried.axes, priced.parts(), memory, small))

    def recompute(self, waiting: Sequence[Tried]) -> None:
        """Recompute all layers of plans that do not fit, where that may make one of them the best of its systems."""
        layers = [RecomputeStep(layer.operations) for layer in self.layers]
        again = {name for layer in layers for name in layer.operations}
        bounds = [(tried.priced.bound(again), tried) for tried in waiting]
        for bound, tried in sorted(bounds, key=lambda pair: min(pair[0].values())):
            if self.best.may_be(tried.systems, bound):
                priced = self.measured(replace(tried.plan, steps=(*tried.plan.steps, *layers)))
                if priced is not None and priced.fits:
                    self.fits(tried, f"{tried.text}, recompute", priced)

    def coshard(self, waiting: Sequence[Tried]) -> None:
        """Run the largest regions of plans that do not fit in pieces, other layers recomputed or not."""
        cases = []
        for tried, again in product(waiting, (False, True)):
            repeated = {name for step in self.in_pieces(tried, PIECES[-1], again) for name in step.operations}
            cases.append((tried.priced.bound(repeated), tried, again))
        for bound, tried, again in sorted(cases, key=lambda case: min(case[0].values())):
            ours = replace(tried, systems=(OURS,), policy="coshard")
            if not self.best.may_be((OURS,), bound) or not self.piecewise(ours, PIECES[-1], again):
                continue
            for pieces in PIECES[:-1]:
                if self.piecewise(ours, pieces, again):
                    break

    def piecewise(self, tried: Tried, pieces: int, again: bool) -> bool:
        """Run the largest regions of a plan in so many pieces; return whether it fits."""
        more = self.in_pieces(tried, pieces, again)
        regions = sum(isinstance(step, ChunkStep) for step in more)
        priced = self.measured(replace(tried.plan, steps=(*tried.plan.steps, *more))) if regions else None
        if priced is None or not priced.fits:
            return False
        text = f"{tried.text}{', recompute' * again}, {regions} regions in {pieces} pieces"
        self.fits(tried, text, priced)
        return True

    def in_pieces(self, tried: Tried, pieces: int, again: bool) -> list[ChunkStep | RecomputeStep]:
        """Return steps that run the largest regions in pieces, and recompute the layers without any."""
        regions = self.regions(tried.axes[DP], pieces)
        cut = {name for region in regions for name in region.operations}
        layers = [RecomputeStep(layer.operations) for layer in self.layers if cut.isdisjoint(layer.operations)]
        return [*(layers if again else []), *regions]

    def _regions(self, dp: int, pieces: int) -> list[ChunkStep]:
        """Return the largest regions in so many pieces; empty where none can be cut."""
        try:
            return coshard_steps(self.graph, self.known, self.with_axes({DP: dp}, ()), pieces)
        except NnscalerError:
            return []

    def interlaced(self) -> None:
        """Find the best interlaced pipelines."""
        waiting: list[Tried] = []
        sizes = [2**i for i in range(self.gpus.bit_length())]
        for tp, pp in product(sizes, STAGES[1:]):
            if self.gpus % (tp * pp) == 0 and self.parameters * STATE / (tp * pp) <= MEMORY:
                axes = {DP: self.gpus // (tp * pp), TP: tp, PP: pp}
                given = {name: size for name, size in axes.items() if size > 1}
                batches = self.model.batch // axes[DP]
                try:
                    plan = make_plan(self.graph, self.known, given, schedule="interlaced", micro_batches=batches)
                except NnscalerError:
                    continue
                text = f"dp={axes[DP]} tp={tp} pp={pp}, interlaced"
                waiting += self.tried((OURS,), "interlaced", axes, text, self.measured(plan))
        self.recompute(waiting)

    def _split(self, how: str, tp: int) -> tuple[Step, ...]:
        """Return the steps of an operator-wise search on tp ("operators"), or of Megatron's layout ("megatron"): legal
        beside one sample in a micro-batch, on however many ranks of dp."""
        if tp == 1:
            return ()
        if how == "megatron":
            kept, plan = megatron(self.graph, self.known), self.with_axes({TP: tp}, ())
            return constrained_tensor_parallel(self.graph, self.known, plan, tp, kept)
        return make_plan(self.graph, self.known, {TP: tp}, micro_batches=self.model.batch).steps

    def stages(self, how: str, axes: Axes) -> list[AssignStep]:
        """Cut the layers into stages whose seconds, on the first cluster, are as equal as can be."""
        if axes[PP] == 1:
            return []
        seconds = self.seconds(how, axes[TP])
        anchored = [op.name for op in self.graph.operations if op.name not in self.repeated]
        index = {name: i for i, name in enumerate(anchored)}
        starts = [index[layer.operations[0]] for layer in self.layers[1:]]
        weights = [seconds.get(name, 0.0) for name in anchored]
        cuts = balanced_cuts(weights, starts, range(len(starts)), [0] * len(starts), axes[PP])
        assert cuts is not None, (self.model.name, axes)
        bounds = pairwise((0, *cuts, len(anchored)))
        placed = {name: stage for stage, (start, end) in enumerate(bounds) for name in anchored[start:end]}
        groups: dict[tuple[int, ...], list[str]] = {}
        for name, where in with_repeated(self.graph, placed).items():
            groups.setdefault(where, []).append(name)
        return [AssignStep(tuple(names), where) for where, names in sorted(groups.items())]

    def _seconds(self, how: str, tp: int) -> Mapping[str, float]:
        """Return by operation its seconds, forward and backward, with the conversions before it."""
        found = self.whole(how, tp)
        assert found is not None, (self.model.name, how, tp)
        prices = next(iter(found.prediction.values())).prices[0]
        total: dict[str, float] = {}
        waiting = 0.0
        statements = found.program.communicated.stages[0].forward
        for statement, ahead, behind in zip(statements, prices.forward, prices.backward, strict=True):
            waiting += ahead + behind
            if isinstance(statement, Compute):
                total[statement.operation.name], waiting = waiting, 0.0
        return total
