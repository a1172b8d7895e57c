"""The communicator of a rank program, its interface to other ranks: calls, the record of each, and the common checks.

Implementations: `simulator` (a thread per rank), `gloo` and `nccl`. Rank programs cannot tell them apart:

* `ranks` is the group in axis order; every rank of the group makes the same calls on it in the same order. Results of
  collectives with several tensors are in the order of `ranks`, and sums are equal bitwise on all ranks of the group.
* arguments are never changed, and results never share memory with arguments.
* what is begun (`start_...`) meets what other ranks of the group begin, in the order in which each begins them. It
  writes into the tensors that it is given, which are contiguous or views of one rank's part.
* `send` does not wait for its receiver; messages are matched by (source, destination, key).
* a rank that waits for ever is an error (`CommunicationError`) where the implementation can see it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from traceback import walk_stack
from typing import Any

import torch
from torch import Tensor

from nnscaler.runtime.tensor_bits_and_differences import values_of

SUMMED = "the gradient sum of "  # the context of a call, before the names of parameters
Key = tuple[object, ...]
Shape = tuple[int, ...]


class ProgramError(Exception):
    """A rank program, or what it was given, is not what the runtime can run. The message says rank, stage and place."""


class CommunicationError(ProgramError):
    """Ranks disagree on a collective, wait for each other for ever, or name peers that do not exist.

    `secondary` is True on ranks that only stopped because another rank failed; `waiting` says, per rank, what it
    waited for (deadlocks).
    """

    def __init__(self, message: str, *, secondary: bool = False, waiting: dict[int, str] | None = None) -> None:
        super().__init__(message)
        self.secondary = secondary
        self.waiting = waiting or {}


class UnderWayError(CommunicationError):
    """Memory is used while something that was begun reads or writes it, or nothing waits for what was begun."""


@dataclass(frozen=True, slots=True)
class CommunicationCall:
    """One call of a communicator: enough to compare it with the calls of the group's other ranks, and to print it."""

    kind: str  # "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "rotate", "broadcast", "barrier", "send"...
    ranks: tuple[int, ...]  # the group; (source, destination) for messages
    shapes: tuple[tuple[int, ...], ...] = ()
    dtype: torch.dtype | None = None
    reduction: str = ""
    source: int | None = None  # broadcast only
    key: Key = ()
    place: str | None = None  # file:line of the rank program
    context: str = ""  # the instruction that runs, "F0.1"
    begun: bool = False  # it is waited for later: it meets those that are begun, in their order
    lasting: bool = False  # what it is given is not written before `settle`; a message not before `finish`

    def arriving(self, rank: int) -> list[tuple[int, ...]]:
        """Return the shapes that each rank of the group gives to `rank` in an all_gather, reduce_scatter or
        all_to_all; in a rotation only the one before it does."""
        here, count = self.ranks.index(rank), len(self.ranks)
        if self.kind == "rotate":
            return [self.shapes[here - 1 if len(self.shapes) == count else 0]]
        if self.kind == "all_gather":
            return list(self.shapes) if len(self.shapes) == count else [self.shapes[0]] * count
        if len(self.shapes) == count * count:
            return [self.shapes[other * count + here] for other in range(count)]
        return [self.shapes[here]] * count

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.") if self.dtype is not None else ""
        shapes = sorted(set(self.shapes))
        what = f" {dtype}{'/'.join(str(list(s)) for s in shapes)}" if shapes else ""
        name = f"{self.kind}({self.reduction})" if self.reduction else self.kind
        if self.kind in ("send", "recv"):
            key = " ".join(str(k) for k in self.key)
            return f"{name}{what} {self.ranks[0]} -> {self.ranks[1]} key ({key})" + self.where()
        source = f" from rank {self.source}" if self.source is not None else ""
        return f"{name}{what}{source} over ranks {self.ranks}" + self.where()

    def where(self) -> str:
        return (f" in {self.context}" if self.context else "") + (f" at {self.place}" if self.place else "")


