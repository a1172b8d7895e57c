"""The spaces of `paper.py` for a model with recycling, by few blocks: those of a stage are all alike.

A model of 128 blocks that run three times is large, and its planner does not search recycling. So each plan is made and
simulated with one block and with two blocks in a stage; the seconds of a pass and the bytes of a rank are linear in
their number, and the schedule is simulated with the figures of all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from paper_models import PaperModel
from paper_spaces import MEMORY, Costs, Priced, Simulated, measure

from nnscaler.errors import NnscalerError
from nnscaler.ir.graph import Graph
from nnscaler.ir.signature import Signature, signatures
from nnscaler.planning.policies import make_plan
from nnscaler.planning.recycling import runs_of
from nnscaler.scheduling.timeline import PassCosts, simulate
from nnscaler.transform.plan import DP, PP, TP, Plan, RecomputeStep

STAGES = (1, 2)  # of pipelines


class RecycledSpace:
    """The plans of a model with recycling on so many GPUs."""

    def __init__(self, model: PaperModel, gpus: int, costs: Costs) -> None:
        self.model, self.gpus, self.costs = model, gpus, costs
        self.blocks, *self.widths = model.sizes[gpus]
        self.tried = 0
        self._graphs: dict[int, tuple[Graph, Mapping[str, Signature]]] = {}

    def graph(self, blocks: int) -> tuple[Graph, Mapping[str, Signature]]:
        """Return the model with so many blocks, and its signatures."""
        if blocks not in self._graphs:
            graph = self.model.graph(blocks, *self.widths)
            self._graphs[blocks] = graph, signatures(graph)
        return self._graphs[blocks]

    def deepspeed(self) -> Iterator[Simulated | None]:
        """Yield data parallelism with every stage of ZeRO, recomputed or not."""
        for zero in range(4):
            yield from self._both("DeepSpeed-like", "data", {DP: self.gpus, TP: 1, PP: 1}, zero, None)

    def recycled(self) -> Iterator[Simulated | None]:
        """Yield 3F1B pipelines, whose dp keeps whole parameters or shards optimizer states."""
        for pp in STAGES[1:]:
            dp = self.gpus // pp
            for zero in (0, 1) if dp > 1 else (0,):
                yield from self._both("ours", "3f1b", {DP: dp, TP: 1, PP: pp}, zero, "3f1b")

    def _both(
        self, system: str, policy: str, axes: Mapping[str, int], zero: int, schedule: str | None
    ) -> Iterator[Simulated | None]:
        for again in (False, True):
            text = f"dp={axes[DP]} tp={axes[TP]} pp={axes[PP]}" + f" zero={zero}" * (zero > 0)
            text += f", {schedule}" * (schedule is not None) + ", recompute" * again
            sizes = {name: size for name, size in axes.items() if size > 1} | ({"zero": zero} if zero else {})
            self.tried += 1
            try:
                few, more = (self._measured(sizes, n * axes[PP], again, schedule) for n in (1, 2))
            except NnscalerError:
                yield None
                continue
            yield self._extended(few, more, Simulated(system, policy, text, sizes, {}, 0.0), axes[PP])

    def _measured(self, sizes: Mapping[str, int], blocks: int, again: bool, schedule: str | None) -> Priced:
        graph, known = self.graph(blocks)
        micro_batches = self.model.batch // sizes.get(DP, 1)
        plan: Plan = make_plan(graph, known, sizes, schedule=schedule, micro_batches=micro_batches)
        layers = [RecomputeStep(layer.operations) for layer in runs_of(graph)[-1]] if again else []
        return measure(graph, known, replace(plan, steps=(*plan.steps, *layers)), self.costs)

    def _extended(self, few: Priced, more: Priced, plan: Simulated, stages: int) -> Simulated | None:
        """Return a plan with the figures of all blocks; None where they do not fit."""
        blocks = self.blocks // stages
        memory = linear(few.memory, more.memory, blocks)
        if max(memory) > MEMORY:
            return None
        seconds = {}
        for name, one in few.prediction.items():
            two = more.prediction[name]
            found: dict[str, Any] = {
                field: linear(getattr(one, field), getattr(two, field), blocks)
                for field in ("forward", "backward", "weights", "before", "after")
            }
            costs = PassCosts(found["forward"], found["backward"], found["weights"])
            timeline = simulate(few.program.order, few.program.communicated.edges, costs, found["before"])
            ends = zip(timeline.rows, found["after"], strict=True)
            seconds[name] = max(row[-1].stop + after for row, after in ends)
        return replace(plan, seconds=seconds, memory=max(memory))


def linear(one: Sequence[float], two: Sequence[float], number: int) -> list[float]:
    """Return what is linear in a number, from its values at one and two."""
    return [a + (number - 1) * (b - a) for a, b in zip(one, two, strict=True)]
