"""Count the bytes that every rank sends in one step, in classes of equal calls: the communication profile.

It is computed from the communicated graph and the schedule, without running anything, and a test counts the calls that
programs make on the simulator: kinds, groups, bytes and times are theirs.

`bytes` is what a rank hands to one call: the whole tensor of an all_reduce, the shard of an all_gather, all pieces of a
reduce_scatter or an all_to_all, one message, the block that is rotated. `wire_bytes` is what a rank then sends in a
ring algorithm.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod

from nnscaler.communication.bucketed_parameter_calls import rest_calls
from nnscaler.communication.communicated_graph import CommunicatedGraph
from nnscaler.communication.stage_communication_calls import CallClass, CallSite, Ranks, calls_of_stage, ranks_text
from nnscaler.ir.ring_rotation_calls import ROTATE
from nnscaler.manifest import CommunicationClass, CommunicationProfile, CommunicationTotal, When
from nnscaler.scheduling.schedule import BACKWARD, Schedule

VERSION = 1
_RING = {"all_reduce": 2.0}  # all other collectives: once


@dataclass(frozen=True, slots=True)
class CollectiveClass:
    """Equal calls of one stage.

    call    kind, bytes and place; its members are all groups that make it (for messages: (source, target) pairs)
    calls   per step and rank of a group
    when    in a step
    """

    call: CallClass
    calls: int
    when: When

    @property
    def members(self) -> tuple[Ranks, ...]:
        return self.call.members

    @property
    def total_bytes(self) -> int:
        """Bytes per step, over all ranks that hand something over."""
        senders = 1 if self.call.kind == "send/recv" else len(self.members[0])
        return self.call.bytes * self.calls * len(self.members) * senders

    @property
    def wire_bytes(self) -> float:
        """Bytes that one rank sends in one step."""
        size = len(self.members[0])
        if self.call.kind in ("send/recv", ROTATE):
            return float(self.call.bytes * self.calls)
        if self.call.kind == "all_gather":
            return float(self.call.bytes * (size - 1) * self.calls)
        return _RING.get(self.call.kind, 1.0) * (size - 1) / size * self.call.bytes * self.calls

    @property
    def record(self) -> CommunicationClass:
        """Return the class as the manifest has it: of its groups, only the first and their number."""
        call = self.call
        return CommunicationClass(
            kind=call.kind,
            direction=call.direction,
            stage=call.stage,
            to_stage=call.to_stage,
            axis=call.axis,
            group=ranks_text(self.members[0]),
            group_size=len(self.members[0]),
            groups=len(self.members),
            dtype=call.dtype,
            reduction=call.reduction,
            bytes=call.bytes,
            calls=self.calls,
            total_bytes=self.total_bytes,
            wire_bytes=round(self.wire_bytes),
            when=self.when,
            module=call.module,
            where=call.where,
        )


@dataclass(frozen=True)
class StepCommunication:
    """All classes of calls of one step, in the order of stages and of first occurrence."""

    classes: tuple[CollectiveClass, ...]

    @property
    def totals(self) -> tuple[CommunicationTotal, ...]:
        """Sums per axis, kind and direction, largest first."""
        sums: dict[tuple[str, str, str], tuple[int, int]] = {}
        for c in self.classes:
            key = (c.call.axis, c.call.kind, c.call.direction)
            calls, sent = sums.get(key, (0, 0))
            sums[key] = (calls + c.calls * len(c.members), sent + c.total_bytes)
        found = (CommunicationTotal(*key, *value) for key, value in sums.items())
        return tuple(sorted(found, key=lambda t: (-t.bytes, t.axis, t.kind, t.direction)))

    @property
    def record(self) -> CommunicationProfile:
        """Return the profile as the manifest has it."""
        return CommunicationProfile(VERSION, "bytes per step", self.totals, tuple(c.record for c in self.classes))


def step_communication(communicated: CommunicatedGraph, schedule: Schedule) -> StepCommunication:
    """Return the classes of calls of one training step of the program."""
    counts: dict[CallClass, int] = {}
    for site in call_sites(communicated):
        for call, share in _by_pass(site.call, site.times, schedule):
            counts[call] = counts.get(call, 0) + share
    return StepCommunication(tuple(CollectiveClass(c, n, _when(c, schedule)) for c, n in counts.items()))


def call_sites(communicated: CommunicatedGraph) -> Iterator[CallSite]:
    """Yield every place of the program that makes calls: all that is told of its communication is made from them."""
    for program in communicated.stages:
        yield from calls_of_stage(communicated, program)
    yield from rest_calls(communicated)


def _by_pass(call: CallClass, times: int, schedule: Schedule) -> Iterator[tuple[CallClass, int]]:
    """Yield a call with the instructions that make it: what is made after a backward belongs to B, or else to W."""
    if call.phase not in ("B", "I", "W"):
        yield call, times
        return
    own = schedule.passes_of(call.stage)
    half = "I" if call.phase == "I" else "W"
    for phase in ("B", half):
        passes = sum(step.kind == phase for step in own)
        if passes:
            yield replace(call, phase=phase), times * passes // prod(schedule.times)


def _when(call: CallClass, schedule: Schedule) -> When:
    order = schedule.orders[schedule.devices[call.stage][0]]
    if call.phase in ("F", *BACKWARD):
        positions = [i for i, step in enumerate(order) if step.kind == call.phase and step.stage == call.stage]
        each = ", each micro-batch" if schedule.micro_batches > 1 else ""
        each = ", each batch" if schedule.staleness else each
        each = ", each slice" if schedule.slices > 1 else each
        return When(f"{call.phase} of stage {call.stage}{each}", positions[0], positions[-1], len(order))
    updates = [i for i, step in enumerate(order) if step.kind == "U" and step.stage == call.stage]
    if call.phase == "gradient" and updates:
        return When(f"before U of stage {call.stage}, each batch", updates[0], updates[-1], len(order))
    if call.phase == "loss" and updates:
        passes = [i for i, step in enumerate(order) if step.kind == "F" and step.stage == call.stage]
        return When(f"after F of stage {call.stage}, each batch", passes[0], passes[-1], len(order))
    texts = {
        "prepare": f"prepare of stage {call.stage}, once, before the first instruction",
        "gather": "once, before the first instruction",
        "loss": "once, after the last instruction",
        "gradient": "once, after the last instruction",
    }
    return When(texts[call.phase], None, None, len(order))
