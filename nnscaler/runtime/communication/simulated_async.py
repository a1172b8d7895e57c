"""Simulated asynchronous calls of a rank: what it has begun and not waited for, and when it reads and writes memory.

By default it reads what it is given at once, and writes its results when it is waited for; that what it was given has
changed meanwhile is an error. Under random timings it reads at some moment between, writes at some later one, in any
order, and leaves no number in between in the memory that it writes: a program that computes the same under all of them
depends on none. Moments are the rank's own calls. While memory is under way, every operation that reads what is to be
written, or writes at all, is an error that names it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nnscaler.runtime.communication.communicator import CommunicationCall, UnderWayError
from nnscaler.runtime.tensor_bits_and_differences import bits_of

Give = Callable[[Sequence[Tensor]], None]
Result = Callable[[bool], list[Tensor] | None]  # whether to wait; None: not all ranks have given theirs


@dataclass(eq=False)
class _Flight:
    """A call under way. `given` is None when it was read, and `into` when the results are written."""

    call: CommunicationCall
    given: list[Tensor] | None
    into: list[Tensor] | None
    give: Give
    result: Result
    read: tuple[Tensor, ...]  # what it was given
    values: tuple[Tensor, ...] = ()  # of it when it began, where they are compared


class Flights:
    """The calls under way of one rank."""

    def __init__(self, rank: int, timings: int | None) -> None:
        self._rank = rank
        self._random = None if timings is None else random.Random(f"{timings} {rank}")
        self._flying: list[_Flight] = []
        self._lasting: list[tuple[CommunicationCall, tuple[Tensor, ...], list[int]]] = []  # with versions
        self._watch = None if timings is None else _TensorWatch(self)

    def watching(self) -> AbstractContextManager[object]:
        self._flying.clear()
        self._lasting.clear()
        return nullcontext() if self._watch is None else self._watch

    def outside(self, function: Callable[[], object]) -> None:
        """Call what may touch memory under way."""
        if self._watch is None:
            function()
        else:
            self._watch.paused += 1
            try:
                function()
            finally:
                self._watch.paused -= 1

    def start(
        self, call: CommunicationCall, given: list[Tensor], into: list[Tensor], give: Give, result: Result
    ) -> _Flight:
        for tensor in given:
            self.check(tensor, "is given to", call, writes=False)
        flight = _Flight(call, given, into, give, result, tuple(given))
        self._flying.append(flight)
        # pieces of gradients belong to nobody else, and would be held for the check alone
        if call.kind == "all_gather" or self._random is not None:
            self.keep(call, *given)
        if self._random is None or self._random.random() < 0.3:
            self.outside(lambda: self._read(flight))
        return flight

    def keep(self, call: CommunicationCall, *given: Tensor) -> None:
        """Watch what a lasting call was given, until it may be written."""
        if call.lasting and (call.kind != "send" or self._random is not None):
            self._lasting.append((call, given, [tensor._version for tensor in given]))

    def pass_time(self, blocking: bool) -> None:
        """Let calls get on, as they may whenever the rank makes another one. `blocking`: the rank waits for others now,
        who may need what it has begun to give."""
        if self._random is None or not self._flying:
            return
        for flight in self._random.sample(self._flying, len(self._flying)):
            if flight.given is not None and (blocking or self._random.random() < 0.5):
                self.outside(lambda flight=flight: self._read(flight))  # type: ignore[misc]
            elif flight.given is None and flight.into is not None and self._random.random() < 0.5:
                self.outside(lambda flight=flight: self._write(flight, wait=False))  # type: ignore[misc]

    def land(self, flight: _Flight) -> None:
        """Wait for a call. Raises UnderWayError where its memory was written meanwhile."""
        self.pass_time(blocking=True)

        def arrive() -> None:
            if flight.given is not None:
                self._read(flight)
            if flight.into is not None:
                self._write(flight, wait=True)

        self.outside(arrive)
        self._flying.remove(flight)

    def settle(self) -> None:
        """Let what `lasting` calls were given be written. Raises UnderWayError where it was."""
        lasting, self._lasting = self._lasting, []
        for call, given, versions in lasting:
            if [tensor._version for tensor in given] != versions:
                message = "what it was given was written before it was settled"
                raise UnderWayError(f"rank {self._rank}: {call}: {message}")

    def check(self, tensor: Tensor, how: str, by: object, *, writes: bool) -> None:
        """Raise UnderWayError where a tensor lies in memory that is under way."""
        for flight in self._flying:
            if any(_meet(tensor, place) for place in flight.into or ()) or (
                writes and any(_meet(tensor, place) for place in flight.read)
            ):
                raise UnderWayError(
                    f"rank {self._rank}: memory of {flight.call} {how} {by} before the call was waited for"
                )

    def _read(self, flight: _Flight) -> None:
        assert flight.given is not None and flight.into is not None
        values, flight.given = [t.clone() for t in flight.given], None
        if self._random is None:
            flight.values = tuple(values)
        else:
            for place in flight.into:
                place.fill_(torch.nan if place.is_floating_point() else 1)
        flight.give(values)

    def _write(self, flight: _Flight, wait: bool) -> None:
        found = flight.result(wait)
        if found is None:
            return
        for tensor, value in zip(flight.read, flight.values, strict=False):
            if not torch.equal(bits_of(tensor), bits_of(value)):
                message = "what it was given was written after it began, and before it was waited for"
                raise UnderWayError(f"rank {self._rank}: {flight.call}: {message}")
        assert flight.into is not None
        for value, place in zip(found, flight.into, strict=True):
            place.copy_(value)
        flight.into = None


def _meet(tensor: Tensor, other: Tensor) -> bool:
    """Return whether two tensors may share memory: whether their ranges do, in one storage."""
    if not tensor.numel() or not other.numel() or tensor.device != other.device:
        return False
    if tensor.untyped_storage().data_ptr() != other.untyped_storage().data_ptr():
        return False
    (start, end), (first, last) = _range(tensor), _range(other)
    return start < last and first < end


def _range(tensor: Tensor) -> tuple[int, int]:
    size = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return start, start + size * tensor.element_size()


class _TensorWatch(TorchDispatchMode):
    """Checks the tensors of every operation of a rank."""

    def __init__(self, flights: Flights) -> None:
        super().__init__()
        self._flights = flights
        self.paused = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.paused and self._flights._flying and not _is_view(func):
            changed = [a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments]
            named = {a.name: c for a, c in zip(func._schema.arguments, changed, strict=True)}
            pairs = [*zip(args, changed, strict=False), *((v, named.get(k, False)) for k, v in (kwargs or {}).items())]
            for value, writes in pairs:
                for leaf in tree_leaves(value):
                    if isinstance(leaf, Tensor):
                        self._flights.check(leaf, "is written by" if writes else "is read by", func, writes=writes)
        return func(*args, **(kwargs or {}))


def _is_view(func: Any) -> bool:
    """Return whether an operation only makes another tensor of the same memory."""
    return any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
