"""The spaces of `paper.py` for a model with recycling, by few blocks: those of a stage are all alike.

A model of 128 blocks that run three times is large, and its planner does not search recycling. So each plan is made and
simulated with two and with four blocks; the seconds of a pass and the bytes of a rank are linear in their number, and
the schedule is simulated with the figures of all of them.

Enumerated are dp with each stage of ZeRO; dp x tp with what an operator-wise search finds on tp; pipelines of two
stages, as the interleaved schedule runs them, each run of the layers a stage of its own, and as 3F1B does. A plan that
fits without recomputation is not made with it. Of stages of ZeRO the first is made, which exchanges as much as data
parallelism without ZeRO and holds less, and the others, which exchange more, only where that does not fit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from math import inf

from paper_models import PaperModel
from paper_simulated import MEMORY, Costs, Parts, Priced, Simulated, measure, parts_of, stage_parts

from nnscaler.errors import NnscalerError
from nnscaler.ir.graph import Graph
from nnscaler.ir.operation_annotations import Signature, signatures
from nnscaler.planning.plan_from_axes import make_plan
from nnscaler.planning.stages_of_recycling_models import runs_of
from nnscaler.scheduling.timeline import PassCosts, simulate
from nnscaler.transform.plan import DP, PP, TP, Plan, RecomputeStep, Step

DEEPSPEED, ALPA, MEGATRON, OURS = "DeepSpeed-like", "Alpa-like", "Megatron-like", "ours"
STAGES = 2  # of pipelines
FEW, MORE = 2, 4  # blocks
LARGEST_TP = 4

Sizes = Mapping[str, int]


@cache
def graph_of(model: PaperModel, blocks: int, widths: tuple[int, ...]) -> tuple[Graph, Mapping[str, Signature]]:
    """Return the model with so many blocks, and its signatures: on several numbers of GPUs it may be the same."""
    graph = model.graph(blocks, *widths)
    return graph, signatures(graph)


@cache
def split_of(model: PaperModel, blocks: int, widths: tuple[int, ...], tp: int) -> tuple[Step, ...]:
    """Return the steps of an operator-wise search on tp, legal beside one sample in a micro-batch."""
    if tp == 1:
        return ()
    return make_plan(*graph_of(model, blocks, widths), {TP: tp}, micro_batches=model.batch).steps


class RecycledSpace:
    """The plans of a model with recycling on so many GPUs."""

    def __init__(self, model: PaperModel, gpus: int, costs: Costs) -> None:
        self.model, self.gpus, self.costs = model, gpus, costs
        self.blocks, *widths = model.sizes[gpus]
        self.widths = tuple(widths)
        self.made = 0  # programs
        self.unlimited: dict[str, float] = {}  # by cluster, seconds of the fastest baseline if memory had no limit
        self.found: list[Simulated] = []

    def baselines(self) -> None:
        """Find data parallelism with ZeRO, operator-wise splits, and pipelines without 3F1B."""
        self._zero(DEEPSPEED, "data", {DP: self.gpus}, (1, 2, 3), None)
        tp = 2
        while tp <= min(self.gpus, LARGEST_TP):
            self._plan(ALPA, "pipeline", {DP: self.gpus // tp, TP: tp}, None)
            tp *= 2
        self._zero(MEGATRON, "pipeline", {DP: self.gpus // STAGES, PP: STAGES}, (1,), "interleaved")

    def recycled(self) -> None:
        """Find 3F1B pipelines, whose dp shards optimizer states."""
        self._zero(OURS, "3f1b", {DP: self.gpus // STAGES, PP: STAGES}, (1,), "3f1b")

    def _zero(self, system: str, policy: str, sizes: Sizes, stages: Sequence[int], schedule: str | None) -> None:
        for zero in stages:
            sharded = {"zero": zero} if sizes[DP] > 1 else {}
            if self._plan(system, policy, {**sizes, **sharded}, schedule):
                break

    def _plan(self, system: str, policy: str, sizes: Sizes, schedule: str | None) -> bool:
        """Note a plan, recomputed where it does not fit otherwise; return whether it fits."""
        sizes = {name: size for name, size in sizes.items() if size > 1 or name == "zero"}
        text = " ".join(f"{name}={size}" for name, size in {DP: 1, TP: 1, PP: 1, **sizes}.items())
        text += f", {schedule}" * (schedule is not None)
        for again in (False, True):
            said = Simulated(system, policy, text + ", recompute" * again, sizes, {}, inf, {})
            found = self._extended(sizes, again, schedule, said)
            if found is not None:
                self.found.append(found)
                return True
        return False

    def _measured(self, sizes: Sizes, blocks: int, again: bool, schedule: str | None) -> Priced:
        graph, known = graph_of(self.model, blocks, self.widths)
        tp, others = sizes.get(TP, 1), {name: size for name, size in sizes.items() if name != TP}
        batches = self.model.batch // sizes.get(DP, 1)
        plan: Plan = make_plan(graph, known, others, schedule=schedule, micro_batches=batches)
        layers = [RecomputeStep(layer.operations) for layer in runs_of(graph)[-1]] if again else []
        steps = (*split_of(self.model, blocks, self.widths, tp), *plan.steps, *layers)
        mesh = tuple((name, sizes[name]) for name in (DP, TP, PP) if name in sizes)
        self.made += 1
        return measure(graph, known, replace(plan, mesh=mesh, steps=steps), self.costs)

    def _extended(self, sizes: Sizes, again: bool, schedule: str | None, said: Simulated) -> Simulated | None:
        """Return a plan with the figures of all blocks; None where they do not fit, or it is not legal."""
        try:
            few, more = (self._measured(sizes, blocks, again, schedule) for blocks in (FEW, MORE))
        except NnscalerError:
            return None
        often = (self.blocks - FEW) / (MORE - FEW)

        def linear(one: Sequence[float], two: Sequence[float]) -> list[float]:
            return [a + often * (b - a) for a, b in zip(one, two, strict=True)]

        found = {}
        for name, one in few.prediction.items():
            two = more.prediction[name]
            fields = ("forward", "backward", "weights", "before", "after")
            forward, backward, weights, before, after = (linear(getattr(one, f), getattr(two, f)) for f in fields)
            costs = PassCosts(forward, backward, weights)
            timeline = simulate(few.program.order, few.program.communicated.edges, costs, before)
            stages = [
                Parts(*linear((a.computing, a.again, a.exchange), (b.computing, b.again, b.exchange)))
                for a, b in zip(_stages(few, name), _stages(more, name), strict=True)
            ]
            found[name] = parts_of(timeline, stages, tuple(zip(before, after, strict=True)))
            if said.system != OURS and not again:
                self.unlimited[name] = min(self.unlimited.get(name, inf), found[name].total)
        memory = max(linear(few.memory, more.memory))
        return replace(said, parts=found, memory=memory) if memory <= MEMORY else None


def _stages(priced: Priced, cluster: str) -> Iterator[Parts]:
    return map(stage_parts, priced.program.communicated.stages, priced.prediction[cluster].prices)
