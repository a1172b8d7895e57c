"""Errors planted in how the runtime sums gradients, and gathers parameters, while a rank computes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from torch import Tensor

from nnscaler import communication_buckets
from nnscaler.runtime.communication.communicator import Communicator
from nnscaler.runtime.communication.sharded_parameter_gathers import ParameterReads
from nnscaler.runtime.training.gradients.accumulate_and_reduce import Gradients
from nnscaler.runtime.training.gradients.buckets import Bucket, Departures, SumBucket
from verify.self_test.training.engine_faults import Change, Fault, changed


def together(*faults: Fault) -> Fault:
    """Plant several."""

    @contextmanager
    def fault() -> Iterator[None]:
        with ExitStack() as stack:
            for one in faults:
                stack.enter_context(one())
            yield

    return fault


small_buckets = changed(communication_buckets, "LEAST_BYTES", lambda _: 256)


def _of_bucket(name: str, change: Change) -> Fault:
    """A method of buckets that are summed in place: `change(right, bucket, ...)`."""
    return changed(SumBucket, name, lambda right: lambda self, *given: change(right, self, *given))


def early_start(parameter: str) -> Fault:
    """A sum begins when all gradients of its bucket but one are there, which comes while it is under way."""

    def start(right: Change, self: SumBucket, communicator: Communicator) -> None:
        if parameter not in self.names:
            right(self, communicator)
            return
        place = self.place(self.names.index(parameter))
        late = place.clone()
        place.zero_()
        right(self, communicator)
        place.copy_(late)

    return _of_bucket("start", start)


def early_read() -> Fault:
    """The sum is read before it is waited for."""

    def wait(right: Change, self: SumBucket) -> None:
        read = [self.place(i).clone() for i in range(len(self.names))]
        right(self)
        for i, value in enumerate(read):
            self.place(i).copy_(value)

    return _of_bucket("wait", wait)


def no_wait() -> Fault:
    """Nothing waits for a sum."""

    def wait(_right: Change, _self: SumBucket) -> None: ...

    return _of_bucket("wait", wait)


def wrong_view(first: str, second: str) -> Fault:
    """Two parameters of one shape are each given the place of the other in the bucket, after the sum."""

    def wait(right: Change, self: SumBucket) -> None:
        right(self)
        if first in self.names and second in self.names:
            places = [self.place(self.names.index(name)) for name in (first, second)]
            values = [place.clone() for place in reversed(places)]
            for place, value in zip(places, values, strict=True):
                place.copy_(value)

    return _of_bucket("wait", wait)


def other_order(rank: int) -> Fault:
    """One rank lets its buckets leave in another order than the others of the group."""

    def expecting(right: Change) -> Change:
        def expect(self: Departures, found: Iterable[Bucket], **more: Any) -> None:
            order = list(found)
            right(self, reversed(order) if self._communicator.rank == rank else order, **more)

        return expect

    return together(small_buckets, changed(Departures, "expect", expecting))


def forgotten(parameter: str) -> Fault:
    """The bucket of one parameter never leaves."""

    def start(right: Change, self: SumBucket, communicator: Communicator) -> None:
        if parameter not in self.names:
            right(self, communicator)

    def wait(right: Change, self: SumBucket) -> None:
        if parameter not in self.names:
            right(self)

    return together(small_buckets, _of_bucket("start", start), _of_bucket("wait", wait))


def summed_each_time(parameter: str) -> Fault:
    """A gradient is summed over ranks after each micro-batch, and all that was added up again after the last."""

    def collecting(right: Change) -> Change:
        def collect(self: Gradients, stage: int) -> None:
            last = self._running is not None and self._running[2]
            right(self, stage)
            for one, (bucket, position) in self._place.items():
                if not last and one.held.fqn == parameter and one in self._added and stage in one.stages:
                    place = bucket.place(position)
                    place.copy_(self._communicator.all_reduce(place, bucket.group))

        return collect

    return changed(Gradients, "collect", collecting)


def unawaited_whole() -> Fault:
    """A parameter is read while it is still gathered."""

    def whole(_right: Change, self: ParameterReads, read: Any) -> Tensor:
        found: Tensor = self._begin(read).made().zero_()
        return found

    return changed(ParameterReads, "whole", lambda right: lambda self, read: whole(right, self, read))


def early_part() -> Fault:
    """The part of a gradient is added to `.grad` before the sum over ranks is there."""

    def arriving(right: Change) -> Change:
        def arrive(self: ParameterReads) -> None:
            back = self._going_back[0]
            own = back.part.zero_().clone()
            right(self)
            self._totals[back.parameter].copy_(own)

        return arrive

    return changed(ParameterReads, "_arrive", arriving)


def gathered_before_the_update() -> AbstractContextManager[object]:
    """What the next step reads first is gathered at the end of this one, before the optimizer has updated it."""

    def beginning(right: Change) -> Change:
        def begin(self: ParameterReads, read: Any) -> Any:
            kept = self.__dict__.setdefault("_kept", {})
            found = right(self, read)
            if id(read.parameter) in kept:
                old = kept[id(read.parameter)]
                return type(found)(found.read, found.pending, lambda: old, found.nbytes)
            made = found.made

            def keep() -> Tensor:
                value: Tensor = made()
                kept[id(read.parameter)] = value.clone()
                return value

            return type(found)(found.read, found.pending, keep, found.nbytes)

        return begin

    return changed(ParameterReads, "_begin", beginning)()
