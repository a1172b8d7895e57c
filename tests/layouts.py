"""Layouts by definition: the one second opinion on how values are cut and how gradients lie.

`nnscaler.runtime.cut_tensors` and `nnscaler.layout` are the product's. What is here shares nothing with them.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

_GRADIENT = {"Replicated": "Partial", "Partial": "Replicated"}  # a copy's gradient is a partial sum, and the reverse


class Cut(Protocol):
    """The cut of a dim, as a `Sharded` state or an axis of a split identifier has it."""

    @property
    def outer(self) -> int: ...

    @property
    def sections(self) -> tuple[int, ...]: ...

    @property
    def sizes(self) -> tuple[int, ...]: ...


def positions(size: int, digits: Sequence[tuple[Cut, int, int]]) -> NDArray[np.int64]:
    """Return the entries of a dim that a rank has, in order: those whose digit on each axis is the rank's.

    `digits`: (how the axis cuts the dim, its parts, the rank's coordinate).
    """
    entries = np.arange(size)
    for cut, parts, coordinate in digits:
        blocks = cut.sections or (size // cut.outer,) * cut.outer
        digit = np.concatenate([np.repeat(np.arange(parts), cut.sizes or block // parts) for block in blocks])
        entries = entries[digit[entries] == coordinate]
    return entries


def gradient_states(states: Mapping[str, Any]) -> dict[str, Any]:
    """Return how the gradient of a tensor with these states lies, read as a value."""
    return {axis: gradient_of(state) for axis, state in states.items()}


def gradient_of(state: Any) -> Any:
    """Return the state of a tensor's gradient, in the words in which the tensor's is given."""
    name = _GRADIENT.get(type(state).__name__)
    return state if name is None else getattr(sys.modules[type(state).__module__], name)()
