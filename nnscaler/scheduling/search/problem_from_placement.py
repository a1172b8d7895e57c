"""Problems from placements: which device has which stage, and what the stages cost.

A stage in several places at once is run by all of these devices together, as in Tessel (Lin et al., HPCA 2024).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

from nnscaler.errors import NnscalerError
from nnscaler.instructions import Kind, StageEdge
from nnscaler.scheduling.dependencies import chain
from nnscaler.scheduling.search.problem import Dependency, PassBlock, ScheduleProblem, make_problem
from nnscaler.scheduling.timeline import PassCosts


@dataclass(frozen=True, slots=True)
class StagePlan:
    """Stages on devices, and what they cost.

    devices   by stage: all devices that run it
    costs     of its passes
    memory    by stage: bytes that a micro-batch holds on each of its devices, from F until its backward has ended
    kept      by stage: the part of `memory` that W still needs; empty: all of it
    edges     which stage feeds which; None: each the next one
    frozen    stages without a backward: nothing needs their gradients
    """

    devices: tuple[tuple[int, ...], ...]
    costs: PassCosts
    memory: tuple[float, ...]
    kept: tuple[float, ...] = ()
    edges: frozenset[StageEdge] | None = None
    frozen: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        stages = len(self.devices)
        for name, given in (("costs", self.costs.forward), ("memory", self.memory), ("kept", self.kept or self.memory)):
            if len(given) != stages:
                raise NnscalerError(
                    "bad_schedule_problem",
                    f"schedule problem: {name} of {len(given)} stages, and {stages} stages on devices",
                    help="give one entry for every stage",
                )


def pipeline_problem(
    plan: StagePlan,
    micro_batches: int,
    limits: Sequence[float] | float = inf,
    *,
    split: bool = False,
    lag: float = 0.0,
) -> ScheduleProblem:
    """Return the problem of scheduling these stages.

    `split`: backward in its two halves I and W; `lag`: time of a message from one device to another. Raises
    NnscalerError("bad_schedule_problem") that names what is wrong.
    """
    edges = chain(len(plan.devices)) if plan.edges is None else plan.edges
    blocks = _blocks(plan, split)
    place = {(block.kind, block.stage): i for i, block in enumerate(blocks)}
    gradient: Kind = "I" if split else "B"
    found: list[Dependency] = []

    def add(before: tuple[Kind, int], after: tuple[Kind, int]) -> None:
        if before in place and after in place:
            crosses = plan.devices[before[1]] != plan.devices[after[1]]
            found.append(Dependency(place[before], place[after], lag if crosses else 0.0))

    for producer, consumer in sorted(edges):
        add(("F", producer), ("F", consumer))
        add((gradient, consumer), (gradient, producer))
    for stage in range(len(plan.devices)):
        add(("F", stage), (gradient, stage))
        add(("I", stage), ("W", stage))
    return make_problem(blocks, found, micro_batches, limits)


def _blocks(plan: StagePlan, split: bool) -> list[PassBlock]:
    """Return the passes of all stages: what F takes, backward gives back."""
    costs, blocks = plan.costs, []
    for stage, devices in enumerate(plan.devices):
        memory = plan.memory[stage]
        kept = plan.kept[stage] if plan.kept else memory
        forward = PassBlock("F", stage, devices, costs.forward[stage], memory, 0.0)
        if stage in plan.frozen:
            blocks.append(replace(forward, frees=memory))
            continue
        blocks.append(forward)
        if split:
            inputs = costs.backward[stage] - costs.weights[stage]
            # what W needs may be more than the forward kept: gradients have arrived by then
            blocks.append(PassBlock("I", stage, devices, inputs, max(kept - memory, 0.0), max(memory - kept, 0.0)))
            blocks.append(PassBlock("W", stage, devices, costs.weights[stage], 0.0, kept))
        else:
            blocks.append(PassBlock("B", stage, devices, costs.backward[stage], 0.0, memory))
    return blocks


def looped(devices: int, chunks: int = 1) -> tuple[tuple[int, ...], ...]:
    """Return the devices of `chunks` rounds over all devices: a plain pipeline, or an interleaved one."""
    return tuple((stage % devices,) for stage in range(devices * chunks))


def equal_stages(
    devices: Sequence[tuple[int, ...]], costs: Sequence[float] = (1.0, 2.0, 1.0), memory: float = 1.0
) -> StagePlan:
    """Return stages that cost the same (F, B, and its part W) and hold the same."""
    forward, backward, weights = costs
    count = len(devices)
    return StagePlan(tuple(devices), PassCosts.alike(count, forward, backward, weights), (memory,) * count)
