"""Buckets of gradients: flat memory in which those of several parameters travel together.

Gradients are copied into their places in it as backward makes them, or lie there from the first micro-batch on. A
bucket leaves when all of its gradients are complete, and comes back when it is waited for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod

import torch
from torch import Tensor

from nnscaler.runtime.communication.communicator import SUMMED, Communicator, Pending
from nnscaler.runtime.training.zero_1_2_and_master_weights import Division, unflattened

_NAMED = 3  # parameters of a bucket that an error names
Group = tuple[int, ...]


class Bucket:
    """Gradients that travel together over one group.

    names  of the parameters, which the call is said to sum; empty: it is one of the instruction that runs
    """

    def __init__(self, group: Group, names: tuple[str, ...], count: int) -> None:
        self.group, self.names, self._count = group, names, count
        self.ranks = tuple(sorted(group))
        self._context = _told(names)
        self._missing = count
        self._pending: Pending | None = None

    def begin(self) -> None:
        """Begin a step: nothing lies in the bucket."""
        self._missing, self._pending = self._count, None

    @property
    def complete(self) -> bool:
        return not self._missing

    def filled(self) -> None:
        """Note that one more gradient lies in its place."""
        self._missing -= 1

    def start(self, communicator: Communicator) -> None:
        """Begin the sum of what lies in the places."""
        before = communicator.context
        communicator.context = self._context or before
        try:
            self._pending = self._begin(communicator)
        finally:
            communicator.context = before

    def wait(self) -> None:
        """Return when the sums are there."""
        pending, self._pending = self._pending, None
        assert pending is not None, "it was started"
        pending.wait()

    def _begin(self, communicator: Communicator) -> Pending:
        raise AssertionError("a kind of bucket defines this")


class SumBucket(Bucket):
    """Gradients that are summed in place, in flat memory that serves step after step: new memory costs more than the
    sum of what lies in it.

    What somebody still holds of an earlier step, such as gradients that were not set to None, is not written over.
    """

    def __init__(
        self,
        group: Group,
        names: tuple[str, ...],
        shapes: Sequence[Sequence[int]],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(group, names, len(shapes))
        self._shapes = [tuple(shape) for shape in shapes]
        self._dtype, self._device = dtype, device
        self._flat: Tensor | None = None
        self._places: list[Tensor] = []
        self._of_step = False  # whether the memory is that of the step that runs

    def begin(self) -> None:
        super().begin()
        self._of_step = False

    def place(self, position: int) -> Tensor:
        """Return where a gradient lies: a view of the flat memory, the same one in each step with this memory. What is
        handed out as a gradient is another view, by which it is seen that somebody holds it."""
        if not self._of_step:
            self._of_step = True
            if self._flat is None or _holders(self._flat) > 1 + len(self._places):
                sizes = [prod(shape) for shape in self._shapes]
                self._flat = torch.empty(sum(sizes), dtype=self._dtype, device=self._device)
                self._places = [p.view(s) for p, s in zip(self._flat.split(sizes), self._shapes, strict=True)]
        return self._places[position]

    def _begin(self, communicator: Communicator) -> Pending:
        assert self._flat is not None, "gradients lie in it"
        return communicator.start_all_reduce(self._flat, self.group)


def _holders(tensor: Tensor) -> int:
    """Return how many tensors have the memory of this one, itself included."""
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) - 1  # without the object that asks


class DivisionBucket(Bucket):
    """Gradients of leaves that are summed, each rank getting its part of each."""

    def __init__(
        self, names: tuple[str, ...], divisions: Sequence[Division], dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(divisions[0].group, names, len(divisions))
        self._divisions, self._dtype, self._device = list(divisions), dtype, device
        self._like = list(zip(*(d.like for d in divisions), strict=True))  # by rank
        self._pieces: list[Tensor] = []  # for each rank
        self._places: list[tuple[Tensor, ...]] = []  # of each gradient, for each rank
        self._part: Tensor | None = None

    def take(self, position: int, gradient: Tensor) -> None:
        """Copy the gradient of a leaf to where the parts of each rank lie."""
        if not self._pieces:
            lengths = [sum(part.numel() for part in own) for own in self._like]
            self._pieces = list(torch.empty(sum(lengths), dtype=self._dtype, device=self._device).split(lengths))
            self._places = list(zip(*map(unflattened, self._pieces, self._like), strict=True))
        self._divisions[position].cut(gradient, self._places[position])

    def parts(self) -> list[Tensor]:
        """Return this rank's part of the sum of each gradient, after `wait`."""
        assert self._part is not None, "it was started"
        here, self._pieces, self._places = self._divisions[0].index, [], []
        return list(unflattened(self._part, self._like[here]))

    def _begin(self, communicator: Communicator) -> Pending:
        self._part = torch.empty_like(self._pieces[self._divisions[0].index])
        return communicator.start_reduce_scatter(self._pieces, self._part, self.group)


class Departures:
    """Buckets that leave when they are complete, those of one group in one order."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._waiting: dict[Group, list[Bucket]] = {}

    def expect(self, buckets: Iterable[Bucket], *, first: bool = False) -> None:
        """Let buckets leave after those that are expected, or before all that have not left."""
        new: dict[Group, list[Bucket]] = {}
        for bucket in buckets:
            new.setdefault(bucket.ranks, []).append(bucket)
        for group, found in new.items():
            before = self._waiting.get(group, [])
            self._waiting[group] = [*found, *before] if first else [*before, *found]

    def filled(self, bucket: Bucket) -> None:
        """Note that one more gradient lies in the bucket, and let leave what may."""
        bucket.filled()
        if bucket.complete:
            waiting = self._waiting[bucket.ranks]
            while waiting and waiting[0].complete:
                waiting.pop(0).start(self._communicator)


def _told(names: Sequence[str]) -> str:
    """Return what calls are recorded as, by the parameters whose gradients they sum; empty without names."""
    named, more = [f"`{name}`" for name in names[:_NAMED]], len(names) - _NAMED
    return SUMMED + ", ".join(named) + (f" and {more} more" if more > 0 else "") if names else ""
