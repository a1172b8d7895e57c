"""The spaces of plans that `paper.py` compares, and the simulation of a plan on several clusters.

Every plan is made, its program's statements are priced one by one and its schedule is simulated: nothing is taken from
the planner's tables. A plan that does not fit into the memory of a rank is no plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import Any

from paper_models import PaperModel

from nnscaler.communication.communicated_graph import Compute, again_in, kept_inputs
from nnscaler.communication.profile_memory import stage_memory
from nnscaler.errors import NnscalerError
from nnscaler.ir.graph import Graph, element_bytes
from nnscaler.ir.layout import local_shape
from nnscaler.ir.signature import Signature, signatures
from nnscaler.performance.predict import Prediction, Programmed, programmed
from nnscaler.planning.constraints import megatron
from nnscaler.planning.coshard import coshard_steps
from nnscaler.planning.cost.model import CostModel
from nnscaler.planning.policies import make_plan
from nnscaler.planning.ready import constrained_tensor_parallel
from nnscaler.transform.balance import balanced_cuts
from nnscaler.transform.partition_stages import random_operators, repeated_operations, with_repeated
from nnscaler.transform.plan import DP, PP, TP, AssignStep, Plan, RecomputeStep, Step
from nnscaler.transform.select import layers_of

MEMORY = 32 * 2**30  # bytes of a rank
STATE = 18  # bytes of a parameter in half precision, its gradient and its optimizer states
STAGES = (1, 2, 4)  # of pipelines: the paper's experiments have four at most
LAYERS = 5  # numbered modules that are layers, at least: the blocks of Swin, and not its four stages
PIECES = (2, 8)

Costs = Mapping[str, CostModel]  # by cluster


@dataclass(frozen=True)
class Simulated:
    """A plan that fits.

    system    whose space it is from
    policy    the ready policy that has its kind
    plan      in words
    axes      sizes of its axes
    seconds   of a step, by cluster
    memory    bytes of the rank that holds most
    """

    system: str
    policy: str
    plan: str
    axes: Mapping[str, int]
    seconds: Mapping[str, float]
    memory: float


@dataclass(frozen=True)
class Priced:
    """Figures of a program, before its schedule is simulated.

    prediction   by cluster
    memory       by pipeline device, bytes
    program      itself
    """

    prediction: Mapping[str, Prediction]
    memory: Sequence[float]
    program: Programmed


def measure(graph: Graph, known: Mapping[str, Signature], plan: Plan, costs: Costs) -> Priced:
    """Price a plan. Raises NnscalerError for one that is not legal for the graph."""
    program = programmed(graph, known, plan)
    memory = [0.0] * plan.devices
    for stage in stage_memory(program.communicated, program.order):
        memory[stage.role] += stage.total
    most = [0.0] * plan.devices
    for stage_program in program.communicated.stages:
        again = again_bytes(program.communicated.partitioned.graph, stage_program)
        for device in stage_program.stage.devices:
            most[device] = max(most[device], again)
    held = [here + again for here, again in zip(memory, most, strict=True)]
    return Priced({name: program.predicted(cost) for name, cost in costs.items()}, held, program)


def again_bytes(graph: Graph, program: Any) -> float:
    """Return the bytes that the largest recomputed layer keeps while it runs again, which `stage_memory` leaves out."""
    inside: dict[str, str] = {}
    kept: dict[str, dict[str, int]] = {}
    for i, statement in enumerate(program.forward):
        group = again_in(graph, program.forward, i)
        if not isinstance(statement, Compute) or group is None or statement.placement.chunk is not None:
            continue
        inside.update((v.variable, group) for v in statement.outputs if v is not None)
        for version in kept_inputs(graph, statement):
            if inside.get(version.variable) == group:
                tensor, shape = graph.tensors[version.tensor], 1
                for size in local_shape(version.layout, program.stage.sizes, graph.tensors[version.tensor].shape):
                    shape *= size
                kept.setdefault(group, {})[version.variable] = shape * element_bytes(tensor.dtype)
    return float(max((sum(found.values()) for found in kept.values()), default=0))


class Space:
    """The plans of one model of one size on so many GPUs."""

    def __init__(self, model: PaperModel, gpus: int, costs: Costs) -> None:
        self.model, self.gpus, self.costs = model, gpus, costs
        self.graph = model.graph(*model.sizes[gpus])
        self.known = signatures(self.graph)
        self.parameters = sum(t.elements for t in self.graph.with_role("parameter"))
        self.repeated = repeated_operations(self.graph, random_operators(self.known))
        self.layers = layers_of(self.graph, LAYERS, self.repeated)
        self._tp: dict[tuple[str, int, int], tuple[Step, ...]] = {}
        self._seconds: dict[tuple[str, int], dict[str, float]] = {}
        self.tried = 0

    def configurations(self) -> Iterator[dict[str, int]]:
        """Yield sizes of dp, tp and pp, in powers of two, that may hold what is at rest."""
        sizes = [2**i for i in range(self.gpus.bit_length())]
        for tp, pp in product(sizes, STAGES):
            if self.gpus % (tp * pp) == 0 and self.parameters * STATE / (tp * pp) <= MEMORY:
                yield {DP: self.gpus // (tp * pp), TP: tp, PP: pp}

    def split(self, how: str, axes: Mapping[str, int]) -> tuple[Step, ...]:
        """Return the steps of an operator-wise search on tp ("operators"), or of Megatron's layout ("megatron"): legal
        beside dp and micro-batches."""
        dp, tp = axes[DP], axes[TP]
        if tp == 1:
            return ()
        if (how, dp, tp) not in self._tp:
            sizes = {name: size for name, size in ((DP, dp), (TP, tp)) if size > 1}
            micro_batches = self.model.batch // dp
            if how == "megatron":
                kept, plan = megatron(self.graph, self.known), Plan(tuple(sizes.items()), (), micro_batches)
                steps = constrained_tensor_parallel(self.graph, self.known, plan, tp, kept)
            else:
                steps = make_plan(self.graph, self.known, sizes, micro_batches=micro_batches).steps
            self._tp[how, dp, tp] = steps
        return self._tp[how, dp, tp]

    def plans(self, how: str) -> Iterator[tuple[str, dict[str, int], Plan]]:
        """Yield (text, sizes, plan) of dp x tp x pp with 1F1B, one sample in a micro-batch, recomputed or not."""
        for axes in self.configurations():
            mesh = tuple((name, size) for name, size in axes.items() if size > 1)
            micro_batches = self.model.batch // axes[DP]
            stages = self.stages(how, axes)
            for again in (False, True):
                steps = [*self.split(how, axes), *stages]
                text = f"dp={axes[DP]} tp={axes[TP]} pp={axes[PP]}" + ", recompute" * again
                steps += [RecomputeStep(layer.operations) for layer in self.layers] if again else []
                yield text, axes, Plan(mesh, tuple(steps), micro_batches)

    def stages(self, how: str, axes: Mapping[str, int]) -> list[AssignStep]:
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

    def seconds(self, how: str, tp: int) -> Mapping[str, float]:
        """Return by operation its seconds, forward and backward, with the conversions before it."""
        if (how, tp) not in self._seconds:
            plan = Plan(((TP, tp),), self.split(how, {DP: 1, TP: tp}), self.model.batch)
            found = measure(self.graph, self.known, plan, dict([next(iter(self.costs.items()))]))
            prices = next(iter(found.prediction.values())).prices[0]
            total: dict[str, float] = {}
            waiting = 0.0
            statements = found.program.communicated.stages[0].forward
            for statement, ahead, behind in zip(statements, prices.forward, prices.backward, strict=True):
                waiting += ahead + behind
                if isinstance(statement, Compute):
                    total[statement.operation.name], waiting = waiting, 0.0
            self._seconds[how, tp] = total
        return self._seconds[how, tp]

    def simulated(self, system: str, policy: str, text: str, axes: Mapping[str, int], plan: Plan) -> Simulated | None:
        """Simulate a plan; None where it does not fit, or is not legal."""
        self.tried += 1
        try:
            found = measure(self.graph, self.known, plan, self.costs)
        except NnscalerError:
            return None
        if max(found.memory) > MEMORY:
            return None
        seconds = {name: prediction.seconds for name, prediction in found.prediction.items()}
        return Simulated(system, policy, text, axes, seconds, max(found.memory))

    def baseline(self, system: str, policy: str, how: str) -> Iterator[Simulated | None]:
        for text, axes, plan in self.plans(how):
            yield self.simulated(system, policy, text, axes, plan)

    def coshard(self) -> Iterator[Simulated | None]:
        """Yield the plans of both baselines with the largest regions in pieces, other layers recomputed or not."""
        for how, pieces in product(("megatron", "operators"), PIECES):
            for text, axes, plan in self.plans(how):
                if how == "operators" and axes[TP] == 1:
                    continue  # the same
                regions = coshard_steps(self.graph, self.known, plan, pieces)
                cut = {name for region in regions for name in region.operations}
                kept = [s for s in plan.steps if not (isinstance(s, RecomputeStep) and cut.intersection(s.operations))]
                chunked = replace(plan, steps=(*kept, *regions))
                said = f"{text}, {len(regions)} regions in {pieces} pieces"
                yield self.simulated("ours", "coshard", said, axes, chunked)

    def interlaced(self) -> Iterator[Simulated | None]:
        """Yield interlaced pipelines."""
        for axes in self.interlaced_axes():
            try:
                plan = make_plan(
                    self.graph,
                    self.known,
                    {name: size for name, size in axes.items() if size > 1},
                    schedule="interlaced",
                    micro_batches=self.model.batch // axes[DP],
                )
            except NnscalerError:
                continue
            for again in (False, True):
                layers = [RecomputeStep(layer.operations) for layer in self.layers] if again else []
                text = f"dp={axes[DP]} tp={axes[TP]} pp={axes[PP]}, interlaced" + ", recompute" * again
                yield self.simulated("ours", "interlaced", text, axes, replace(plan, steps=(*plan.steps, *layers)))

    def interlaced_axes(self) -> Iterator[dict[str, int]]:
        sizes = [2**i for i in range(self.gpus.bit_length())]
        for tp, pp in product(sizes, STAGES[1:]):
            if self.gpus % (tp * pp) == 0 and self.parameters * STATE / (tp * pp) <= MEMORY:
                yield {DP: self.gpus // (tp * pp), TP: tp, PP: pp}
