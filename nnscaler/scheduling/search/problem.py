"""The problem of a schedule, as pure data: the passes of one micro-batch, what they wait for, and what they occupy.

Everything that a search must know is here and nothing else: no model, no tensors. All micro-batches are alike, so the
blocks of one describe them all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from graphlib import CycleError, TopologicalSorter
from math import inf, isfinite

from nnscaler.errors import NnscalerError
from nnscaler.instructions import FORM, Instruction, Kind, StageEdge
from nnscaler.scheduling.dependencies import chain
from nnscaler.scheduling.timeline import PassCosts


@dataclass(frozen=True, slots=True)
class PassBlock:
    """A pass of one micro-batch through one stage.

    kind        F forward, B backward, I and W the two halves of a backward
    stage       index
    devices     all that run it, together
    duration    unit of time: seconds, or any other
    allocates   bytes taken on each of its devices when it starts
    frees       bytes given back on each of its devices when it ends
    """

    kind: Kind
    stage: int
    devices: tuple[int, ...]
    duration: float
    allocates: float = 0.0
    frees: float = 0.0

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}"

    def at(self, micro_batch: int) -> Instruction:
        """Return the instruction that runs this block for a micro-batch."""
        return Instruction(self.kind, self.stage, (micro_batch,))


@dataclass(frozen=True, slots=True)
class Dependency:
    """A block waits for another one of the same micro-batch.

    before   index of the block that must have ended
    after    index of the block that waits
    lag      time between the two: that of a message
    """

    before: int
    after: int
    lag: float = 0.0


@dataclass(frozen=True, slots=True)
class ScheduleProblem:
    """A scheduling problem: the blocks of a micro-batch, and what bounds them.

    blocks          of one micro-batch
    dependencies    between them
    limits          by device: the most bytes at any time; inf: no limit
    micro_batches   number of micro-batches, all alike
    """

    blocks: tuple[PassBlock, ...]
    dependencies: tuple[Dependency, ...]
    limits: tuple[float, ...]
    micro_batches: int

    def __post_init__(self) -> None:
        _check(self)

    @property
    def devices(self) -> int:
        return len(self.limits)


def make_problem(
    blocks: Sequence[PassBlock],
    dependencies: Iterable[Dependency | tuple[int, int]],
    micro_batches: int,
    limits: Sequence[float] | float = inf,
) -> ScheduleProblem:
    """Return the problem of any graph of blocks. One limit is that of every device.

    Raises NnscalerError("bad_schedule_problem") that names the block.
    """
    devices = 1 + max((d for block in blocks for d in block.devices), default=-1)
    edges = tuple(d if isinstance(d, Dependency) else Dependency(*d) for d in dependencies)
    each = tuple(limits) if isinstance(limits, Sequence) else (limits,) * devices
    return ScheduleProblem(tuple(blocks), edges, each, micro_batches)


def _check(problem: ScheduleProblem) -> None:
    if problem.micro_batches < 1:
        raise _bad(f"{problem.micro_batches} micro-batches", "there must be one or more")
    if not problem.blocks:
        raise _bad("no blocks", "name the passes of one micro-batch")
    for device, limit in enumerate(problem.limits):
        if not limit >= 0:
            raise _bad(f"the memory limit of device {device} is {limit}", "use bytes, or inf where there is none")
    seen: set[tuple[Kind, int]] = set()
    for block in problem.blocks:
        _check_block(block, problem.devices)
        if (block.kind, block.stage) in seen:
            raise _bad(f"{block} is there twice", "a stage runs each of F, B, I and W once in a micro-batch")
        seen.add((block.kind, block.stage))
    for device in range(problem.devices):
        own = [block for block in problem.blocks if device in block.devices]
        taken, given = sum(b.allocates for b in own), sum(b.frees for b in own)
        if abs(taken - given) > 1e-9 * max(taken, given):
            message = f"on device {device} a micro-batch takes {taken:g} bytes and gives {given:g} back"
            raise _bad(message, "memory of every micro-batch would grow or vanish: let some block free what is taken")
    _check_dependencies(problem)


def _check_block(block: PassBlock, devices: int) -> None:
    if block.kind not in ("F", "B", "I", "W") or block.stage < 0:
        raise _bad(f"{block} is no pass", FORM)
    if not block.devices or len(set(block.devices)) < len(block.devices):
        raise _bad(f"{block} has the devices {list(block.devices)}", "a block has one device or several, each once")
    if not all(0 <= d < devices for d in block.devices):
        message = f"{block} is on device {max(block.devices)}, and there are limits for {devices} devices"
        raise _bad(message, "give a limit for every device")
    for name in ("duration", "allocates", "frees"):
        if not (isfinite(getattr(block, name)) and getattr(block, name) >= 0):
            raise _bad(f"{name} of {block} is {getattr(block, name)}", "use a number that is zero or more")


def _check_dependencies(problem: ScheduleProblem) -> None:
    count = len(problem.blocks)
    sorter: TopologicalSorter[int] = TopologicalSorter()
    for edge in problem.dependencies:
        if not (0 <= edge.before < count and 0 <= edge.after < count):
            raise _bad(f"a dependency of block {edge.after} on block {edge.before}", f"there are {count} blocks")
        if not (isfinite(edge.lag) and edge.lag >= 0):
            message = f"{problem.blocks[edge.after]} follows {problem.blocks[edge.before]} by {edge.lag}"
            raise _bad(message, "use a lag that is zero or more")
        sorter.add(edge.after, edge.before)
    try:
        sorter.prepare()
    except CycleError as error:
        cycle = " waits for ".join(str(problem.blocks[b]) for b in reversed(error.args[1]))
        raise _bad(cycle, "remove one of these dependencies") from error


def _bad(message: str, help: str) -> NnscalerError:
    return NnscalerError("bad_schedule_problem", f"schedule problem: {message}", help=help)


# Problems from placements: which device has which stage, and what the stages cost.
# A stage in several places at once is run by all of these devices together, as in Tessel (Lin et al., HPCA 2024).


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
