"""Calls whose activations are computed again in backward, instead of being kept.

Where a rank runs forward and backward of a micro-batch itself, each once, a region keeps its arguments, and computes
again what backward reads when that reads the first of it: up to the last value that is read, so that the operation that
reads the last one is not run again. torch.utils.checkpoint does the same in three times as long, and once more in each
run of autograd, of which a backward in halves makes several. It serves all else: backward that is run twice, second
derivatives, and what is compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.amp.autocast_mode import is_autocast_available
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from nnscaler.runtime.communication.sharded_parameter_gathers import ParameterReads, WholeView
from nnscaler.runtime.joint_graphs.recompute_regions import marked, number_of_region

_recording: ContextVar[SavedValues | None] = ContextVar("recording", default=None)


@contextmanager
def regions_in(saved: SavedValues) -> Iterator[None]:
    """Run a forward inside whose backward runs once. `saved`: takes the arguments of its regions."""
    token = _recording.set(saved)
    try:
        yield
    finally:
        _recording.reset(token)


def recompute(function: Callable[..., Any], *tensors: Any) -> Any:
    """Call `function(*tensors)`, whose activations are computed again in backward instead of being kept."""
    compiling = torch.compiler.is_dynamo_compiling()
    if compiling and torch.is_grad_enabled():
        number = number_of_region()
        if number is not None:
            return marked(function, tensors, number)
    saved = None if compiling or not torch.is_grad_enabled() else _recording.get()
    if saved is None:
        return checkpoint(function, *tensors, use_reentrant=False, preserve_rng_state=False)
    region = _Region(function, tensors, saved)
    with saved_tensors_hooks(region.pack, region.unpack):
        return function(*tensors)


class _Stop(Exception):
    """The last value that backward reads was computed again."""


class _Region:
    """A call that keeps its arguments, and then the values that backward reads until it has read them."""

    def __init__(self, function: Callable[..., Any], tensors: Sequence[Any], saved: SavedValues) -> None:
        self._function: Callable[..., Any] | None = function  # until it is computed again
        self._tensors = [(saved.save(t), t.requires_grad) if isinstance(t, Tensor) else (t, None) for t in tensors]
        self._saved = saved
        self._packed: list[tuple[torch.Size, torch.dtype]] = []
        self._values: dict[int, Tensor] = {}
        kinds = sorted({t.device.type for t in tensors if isinstance(t, Tensor)})  # entered in this order: "cpu" first
        self._autocast = [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
            for kind in kinds
            if is_autocast_available(kind)
        ]

    def pack(self, value: Tensor) -> int:
        self._packed.append((value.shape, value.dtype))
        return len(self._packed) - 1

    def unpack(self, index: int) -> Tensor:
        if index not in self._values:
            self._compute_again()
        return self._values[index] if self._saved.keep else self._values.pop(index)

    def _compute_again(self) -> None:
        values: list[Tensor] = []

        def collect(value: Tensor) -> None:
            values.append(value.detach())
            if len(values) == len(self._packed):
                raise _Stop

        def refuse(_: None) -> Tensor:
            raise RuntimeError("a recomputed region runs backward itself")

        function, self._function = self._function, None
        if function is None:
            raise RuntimeError(GONE)
        take = self._saved.take
        own = [t if needs is None else take(t).detach().requires_grad_(needs) for t, needs in self._tensors]
        try:
            with ExitStack() as stack:
                stack.enter_context(regions_in(self._saved))
                stack.enter_context(torch.enable_grad())
                for kind, dtype, enabled in self._autocast:
                    stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
                stack.enter_context(saved_tensors_hooks(collect, refuse))
                function(*own)
        except _Stop:
            pass
        if [(value.shape, value.dtype) for value in values] != self._packed:
            raise RuntimeError("a recomputed region computes other tensors than in forward")
        self._values, self._tensors = dict(enumerate(values)), []


# The values that the forward of a micro-batch saves for its backward, by hooks of saved tensors.
# A parameter that forward has gathered (ZeRO-3) is not among them: what shows it remembers where it was gathered, and
# it is gathered again when backward reads that. Every other value is kept as it is.

GONE = "backward reads a saved value again that it had done with"


class Saved:
    """A value, and the number of changes in place at the time."""

    __slots__ = ("value", "version")

    def __init__(self, value: Tensor) -> None:
        self.value: Tensor | None = value.detach()
        self.version = value._version


class SavedValues:
    """The saved values of one micro-batch.

    reads  gathers parameters; None: all values are kept
    once   each value goes when backward reads it, unless `keep` is set
    keep   what is read now is read again
    """

    def __init__(self, reads: ParameterReads | None = None, once: bool = False) -> None:
        self.reads, self.once = reads, once
        self.keep = False

    def hooks(self) -> AbstractContextManager[None]:
        """Return what forward runs inside of."""
        return saved_tensors_hooks(self.save, self.take)

    def save(self, value: Tensor) -> Saved | WholeView:
        """Return what is kept of a value."""
        view = None if self.reads is None else self.reads.view_of_whole(value)
        return Saved(value) if view is None else view

    def take(self, saved: Saved | WholeView) -> Tensor:
        """Return the value for backward."""
        if isinstance(saved, WholeView):
            assert self.reads is not None, "it made the view"
            return self.reads.gather_again(saved, self.keep)
        value = saved.value
        if value is None:
            raise RuntimeError(GONE)
        if value._version != saved.version:  # autograd's own check is not made of values that hooks save
            raise RuntimeError(f"a tensor of shape {list(value.shape)} that backward needs was modified in place")
        if self.once and not self.keep:
            saved.value = None
        return value
