"""Recompute cheap outputs in backward, so that stages of equal work keep no more than stages of whole layers.

A cut within a layer evens out the work of stages, and leaves more with the first one, which holds most micro-batches.
A schedule that holds W back, for less idle time, is held to the memory of 1F1B, where cheap outputs reach that.
What `transform/cheap_outputs.py` calls cheap is computed again there, as far as it takes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeGuard

from nnscaler.communication.communicated_graph import (
    CommunicatedGraph,
    Compute,
    StageProgram,
    Statement,
    is_product,
    reads,
    writes,
)
from nnscaler.communication.insert_conversions import materialise
from nnscaler.communication.stage_memory_and_work import kept_bytes, stage_memory
from nnscaler.errors import few
from nnscaler.ir.graph import Graph
from nnscaler.ir.operation_annotations import Signature
from nnscaler.planning.cluster.description import show_bytes
from nnscaler.scheduling.one_f_one_b import ONE_F_ONE_B
from nnscaler.scheduling.registry import schedule_of, with_schedule
from nnscaler.scheduling.schedule import Schedule
from nnscaler.scheduling.timeline import peak_of_stage
from nnscaler.transform.apply import apply_plan
from nnscaler.transform.cheap_outputs import start_of_cheap
from nnscaler.transform.plan import Plan, RecomputeStep

_Made = tuple[CommunicatedGraph, Schedule, list[int]]  # the program of a plan, its schedule, bytes by device
_NEAR = 0.01  # of what 1F1B keeps: less is not worth computing anything again


@dataclass(frozen=True, slots=True)
class _Cheap:
    """Operations one after the other, the last of which is a product.

    device  that runs them
    saved   bytes that the device keeps less when they are computed again, at the moment when it keeps most
    """

    names: tuple[str, ...]
    device: int
    saved: int


def as_light_as(plan: Plan, other: Plan, graph: Graph, known: dict[str, Signature], optimizer: float) -> Plan:
    """Return the plan with `recompute` steps, until no rank keeps more than the fullest one of another plan does, as
    far as there are cheap outputs; with a note on them.

    Where that schedule holds W back, the other plan under 1F1B comes first, if that can be reached to `_NEAR`.
    `optimizer`: bytes that it keeps of an element. Raises NnscalerError as `apply_plan`, `materialise` and
    `schedule_of` do.
    """
    _, schedule, held = _made(other, graph, known, optimizer)
    limits = {max(held): f"stages of layers under {other.schedule}"}
    if any(i.kind == "W" for order in schedule.orders for i in order) and schedule.stages == plan.devices:
        held = _made(with_schedule(other, ONE_F_ONE_B.name), graph, known, optimizer)[2]
        limits.setdefault(round((1 + _NEAR) * max(held)), f"stages of layers under {ONE_F_ONE_B.name}")
    found, made = plan, _made(plan, graph, known, optimizer)
    before = max(made[2])
    for limit, whose in sorted(limits.items()):
        found, names, left = _within(plan, made, limit, graph, known, optimizer)
        if names:
            more = f"{show_bytes(before - limit)} more than with {whose}"
            note = f"computed again in backward, or a rank would keep {more}: {few(names, 6)}"
            found = replace(found, notes=(*found.notes, note))
        if left <= limit:
            break
    return found


def _within(
    plan: Plan, made: _Made, limit: int, graph: Graph, known: dict[str, Signature], optimizer: float
) -> tuple[Plan, list[str], int]:
    """Return the plan with `recompute` steps, until no rank keeps more than `limit` bytes, as far as there are cheap
    outputs; the operations that make them, and what the fullest rank keeps then. `made`: of the plan as it is."""
    communicated, schedule, held = made[0], made[1], list(made[2])
    names, found = list[str](), plan
    while max(held) > limit:
        steps: list[RecomputeStep] = []
        taken: set[str] = set()
        for chain in sorted(_chains(communicated, schedule, known), key=lambda chain: -chain.saved):
            if held[chain.device] > limit and taken.isdisjoint(chain.names):
                held[chain.device] -= chain.saved
                steps.append(RecomputeStep(chain.names))
                taken.update(chain.names)
        if not steps:
            break
        names += [name for step in steps for name in step.operations[:-1]]
        found = replace(found, steps=(*found.steps, *steps))
        communicated, schedule, held = _made(found, graph, known, optimizer)
    return found, names, max(held)


def _made(plan: Plan, graph: Graph, known: dict[str, Signature], optimizer: float) -> _Made:
    """Return the program of a plan, its schedule, and the bytes that each device holds."""
    communicated = materialise(apply_plan(graph, known, plan), known)
    schedule = schedule_of(plan, communicated.without_gradient)
    held = [0] * plan.devices
    for memory in stage_memory(communicated, schedule, optimizer):
        held[memory.role] += memory.total
    return communicated, schedule, held


def _chains(communicated: CommunicatedGraph, schedule: Schedule, known: Mapping[str, Signature]) -> Iterator[_Cheap]:
    """Yield, for each product of a stage, the chain before it that saves most."""
    graph = communicated.partitioned.graph
    for program in communicated.stages:
        at_once = peak_of_stage(schedule, program.stage.index, later=0)
        whole, read_at = kept_bytes(graph, program), _readers(graph, program)
        readers = [{at for version in writes(s) for at in read_at[version.variable]} for s in program.forward]
        operations = [s.operation if _is_free(s) else None for s in program.forward]
        for end, statement in enumerate(program.forward):
            if not _is_free(statement) or not is_product(graph, statement):
                continue
            start = start_of_cheap(operations, readers, end, known)
            tried = [range(i, end + 1) for i in range(start, end)]
            saves = [whole - kept_bytes(graph, _again(program, positions)) for positions in tried]
            if saves and max(saves) > 0:
                positions = tried[saves.index(max(saves))]
                names = tuple(s.operation.name for i in positions if isinstance(s := program.forward[i], Compute))
                for device in program.stage.devices:
                    yield _Cheap(names, device, max(saves) * at_once)


def _is_free(statement: Statement) -> TypeGuard[Compute]:
    """Return whether a statement may be put into a group that is computed again."""
    if not isinstance(statement, Compute):
        return False
    return statement.placement.chunk is None and statement.placement.recompute is None


def _readers(graph: Graph, program: StageProgram) -> Mapping[str, set[int]]:
    """Return by variable the positions of the statements that read it; -1: it leaves the stage, or is a result."""
    found: dict[str, set[int]] = {v.variable: set() for s in program.forward for v in writes(s)}
    for i, statement in enumerate(program.forward):
        for version in reads(statement):
            found.setdefault(version.variable, set()).add(i)
        for version in writes(statement):
            if version.tensor in graph.ends:
                found[version.variable].add(-1)
    for message in program.sends:
        found[message.source.variable].add(-1)
    return found


def _again(program: StageProgram, positions: Sequence[int]) -> StageProgram:
    """Return the program with operations in a group that is computed again."""
    forward = list(program.forward)
    for i in positions:
        statement = forward[i]
        assert isinstance(statement, Compute)
        forward[i] = replace(statement, placement=replace(statement.placement, recompute="tried"))
    return replace(program, forward=tuple(forward))
