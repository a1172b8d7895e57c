"""Problems from placements: which device has which stage, and what the stages cost.

The shapes are those of Tessel (Lin et al., HPCA 2024), which take their names from the way of a micro-batch over the
devices; a stage in several places at once is run by all of these devices together.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
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


def folded(devices: int) -> tuple[tuple[int, ...], ...]:
    """Return the devices of stages that go down and come back up, two on each device (ZB-V)."""
    return tuple((d,) for d in (*range(devices), *reversed(range(devices))))


def equal_stages(
    devices: Sequence[tuple[int, ...]], costs: Sequence[float] = (1.0, 2.0, 1.0), memory: float = 1.0
) -> StagePlan:
    """Return stages that cost the same (F, B, and its part W) and hold the same."""
    forward, backward, weights = costs
    count = len(devices)
    return StagePlan(tuple(devices), PassCosts.alike(count, forward, backward, weights), (memory,) * count)


def with_shared(
    devices: int, after: Collection[int], costs: Sequence[float] = (1.0, 2.0), shared: Sequence[float] = (1.0, 1.0)
) -> StagePlan:
    """Return a pipeline over all devices with stages in between that all of them run together, such as an embedding.

    `after`: how many stages of the pipeline come before each shared one; `costs` and `shared`: of F and B. Shared
    stages hold nothing. M shape: `after=(0,)`; NN shape: `(0, devices // 2)`; embedding and head: `(0, devices)`.
    """
    stages: list[tuple[int, ...]] = []
    for device in range(devices + 1):
        stages += [tuple(range(devices))] * sum(1 for place in after if place == device)
        stages += [(device,)] if device < devices else []
    alone = [len(stage) == 1 or devices == 1 for stage in stages]
    forward, backward = ([costs[k] if one else shared[k] for one in alone] for k in (0, 1))
    memory = tuple(float(one) for one in alone)
    return StagePlan(tuple(stages), PassCosts(forward, backward, [0.0] * len(stages)), memory)


def both_ways(devices: int, costs: Sequence[float] = (1.0, 2.0)) -> StagePlan:
    """Return two pipelines over the same devices in opposite directions (X shape, as in Chimera): a micro-batch here is
    one of each."""
    stages = (*looped(devices), *reversed(looped(devices)))
    plan = equal_stages(stages, (*costs, 0.0))
    return replace(plan, edges=frozenset(edge for edge in chain(2 * devices) if edge[0] != devices - 1))


def recycled(devices: int, forwards: int = 3, costs: Sequence[float] = (1.0, 2.0)) -> StagePlan:
    """Return a pipeline that a micro-batch runs through several times and only the last time backward (3F1B). The
    earlier rounds hold nothing."""
    plan = equal_stages(looped(devices, forwards), (*costs, 0.0))
    early = devices * (forwards - 1)
    return replace(plan, memory=(0.0,) * early + (1.0,) * devices, frozen=frozenset(range(early)))
