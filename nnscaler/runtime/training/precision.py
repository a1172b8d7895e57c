"""The dtypes of a rank program under the precision that it runs in.

`dtypes.float32` in a program is torch.float32 unless its executor was given another precision; "float64" then maps
every floating dtype to float64, so that a program can be compared exactly.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from nnscaler.runtime.communication.communicator import ProgramError

_COMPLEX = {torch.float64: torch.complex128, torch.float32: torch.complex64}


def dtype_named(name: str, precision: str | None = None) -> torch.dtype:
    """Return the torch dtype called `name`, mapped to `precision` when it is floating.

    Raises ProgramError if none is.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ProgramError(f"no dtype is called {name!r}")
    return in_precision(dtype, precision)


def in_precision(dtype: torch.dtype, precision: str | None) -> torch.dtype:
    """`dtype`, or the dtype that takes its place in a run of this precision."""
    if precision is None or not (dtype.is_floating_point or dtype.is_complex):
        return dtype
    target = dtype_named(precision)
    return _COMPLEX.get(target, dtype) if dtype.is_complex else target


_current: ContextVar[str | None] = ContextVar("precision", default=None)


@contextmanager
def precision_of_run(precision: str | None) -> Iterator[None]:
    """`dtypes` mean this precision inside, in this thread."""
    token = _current.set(precision)
    try:
        yield
    finally:
        _current.reset(token)


class Dtypes:
    """`dtypes.<name>`: the torch dtype of that name in the precision of the run."""

    def __getattr__(self, name: str) -> torch.dtype:
        if name.startswith("__"):
            raise AttributeError(name)
        try:
            return dtype_named(name, _current.get())
        except ProgramError as error:
            raise AttributeError(str(error)) from None


dtypes = Dtypes()
