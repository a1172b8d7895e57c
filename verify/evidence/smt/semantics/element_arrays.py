"""Building blocks for the semantics of operators: object arrays of elements, and the arguments of one call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from verify.evidence.smt.element_arithmetic import Element, Numbers
from verify.evidence.smt.storage_trace import StoragePlace

Array = NDArray[np.object_]


@dataclass(frozen=True, slots=True)
class Given:
    """The arguments by the schema's names, arrays for tensors; `outputs` has shapes and dtypes of the results."""

    arguments: Mapping[str, Any]
    outputs: tuple[StoragePlace | None, ...]

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def get(self, name: str, default: Any = None) -> Any:
        """Return the argument, or `default` where the operator has none of that name or it is None."""
        value = self.arguments.get(name)
        return default if value is None else value

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the first output."""
        first = self.outputs[0]
        assert first is not None
        return first.shape


Result = Array | tuple[Array | None, ...]
Rule = Callable[[Numbers, Given], Result]
"""Semantics: from the algebra of the elements and the arguments to the outputs (or what a write leaves behind)."""


def array(items: Sequence[Element], shape: Sequence[int]) -> Array:
    """Return an array of these elements, row-major."""
    flat = np.empty(len(items), dtype=object)
    flat[:] = list(items)
    return flat.reshape(tuple(shape))


def filled(shape: Sequence[int], element: Element) -> Array:
    """Return an array that is the same everywhere."""
    found = np.empty(tuple(shape), dtype=object)
    found.fill(element)
    return found


def each(function: Callable[..., Element], *arrays: Any) -> Array:
    """Apply `function` to the elements, after broadcasting; numbers count as scalars."""
    full = np.broadcast_arrays(*(a if isinstance(a, np.ndarray) else filled((), a) for a in arrays))
    rows = zip(*(f.reshape(-1) for f in full), strict=True)
    return array([function(*row) for row in rows], full[0].shape)


def lanes(x: Array, dims: Sequence[int]) -> tuple[Array, tuple[int, ...]]:
    """Return `x` with `dims` moved to the end and made one, and the shape of what is left."""
    rest = [d for d in range(x.ndim) if d not in dims]
    moved = x.transpose([*rest, *sorted(dims)])
    left = tuple(x.shape[d] for d in rest)
    return moved.reshape(*left, -1), left
