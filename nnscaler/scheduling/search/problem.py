"""The problem of a schedule, as pure data: the passes of one micro-batch, what they wait for, and what they occupy.

Everything that a search must know is here and nothing else: no model, no tensors. All micro-batches are alike, so the
blocks of one describe them all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from math import inf, isfinite

from nnscaler.errors import NnscalerError
from nnscaler.instructions import FORM, Instruction, Kind


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
