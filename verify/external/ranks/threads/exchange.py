"""Where the threads of ranks meet: collectives, messages, and the keys of the store.

The rank that arrives last at a collective computes it for all. A message is delivered when both its sender and its
receiver have come; neither copies it before.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nnscaler.runtime.communication.communicator import CommunicationCall, CommunicationError
from nnscaler.runtime.tensor_bits_and_differences import same_bits
from verify.external.ranks.collective_semantics import CollectiveShare, GroupKey, answer, disagreement_of
from verify.external.ranks.run_result import RankCall, RanksFailed
from verify.external.ranks.threads.turns import RankStopped, Turns
from verify.external.ranks.unwaited_async_calls import BegunLines

_WHOLE = 4096  # elements: tensors up to this size are watched whole
_SAMPLES = 64  # elements that are watched of a larger one


@dataclass(eq=False)
class Meeting:
    """One collective of one group. `parts` and `watched` are by place in the group."""

    parts: dict[int, CollectiveShare] = field(default_factory=dict)
    watched: dict[int, WatchedTensors] = field(default_factory=dict)
    done: bool = False


@dataclass(eq=False)
class MessageEnd:
    """One end of a message. `source` is a place in the group, -1 for a receiver that takes any."""

    call: CommunicationCall
    tensor: Tensor
    source: int
    watched: WatchedTensors | None = None
    done: bool = False


class ThreadExchange:
    """All that ranks tell each other. `turns.lock` guards it."""

    def __init__(self, turns: Turns, ranks: int) -> None:
        self.turns = turns
        self.calls: list[list[RankCall]] = [[] for _ in range(ranks)]
        self.begun: list[BegunLines] = []  # of each rank in each group
        self.store: dict[str, bytes] = {}
        self._meetings: dict[tuple[GroupKey, int], Meeting] = {}
        self._counts: dict[tuple[GroupKey, int], int] = defaultdict(int)  # (group, place) -> collectives it began
        self._sent: dict[tuple[GroupKey, int, int], deque[MessageEnd]] = defaultdict(deque)  # group, receiver, tag
        self._awaited: dict[tuple[GroupKey, int, int], deque[MessageEnd]] = defaultdict(deque)
        turns.remarks = self.remarks

    # -- collectives --------------------------------------------------------------------------------------------------

    def begin(self, key: GroupKey, place: int, part: CollectiveShare, root: int | None) -> Meeting:
        """Hand in one rank's part of a collective. Raises RankStopped when the ranks disagree."""
        turns, size = self.turns, len(key[1])
        with turns.lock:
            self._note(part.call, part.given_bytes)
            number = self._counts[key, place]
            self._counts[key, place] = number + 1
            meeting = self._meetings.setdefault((key, number), Meeting())
            for other_place, other in meeting.parts.items():
                self._compare(number, key[1][other_place], other.call, part.call)
            meeting.parts[place] = part
            if len(meeting.parts) < size:
                if part.watch:
                    meeting.watched[place] = WatchedTensors([t for item in part.inputs for t in item])
                return meeting
            del self._meetings[key, number]
        self._check_unchanged(meeting)
        try:
            answer([meeting.parts[at] for at in range(size)], root)
        except CommunicationError as error:
            self._mismatch(str(error), part.call)
        with turns.lock:
            meeting.done = True
            meeting.parts.clear()
            turns.poke()
        return meeting

    def _note(self, call: CommunicationCall, given: int) -> None:
        """Record a call of the current thread. Raises RankStopped when another rank has failed."""
        turn = self.turns.turn()
        if self.turns.failure is not None:
            raise RankStopped(f"rank {turn.rank} stopped because another one failed")
        turn.what = call
        self.turns.note(f"rank {turn.rank} {turn.text()}")
        self.calls[turn.rank].append(RankCall.of(call, given))

    def _compare(self, number: int, rank: int, one: CommunicationCall, other: CommunicationCall) -> None:
        text = disagreement_of(number, rank, one, self.turns.turn().rank, other)
        if text is not None:
            self._fail_locked(text, other)

    def _check_unchanged(self, meeting: Meeting) -> None:
        for place, watched in meeting.watched.items():
            if watched.has_changed():
                call = meeting.parts[place].call
                self._mismatch(_CHANGED.format(rank=call.ranks[place], call=call), call, call.ranks[place])

    def _mismatch(self, message: str, call: CommunicationCall, rank: int | None = None) -> None:
        with self.turns.lock:
            self._fail_locked(message, call, rank)

    def _fail_locked(self, message: str, call: CommunicationCall, rank: int | None = None) -> None:
        turns = self.turns
        rank = turns.turn().rank if rank is None else rank
        turns.fail(RanksFailed("communication_mismatch", message, rank=rank, place=call.place, by_rank=turns.by_rank()))
        raise RankStopped(message)

    # -- messages -----------------------------------------------------------------------------------------------------

    def send(self, key: GroupKey, target: int, tag: int, message: MessageEnd) -> None:
        """Offer a message. It is done when a receiver has come for it, as in real ones: `send` waits for `recv`."""
        with self.turns.lock:
            self._note(message.call, message.tensor.numel() * message.tensor.element_size())
            waiting = self._awaited[key, target, tag]
            receiver = next((r for r in waiting if r.source in (-1, message.source)), None)
            if receiver is None:
                message.watched = WatchedTensors([message.tensor])
                self._sent[key, target, tag].append(message)
            else:
                waiting.remove(receiver)
                self._deliver(message, receiver)

    def receive(self, key: GroupKey, place: int, tag: int, message: MessageEnd) -> None:
        """Ask for a message: the i-th of a sender answers the i-th request, in whatever order they are waited for."""
        with self.turns.lock:
            self._note(message.call, 0)
            offered = self._sent[key, place, tag]
            sender = next((s for s in offered if message.source in (-1, s.source)), None)
            if sender is None:
                self._awaited[key, place, tag].append(message)
            else:
                offered.remove(sender)
                self._deliver(sender, message)

    def _deliver(self, sender: MessageEnd, receiver: MessageEnd) -> None:
        given, taken = sender.tensor, receiver.tensor
        if given.numel() != taken.numel() or given.dtype != taken.dtype:
            text = (
                "a message differs from what its receiver expects:"
                f"\n  rank {sender.call.ranks[0]}: {sender.call}\n  rank {receiver.call.ranks[1]}: {receiver.call}"
            )
            self._fail_locked(text, receiver.call)
        if sender.watched is not None and sender.watched.has_changed():
            source = sender.call.ranks[0]
            self._fail_locked(_CHANGED.format(rank=source, call=sender.call), sender.call, source)
        with torch.no_grad():
            taken.data.copy_(given if given.shape == taken.shape else given.reshape(taken.shape))
        receiver.source = sender.source
        sender.done = receiver.done = True
        self.turns.poke()

    def undelivered(self) -> list[str]:
        """Say which messages nobody has received, the lock held."""
        messages = [message for sent in self._sent.values() for message in sent]
        return [f"  never received: {message.call}" for message in messages]

    def remarks(self) -> list[str]:
        """Say what explains a deadlock, the lock held: lost messages, and groups that have another name elsewhere."""
        names: dict[tuple[int, ...], dict[str, list[int]]] = defaultdict(dict)
        for (key, _), meeting in self._meetings.items():
            names[key[1]][key[0]] = sorted(key[1][place] for place in meeting.parts)
        lines = []
        for members, by_name in names.items():
            if len(by_name) > 1:
                which = ", ".join(f"{name!r} on {ranks}" for name, ranks in by_name.items())
                lines.append(f"  groups of ranks {members} that were not made in the same order: {which}")
        return [*self.undelivered(), *lines]

    # -- waiting ------------------------------------------------------------------------------------------------------

    def wait(self, call: CommunicationCall | str, ready: Callable[[], bool]) -> None:
        """Wait until `ready()`. Raises RankStopped when a rank has failed."""
        with self.turns.lock:
            self.turns.wait(call, ready)

    def asked(self, call: CommunicationCall | str, ready: Callable[[], bool]) -> bool:
        """Return `ready()`; where it is False let other ranks run first, for the program may ask until it is True."""
        with self.turns.lock:
            if not ready():
                self.turns.let_others_run(call)
            return ready()


_CHANGED = (
    "a tensor was changed between the start of an asynchronous call and its end: "
    "the result depends on who is faster\n  rank {rank}: {call}"
)


class WatchedTensors:
    """Notes what is in tensors, to see later whether it has changed: all of a small one, elements of a large one."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = [tensor for tensor in tensors if tensor.layout is torch.strided]
        self._before = [_sample(tensor).clone() for tensor in self._tensors]

    def has_changed(self) -> bool:
        """Tell whether what was noted is not there any more."""
        now = [_sample(tensor) for tensor in self._tensors]
        return any(not same_bits(a, b) for a, b in zip(self._before, now, strict=True))


def _sample(tensor: Tensor) -> Tensor:
    value = tensor.detach()
    if value.numel() <= _WHOLE or not value.is_contiguous():
        return value
    return value.view(-1)[:: value.numel() // _SAMPLES]
