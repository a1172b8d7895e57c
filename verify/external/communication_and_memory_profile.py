"""Profile one step for people: what it communicates, holds at rest, and redistributes on its own.

None of it is a verdict. A profile is of the second step: the first one sets up groups, buckets and hooks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path

from op_registry.call import dtype_name

from nnscaler.communication.communication_volume import CollectiveClass, StepCommunication
from nnscaler.communication.stage_communication_calls import CallClass
from nnscaler.manifest import CommunicationProfile, StageMemory, When
from verify.external.observe_rank_run import PHASES, RankRecord, phase_of_step
from verify.external.program import ExternalProgram
from verify.external.ranks.run_ranks_here_or_in_child import RankCall, RankRun
from verify.external.ranks.unwaited_async_calls import note_of_forgotten
from verify.external.reference import coordinates

_KINDS = {"send": "send/recv", "barrier": "", "recv": ""}  # a message is counted where it is sent
_DIRECTIONS = {"forward": "forward", "backward": "backward", "clip": "gradient", "optimizer": "parameter"}
_SHOWN = 4  # redistributions that a note lists


def communication_profile(
    program: ExternalProgram, calls: Sequence[Sequence[RankCall]], step: int
) -> CommunicationProfile | None:
    """Return the classes of equal calls of one step; None where nothing is communicated."""
    counts: dict[tuple[CallClass, tuple[int, ...]], Counter[int]] = {}
    for rank, made in enumerate(calls):
        for call, direction in _of_step(made, step):
            kind = _KINDS.get(call.kind, call.kind)
            if kind and len(call.group) > 1:
                one = CallClass(
                    kind=kind,
                    direction=direction,
                    phase=direction,
                    stage=0,
                    axis=axes_of(program, call.group),
                    dtype=dtype_name(call.dtype),
                    bytes=call.bytes,
                    members=(),
                    module=program.name,
                    where=_short(call.place),
                    to_stage=0 if kind == "send/recv" else None,
                    reduction=call.reduction,
                )
                counts.setdefault((one, call.group), Counter())[rank] += 1
    classes: dict[tuple[CallClass, int], list[tuple[int, ...]]] = {}
    for (one, group), by_rank in counts.items():
        classes.setdefault((one, max(by_rank.values())), []).append(group)
    found = [
        CollectiveClass(_with_members(one, groups), times, When(one.phase, None, None, 1))
        for (one, times), groups in classes.items()
    ]
    return StepCommunication(tuple(found)).record if found else None


def _with_members(one: CallClass, groups: Sequence[tuple[int, ...]]) -> CallClass:
    return CallClass(**{**{name: getattr(one, name) for name in one.__slots__}, "members": tuple(sorted(groups))})


def _of_step(calls: Sequence[RankCall], step: int) -> Iterator[tuple[RankCall, str]]:
    phases = {phase_of_step(name, step): name for name in PHASES}
    for call in calls:
        if call.phase in phases:
            yield call, _DIRECTIONS[phases[call.phase]]


def axes_of(program: ExternalProgram, group: Sequence[int]) -> str:
    """Return the mesh axes along which the ranks of a group differ: `tp`, `dp+tp`; "ranks" where it is no such one."""
    at = coordinates(program)
    axes = [axis for axis, _ in program.mesh if len({at[rank][axis] for rank in group}) > 1]
    count = prod(size for axis, size in program.mesh if axis in axes)
    return "+".join(axes) if axes and (count == len(group) or len(axes) == 1) else "ranks"


def _silent_axes(program: ExternalProgram, calls: Sequence[Sequence[RankCall]]) -> list[str]:
    """Return the axes, of those over which rows are not divided, that no call of a step crosses: without one, what
    ranks compute of the whole can only be all of it."""
    at = coordinates(program)
    groups = {call.group for made in calls for call, _ in _of_step(made, 0)}
    return [
        axis
        for axis, size in program.mesh
        if size > 1
        and axis not in program.data_axes
        and all(len({at[rank][axis] for rank in group if rank >= 0}) < 2 for group in groups)
    ]


def _short(place: str | None) -> str:
    file, _, line = (place or "").rpartition(":")
    return f"{Path(file).name}:{line}" if file else ""


def memory(records: Sequence[RankRecord]) -> tuple[StageMemory, ...]:
    """Return the bytes that each rank holds at rest; activations are not measured."""
    found = []
    for record in records:
        state = record.steps[-1].state
        gradients = record.steps[-1].gradients.values()
        parameters = sum(t.numel() * t.element_size() for t in state.values())
        gradient = sum(t.numel() * t.element_size() for t in gradients if t is not None)
        total = parameters + gradient + record.optimizer_bytes
        row = StageMemory(0, record.rank, str(record.rank), parameters, gradient, 0, total, record.optimizer_bytes)
        found.append(row)
    return tuple(found)


def notes_of(program: ExternalProgram, ran: RankRun[RankRecord]) -> tuple[str, ...]:
    """Return what a reader should know of the run: axes over which nothing is divided, results that nobody waits for,
    and layouts changed by DTensor."""
    found = [
        f"no rank communicates over {axis} in a step: each one that differs in it computes the same. Where the model "
        "should be divided over it, do the rules of the plan match its modules?"
        for axis in _silent_axes(program, ran.calls)
    ]
    if ran.unwaited:
        found.append(f"{ran.unwaited} functional collectives have results that are never used")
    found += note_of_forgotten(ran.forgotten)
    moves = Counter(move for record in ran.results for move in record.redistributed)
    if moves:
        listed = [f"{move} ({count} times)" for move, count in moves.most_common(_SHOWN)]
        more = f" and {len(moves) - _SHOWN} more kinds" if len(moves) > _SHOWN else ""
        found.append(f"DTensor changes layouts of operands on its own: {'; '.join(listed)}{more}")
    return tuple(found)
