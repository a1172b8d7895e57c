"""Share kernels of torch among threads only where a model is large.

Threads that share a small kernel wait for each other at its end: milliseconds, where something else holds a core, and
most kernels of a verification take microseconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import nn
from torch.nn.parameter import is_lazy

_LARGE = 1 << 24  # elements of a model, from which on threads save more than they wait for

_outside: ContextVar[int | None] = ContextVar("outside", default=None)


@contextmanager
def kernel_threads(model: nn.Module | None = None) -> Iterator[None]:
    """Run kernels inside on one thread, or, for a model that is large, on all that the process uses."""
    before = torch.get_num_threads()
    outside = _outside.get() or before
    token = _outside.set(outside)
    tensors = () if model is None else (*model.parameters(), *model.buffers())
    large = sum(tensor.numel() for tensor in tensors if not is_lazy(tensor)) >= _LARGE
    torch.set_num_threads(outside if large else 1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
        _outside.reset(token)
