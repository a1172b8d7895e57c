"""Semantics of operators that make tensors from numbers, copy them, and concatenate, repeat, pad or reorder them."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from types import MappingProxyType

import numpy as np

from op_registry.builtin._name_and_broadcast_dims import whole

from verify.evidence.smt.element_arithmetic import Element, Numbers, Unsupported
from verify.evidence.smt.semantics.element_arrays import Array, Given, Rule, array, filled


def _filled(_al: Numbers, given: Given) -> Array:
    return filled(given.shape, given["fill_value"])


def _unwritten(_al: Numbers, given: Given) -> Array:
    return filled(given.shape, None)


def _arange(al: Numbers, given: Given) -> Array:
    start, step = given.get("start", 0), given.get("step", 1)
    (size,) = given.shape
    if al.symbolic(start) or al.symbolic(step):
        raise Unsupported("its bounds are values")
    return array([start + i * step for i in range(size)], (size,))


def _eye(_al: Numbers, given: Given) -> Array:
    rows, columns = given.shape
    return array([int(i == j) for i in range(rows) for j in range(columns)], given.shape)


def _linspace(_al: Numbers, given: Given) -> Array:
    start, end, steps = Fraction(given["start"]), Fraction(given["end"]), given["steps"]
    return array([start + (end - start) * Fraction(i, max(steps - 1, 1)) for i in range(steps)], (steps,))


def _zeros(_al: Numbers, given: Given) -> Array:
    return filled(given.shape, 0)


def _copy(_al: Numbers, given: Given) -> Array:
    return np.broadcast_to(given["src"], given["self"].shape)


def _cat(_al: Numbers, given: Given) -> Array:
    tensors = given["tensors"]
    ndim = max(t.ndim for t in tensors)
    used = [t for t in tensors if t.ndim == ndim]  # others are empty, and skipped
    return np.concatenate(used, axis=whole(given["dim"], ndim))


def _repeat(_al: Numbers, given: Given) -> Array:
    return np.tile(given["self"], tuple(given["repeats"]))


def _flip(_al: Numbers, given: Given) -> Array:
    return np.flip(given["self"], axis=tuple(given["dims"]))


def _roll(_al: Numbers, given: Given) -> Array:
    dims = given["dims"] or None
    shifts = given["shifts"]
    return np.roll(given["self"], shifts[0] if dims is None else shifts, axis=dims)


def _constant_pad(_al: Numbers, given: Given) -> Array:
    x: Array = given["self"]
    pads, value = given["pad"], given["value"]
    for i in range(0, len(pads), 2):
        x = _padded(x, x.ndim - 1 - i // 2, pads[i], pads[i + 1], value)
    return x


def _padded(x: Array, dim: int, before: int, after: int, value: Element) -> Array:
    """Negative amounts leave entries out."""
    x = x[(slice(None),) * dim + (slice(max(-before, 0), x.shape[dim] - max(-after, 0)),)]
    shape = list(x.shape)
    ends = [filled([*shape[:dim], max(n, 0), *shape[dim + 1 :]], value) for n in (before, after)]
    return np.concatenate([ends[0], x, ends[1]], axis=dim)


def _scalar(_al: Numbers, given: Given) -> Array:
    return filled((), given["s"])


RULES: Mapping[str, Rule] = MappingProxyType(
    {
        **{f"aten.{name}": _unwritten for name in ("empty.memory_format", "empty_like.default")},
        **{f"aten.{name}": _unwritten for name in ("empty_strided.default", "new_empty_strided.default")},
        "aten._efficientzerotensor.default": _zeros,
        "aten.full.default": _filled,
        "aten.full_like.default": _filled,
        "aten.arange.start_step": _arange,
        "aten.scalar_tensor.default": _scalar,
        "aten.eye.default": _eye,
        "aten.eye.m": _eye,
        "aten.linspace.default": _linspace,
        "aten.copy.default": _copy,
        "aten.cat.default": _cat,
        "aten.repeat.default": _repeat,
        "aten.flip.default": _flip,
        "aten.roll.default": _roll,
        "aten.constant_pad_nd.default": _constant_pad,
    }
)
