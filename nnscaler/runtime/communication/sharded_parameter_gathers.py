"""Gather parameters that lie in shards where the text reads them (ZeRO-3): begun before, waited for there.

A whole is there as long as the text reads it. Backward, which reads it too, gathers it once more: what autograd saves
of it is a `WholeView` (graphs of torch.compile have gathers of their own, `gather_again_in_backward`). In a region that
is computed again it is gathered with the rest of it, and no third time.

The text reads the same parameters in the same order in each pass. The first pass of a kind finds this order; from then
on the gathers of what comes next are under way while the present one is used. A gradient is summed and scattered while
backward goes on, and added to `.grad` at its end. So all ranks that run a text begin the same calls in the same order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Parameter

from nnscaler import communication_buckets
from nnscaler.layout import Sharded
from nnscaler.runtime.communication.communicator import Communicator, Pending
from nnscaler.runtime.cut_tensors import join_pieces, pieces_of

Pass = tuple[int, str]  # stage, and kind of instruction


@dataclass(frozen=True, slots=True)
class Read:
    """A place where the text gathers a parameter.

    ranks, index  of the axis, and of this rank on it
    cut           how the axis cuts the whole
    place         file:line
    """

    parameter: Parameter
    ranks: tuple[int, ...]
    index: int
    cut: Sharded
    place: str | None

    def alike(self, other: Read) -> bool:
        return self.parameter is other.parameter and (self.ranks, self.cut) == (other.ranks, other.cut)


@dataclass(slots=True)
class _GatherInFlight:
    """A whole that is under way. `made`: puts it together when all parts are there."""

    read: Read
    pending: Pending
    made: Callable[[], Tensor]
    nbytes: int


@dataclass(slots=True)
class _GradientInFlight:
    """A gradient that is under way, or waits for others to begin with it.

    part      of its sum that is this rank's
    gradient  of the whole
    """

    read: Read
    part: Tensor
    gradient: Tensor
    nbytes: int
    pending: Pending | None = None

    @property
    def parameter(self) -> Parameter:
        return self.read.parameter


@dataclass(eq=False, slots=True)
class _Gathered:
    """A parameter that a forward has gathered.

    read    where
    dtype   of the whole
    begun   whether its gathers are begun before they are waited for
    views   that autograd has saved of it, and not read back
    whole   while backward reads it
    """

    read: Read
    dtype: torch.dtype
    begun: bool
    views: int = 0
    whole: Tensor | None = None


@dataclass(frozen=True, slots=True)
class WholeView:
    """A value that autograd saves of a parameter that was gathered: where in its memory it lies."""

    gathered: _Gathered
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


@dataclass(eq=False)
class ParameterReads:
    """The gathers of one rank's parameters, and the way back of their gradients."""

    communicator: Communicator
    _known: dict[Parameter, int] = field(default_factory=dict)  # with their numbers
    _numbered: list[Parameter] = field(default_factory=list)
    _orders: dict[Pass, list[Read]] = field(default_factory=dict)
    _order: list[Read] | None = None  # of the pass that runs, if it is known
    _ahead_bytes: dict[Pass, int] = field(default_factory=dict)  # that may be under way in a pass of known order
    _most_ahead: int = 0  # of the pass that runs
    _seen: list[Read] = field(default_factory=list)
    _seen_bytes: int = 0  # of their wholes: the same on all ranks, which shards need not be
    _begun: int = 0  # reads of the order that were begun
    _ahead: deque[_GatherInFlight] = field(default_factory=deque)
    _going_back: deque[_GradientInFlight] = field(default_factory=deque)
    _totals: dict[Parameter, Tensor] = field(default_factory=dict)
    # by the address of a storage, of the pass that runs; the reference keeps the address from being used again
    _wholes: dict[int, tuple[StorageWeakRef, _Gathered]] = field(default_factory=dict)
    _quiet: set[Pass] = field(default_factory=set)  # which gather nothing

    def know(self, parameters: Iterable[Parameter]) -> None:
        """Take part in the reads of these parameters from now on."""
        for parameter in parameters:
            if parameter not in self._known:
                self._known[parameter] = len(self._numbered)
                self._numbered.append(parameter)

    def knows(self, tensor: Tensor) -> bool:
        return tensor in self._known if isinstance(tensor, Parameter) else False

    def number_of(self, parameter: Parameter) -> int:
        return self._known[parameter]

    def parameter(self, number: int) -> Parameter:
        """Return the parameter with a number."""
        return self._numbered[number]

    def gathers(self, which: Pass) -> bool:
        """Return whether a pass may gather parameters: all do for which none was ever run."""
        return which not in self._quiet

    @contextmanager
    def passing(self, which: Pass) -> Iterator[None]:
        """Run a pass of the text inside, forward or backward."""
        self._order, self._seen, self._seen_bytes, self._begun = self._orders.get(which), [], 0, 0
        self._most_ahead = self._ahead_bytes.get(which, 0)
        self._forget()  # of a pass that failed
        self._totals.clear()
        self._wholes.clear()
        self._go_ahead()
        yield
        self._forget()
        self.communicator.settle()
        if not self._wholes:
            self._quiet.add(which)
        self._wholes.clear()
        if self._order is None:
            self._ahead_bytes[which] = communication_buckets.gathered_ahead(self._seen_bytes)
        self._orders[which] = self._seen
        self._order = None

    def whole(self, read: Read) -> Tensor:
        """Return a parameter whole."""
        self._seen.append(read)
        if self._order is not None and not (self._ahead and self._ahead[0].read.alike(read)):
            self._forget()  # this pass reads in another order than the one before
            self._order = None
        found = self._ahead.popleft() if self._order is not None else self._begin(read)
        self._seen_bytes += found.nbytes
        self._go_ahead()
        found.pending.wait()
        return self.remember(found.made(), read, begun=True)

    def remember(self, whole: Tensor, read: Read, begun: bool = False) -> Tensor:
        """Let go of a whole of several dims after the pass that runs: what is saved of it is gathered again. Return
        it."""
        if whole.dim() < 2:  # what is saved is not worth a call
            return whole
        storage = whole.untyped_storage()
        self._wholes[storage._cdata] = StorageWeakRef(storage), _Gathered(read, whole.dtype, begun)
        return whole

    def view_of_whole(self, value: Tensor) -> WholeView | None:
        """Return how a value that autograd saves lies in a whole; None where it lies in none."""
        if not self._wholes or value.layout != torch.strided or value.is_conj() or value.is_neg():
            return None
        _, gathered = self._wholes.get(value.untyped_storage()._cdata, (None, None))
        if gathered is None or gathered.dtype != value.dtype:
            return None
        gathered.views += 1
        return WholeView(gathered, value.shape, value.stride(), int(value.storage_offset()))

    def gather_again(self, view: WholeView, keep: bool = False) -> Tensor:
        """Return a value of a whole, which stays until backward has read all that was saved of it. `keep`: it reads
        this value again."""
        gathered = view.gathered
        if gathered.whole is None:
            gathered.whole = self.whole(gathered.read) if gathered.begun else self._at_once(gathered.read)
        whole = gathered.whole
        if not keep:
            gathered.views -= 1
            if gathered.views <= 0:
                gathered.whole = None
        return whole.as_strided(view.shape, view.stride, view.offset)

    def _at_once(self, read: Read) -> Tensor:
        gathered = self._begin(read)
        gathered.pending.wait()
        return gathered.made()

    def give(self, read: Read, gradient: Tensor) -> None:
        """Begin to sum the gradient of a whole over the ranks that read it, with small ones that come after it.
        `settle` adds this rank's part."""
        part = torch.empty_like(read.parameter, memory_format=torch.contiguous_format)
        self._going_back.append(_GradientInFlight(read, part, gradient, gradient.nbytes))
        if (
            sum(p.nbytes for p in self._going_back if p.pending is None)
            >= communication_buckets.AHEAD_BYTES // communication_buckets.BATCHES
        ):
            self._begin_back()
        while len(self._going_back) > 1 and sum(p.nbytes for p in self._going_back) > communication_buckets.AHEAD_BYTES:
            self._arrive()

    def settle(self) -> None:
        """At the end of a backward, add the gradients to those of other micro-batches."""
        while self._going_back:
            self._arrive()
        for parameter, total in self._totals.items():
            if parameter.grad is None:
                parameter.grad = total
            else:
                parameter.grad.add_(total)
        self._totals.clear()

    def awaits(self, parameter: Tensor) -> bool:
        """Return whether `settle` will add to the gradient of a parameter."""
        if not self._totals and not self._going_back:  # of most programs
            return False
        return parameter in self._totals or any(p.parameter is parameter for p in self._going_back)

    def _arrive(self) -> None:
        if self._going_back[0].pending is None:
            self._begin_back()
        back = self._going_back.popleft()
        assert back.pending is not None, "it has begun"
        back.pending.wait()
        known = self._totals.get(back.parameter)
        self._totals[back.parameter] = back.part if known is None else known.add_(back.part)

    def _begin_back(self) -> None:
        """Begin to sum the gradients that wait."""
        with self.communicator.together(lasting=True):
            for back in self._going_back:
                if back.pending is None:
                    read = back.read
                    with self.communicator.at(read.place):
                        pieces = pieces_of(back.gradient, read.cut, len(read.ranks))
                        back.pending = self.communicator.start_reduce_scatter(pieces, back.part, read.ranks)

    def _go_ahead(self) -> None:
        """Begin what comes next, much at a time: what is begun together shares messages."""
        if self._order is None:
            return
        flying = sum(whole.nbytes for whole in self._ahead)
        if self._ahead and flying > self._most_ahead // 2:
            return
        with self.communicator.together(lasting=True):
            while self._begun < len(self._order) and (not self._ahead or flying < self._most_ahead):
                self._ahead.append(self._begin(self._order[self._begun]))
                self._begun += 1
                flying += self._ahead[-1].nbytes

    def _forget(self) -> None:
        """Wait for what was begun and is not read, or not added."""
        while self._ahead:
            self._ahead.popleft().pending.wait()
        while self._going_back:
            pending = self._going_back.popleft().pending
            if pending is not None:
                pending.wait()

    def _begin(self, read: Read) -> _GatherInFlight:
        own, cut, count = read.parameter.detach(), read.cut, len(read.ranks)
        shapes = [cut.shape_at(own.shape, i) for i in range(count)]
        if cut.outer == 1 and not cut.sections:
            sizes = [shape[cut.dim] for shape in shapes]
            whole = own.new_empty((*own.shape[: cut.dim], sum(sizes), *own.shape[cut.dim + 1 :]))
            parts, made = list(whole.split(sizes, cut.dim)), lambda: whole
        else:
            parts = [own.new_empty(shape) for shape in shapes]
            made = lambda: join_pieces(parts, cut)  # noqa: E731
        with self.communicator.at(read.place), self.communicator.together(lasting=True):
            pending = self.communicator.start_all_gather(own, parts, read.ranks, shapes if cut.sizes else None)
        return _GatherInFlight(read, pending, made, sum(part.nbytes for part in parts))