class Pending:
    """A communication that was begun. Memory that it writes is neither read nor written before `wait`, and memory that
    it reads is not written; of a lasting call not before `settle`.

    call  as it was recorded
    """

    __slots__ = ("_begun", "_finish", "call")

    def __init__(self, call: CommunicationCall, finish: Callable[[], None], begun: dict[int, Pending]) -> None:
        """`begun`: those of the rank that are to be waited for, by identity."""
        self.call, self._finish, self._begun = call, finish, begun
        begun[id(self)] = self

    def wait(self) -> None:
        """Return when the results lie where they were to be written. Called once."""
        del self._begun[id(self)]
        self._finish()


_OWN_MODULES = ("nnscaler.runtime.", "verify.", "torch.", "contextlib", "threading")


def program_place() -> str | None:
    """Return file:line of the innermost frame outside the runtime, the verification and torch, and of no graph: the
    line of the rank program that called."""
    for frame, line in walk_stack(sys._getframe(1)):
        name = frame.f_globals.get("__name__", "")
        # a graph of torch.compile is in no module, or in one of torch's
        if name and not name.startswith(_OWN_MODULES) and name not in ("torch", "nnscaler.runtime"):
            return f"{frame.f_code.co_filename}:{line}"
    return None


def _shapes(tensors: Sequence[Tensor]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(t.shape) for t in tensors)


def _copy(found: Sequence[Tensor], into: Sequence[Tensor]) -> None:
    for value, place in zip(found, into, strict=True):
        if value.data_ptr() != place.data_ptr():
            place.copy_(value)


class Communicator:
    """Records and checks calls, answers groups of one rank itself, and leaves the rest to its implementations.

    Implementations write the methods that begin with an underscore; `ranks` there has at least two members, contains
    this rank, and tensors are contiguous and detached. `context` is what the executor runs; `at` says the place where
    the stack has no program frame.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self.context = ""
        self.current: CommunicationCall | None = None
        self.listener: Callable[[CommunicationCall], None] | None = None
        self._place: str | None = None
        self._lasting = False
        self._begun: dict[int, Pending] = {}

    @contextmanager
    def at(self, place: str | None) -> Iterator[None]:
        """Record calls inside as made at `place` (None: search the stack, the default)."""
        before, self._place = self._place, place
        try:
            yield
        finally:
            self._place = before

    # -- calls -----------------------------------------------------------------------------------------------------

    def all_reduce(self, tensor: Tensor, ranks: Sequence[int], reduction: str = "sum") -> Tensor:
        if reduction not in ("sum", "max"):
            raise CommunicationError(f"rank {self.rank}: unknown reduction {reduction!r}")
        call = self._record("all_reduce", ranks, _shapes([tensor]), tensor.dtype, reduction=reduction)
        return self._answer(call, [tensor])[0]

    def all_gather(self, tensor: Tensor, ranks: Sequence[int], shapes: Sequence[Shape] | None = None) -> list[Tensor]:
        """Gather the tensors of all ranks. `shapes`: of every rank's tensor, where they differ."""
        given = _shapes([tensor]) if shapes is None else tuple(map(tuple, shapes))
        call = self._record("all_gather", ranks, given, tensor.dtype)
        if shapes is not None:
            self._check_given([tensor], [tuple(shapes)[call.ranks.index(self.rank)]], call)
        return self._answer(call, [tensor])

    def reduce_scatter(self, pieces: Sequence[Tensor], ranks: Sequence[int], reduction: str = "sum") -> Tensor:
        """Reduce piece i of every rank for the i-th rank of the group."""
        dtype = pieces[0].dtype if pieces else None
        call = self._record("reduce_scatter", ranks, _shapes(pieces), dtype, reduction=reduction)
        self._check_count(pieces, call)
        return self._answer(call, pieces)[0]

    def all_to_all(
        self, pieces: Sequence[Tensor], ranks: Sequence[int], shapes: Sequence[Sequence[Shape]] | None = None
    ) -> list[Tensor]:
        """Send piece i to the i-th rank of the group, and return the pieces that each rank sent here.

        `shapes[i][j]`: of the piece that the i-th rank gives to the j-th one, where they differ.
        """
        given = _shapes(pieces) if shapes is None else tuple(tuple(shape) for row in shapes for shape in row)
        dtype = pieces[0].dtype if pieces else None
        call = self._record("all_to_all", ranks, given, dtype)
        self._check_count(pieces, call)
        if shapes is not None:
            self._check_given(pieces, shapes[call.ranks.index(self.rank)], call)
        return self._answer(call, pieces)

    def rotate(self, tensor: Tensor, ranks: Sequence[int], shapes: Sequence[Shape] | None = None) -> Tensor:
        """Give the tensor to the next rank of the group, and return that of the one before, the last being before the
        first. `shapes`: of every rank's tensor, where they differ."""
        given = _shapes([tensor]) if shapes is None else tuple(map(tuple, shapes))
        call = self._record("rotate", ranks, given, tensor.dtype)
        if shapes is not None:
            self._check_given([tensor], [tuple(shapes)[call.ranks.index(self.rank)]], call)
        return self._answer(call, [tensor])[0]

    def broadcast(self, tensor: Tensor, source: int, ranks: Sequence[int]) -> Tensor:
        """Return the `tensor` of rank `source`; on the other ranks it gives the shape and dtype."""
        call = self._record("broadcast", ranks, _shapes([tensor]), tensor.dtype, source=source)
        if source not in call.ranks:
            raise CommunicationError(f"rank {self.rank}: {call}: the source is not in the group")
        return self._answer(call, [tensor])[0]

    def barrier(self, ranks: Sequence[int]) -> None:
        self._answer(self._record("barrier", ranks), [])

    def send(self, tensor: Tensor, destination: int, key: Key, lasting: bool = False) -> None:
        """Hand the message over and return; `key` names it for the receiver. `lasting`: the tensor may be read where it
        lies, for it is not written before `finish`."""
        ranks, shapes = (self.rank, destination), _shapes([tensor])
        call = self._record("send", ranks, shapes, tensor.dtype, key=key, lasting=lasting)
        self._send(values_of(tensor), call)

    def recv(self, shape: Sequence[int], dtype: torch.dtype, source: int, key: Key) -> Tensor:
        return self._recv(self._record("recv", (source, self.rank), (tuple(shape),), dtype, key=key))

    # -- what is begun, and waited for later ----------------------------------------------------------------------

    def start_all_reduce(self, tensor: Tensor, ranks: Sequence[int]) -> Pending:
        """Begin to sum a contiguous tensor over ranks, in place."""
        call = self._record("all_reduce", ranks, _shapes([tensor]), tensor.dtype, reduction="sum", begun=True)
        return self._start(call, [tensor.detach()], [tensor.detach()])

    def start_all_gather(
        self, tensor: Tensor, into: Sequence[Tensor], ranks: Sequence[int], shapes: Sequence[Shape] | None = None
    ) -> Pending:
        """Begin to gather the tensors of all ranks into those of `into`. `shapes`: as in `all_gather`."""
        given = _shapes([tensor]) if shapes is None else tuple(map(tuple, shapes))
        call = self._record("all_gather", ranks, given, tensor.dtype, begun=True)
        self._check_count(into, call)
        if shapes is not None:
            self._check_given([tensor], [tuple(shapes)[call.ranks.index(self.rank)]], call)
        return self._start(call, [values_of(tensor)], list(into))

    def start_reduce_scatter(self, pieces: Sequence[Tensor], into: Tensor, ranks: Sequence[int]) -> Pending:
        """Begin to sum piece i of every rank for the i-th rank of the group, into `into`."""
        dtype = pieces[0].dtype if pieces else None
        call = self._record("reduce_scatter", ranks, _shapes(pieces), dtype, reduction="sum", begun=True)
        self._check_count(pieces, call)
        return self._start(call, [values_of(p) for p in pieces], [into])

    def start_recv(self, into: Tensor, source: int, key: Key) -> Pending:
        """Begin to receive a message into a contiguous tensor."""
        call = self._record("recv", (source, self.rank), _shapes([into]), into.dtype, key=key)
        return self._start(call, [], [into])

    @contextmanager
    def together(self, lasting: bool = False) -> Iterator[None]:
        """What is begun inside may leave at the end, in messages that it shares. Every rank of a group begins the same
        of it inside, and waits for nothing of it there. `lasting`: what it is given is not written before `settle`."""
        before, self._lasting = self._lasting, lasting
        try:
            yield
        finally:
            self._lasting = before

    def _start(self, call: CommunicationCall, given: list[Tensor], into: list[Tensor]) -> Pending:
        if call.kind != "recv" and len(call.ranks) == 1:
            _copy(given, into)
            return Pending(call, lambda: None, self._begun)
        return Pending(call, self._begin(call, given, into), self._begun)

    def receives_ahead(self, source: int) -> bool:
        """Return whether what `start_recv` begins may arrive before something waits for it."""
        return True

    def let_go(self) -> None:
        """Let go of the memory of messages that are known to have been read."""

    def settle(self) -> None:
        """Wait until what lasting calls were given may be written."""

    def finish(self) -> None:
        """Wait until the messages sent from here no longer need their memory, after a step. Raises UnderWayError where
        something that was begun was not waited for."""
        if self._begun:
            first = next(iter(self._begun.values())).call
            self._begun.clear()
            raise UnderWayError(f"rank {self.rank}: {first}: it was begun, and nothing waited for it")
        self.settle()

    # -- for implementations --------------------------------------------------------------------------------------

    def _record(
        self,
        kind: str,
        ranks: Sequence[int],
        shapes: tuple[Shape, ...] = (),
        dtype: torch.dtype | None = None,
        **more: Any,
    ) -> CommunicationCall:
        """Note a call with its place and context, and return it. Raises CommunicationError for a wrong group."""
        more["lasting"] = more.get("lasting", False) or (more.get("begun", False) and self._lasting)
        more.update(place=self._place or program_place(), context=self.context)
        call = CommunicationCall(kind, tuple(ranks), shapes, dtype, **more)
        self.current = call
        if self.listener is not None:
            self.listener(call)
        if self.rank not in call.ranks or any(not 0 <= r < self.world_size for r in call.ranks):
            raise CommunicationError(
                f"rank {self.rank} of {self.world_size}: {call}: this rank is not in it, or a rank does not exist"
            )
        if call.kind not in ("send", "recv") and len(set(call.ranks)) != len(call.ranks):
            raise CommunicationError(f"rank {self.rank}: {call}: a rank is in the group twice")
        return call

    def _check_count(self, pieces: Sequence[Tensor], call: CommunicationCall) -> None:
        if len(pieces) != len(call.ranks):
            raise CommunicationError(f"rank {self.rank}: {call}: {len(pieces)} pieces for {len(call.ranks)} ranks")

    def _check_given(self, given: Sequence[Tensor], told: Sequence[Shape], call: CommunicationCall) -> None:
        """Check that this rank gives tensors of the shapes that the group was told."""
        if [tuple(t.shape) for t in given] != [tuple(shape) for shape in told]:
            found = [list(t.shape) for t in given]
            raise CommunicationError(f"rank {self.rank}: {call}: gives {found}, and says {[list(s) for s in told]}")

    def _begin(self, call: CommunicationCall, given: list[Tensor], into: list[Tensor]) -> Callable[[], None]:
        """Begin a call, and return what waits for it.

        An implementation that knows no better makes it at once, and receives a message when it is waited for, since its
        sender may wait for this rank.
        """
        if call.kind == "recv":
            return lambda: _copy([self._recv(call)], into)
        _copy(self._collective(call, given), into)
        return lambda: None

    def _answer(self, call: CommunicationCall, given: Sequence[Tensor]) -> list[Tensor]:
        values = [values_of(tensor) for tensor in given]
        return [value.clone() for value in values] if len(call.ranks) == 1 else self._collective(call, values)

    def _collective(self, call: CommunicationCall, given: list[Tensor]) -> list[Tensor]:
        """Return what a collective gives this rank: nothing for a barrier; tensors in the order of the group for an
        all_gather and an all_to_all, and one for the others."""
        raise AssertionError("implementations define this")

    def _send(self, tensor: Tensor, call: CommunicationCall) -> None:
        raise AssertionError("implementations define this")

    def _recv(self, call: CommunicationCall) -> Tensor:
        raise AssertionError("implementations define this")
