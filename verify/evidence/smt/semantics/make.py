"""Semantics of operators that make tensors from numbers, copy them, and put them together."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from types import MappingProxyType
from typing import Any

import numpy as np

from verify.evidence.smt.algebra import Element, Numbers
from verify.evidence.smt.errors import Unsupported
from verify.evidence.smt.semantics.rule import Array, Given, Rule, array, filled, whole


def _filled(value: Any) -> Rule:
    """`value`: an element, or the name of the argument that has it."""

    def rule(_al: Numbers, given: Given) -> Array:
        return filled(given.shape, given[value] if isinstance(value, str) else value)

    return rule


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


def _fill(_al: Numbers, given: Given) -> Array:
    x, value = given["self"], given["value"]
    return filled(x.shape, value[()] if isinstance(value, np.ndarray) else value)


def _zero(_al: Numbers, given: Given) -> Array:
    return filled(given["self"].shape, 0)


def _copy(_al: Numbers, given: Given) -> Array:
    return np.broadcast_to(given["src"], given["self"].shape)


def _cat(_al: Numbers, given: Given) -> Array:
    tensors = given["tensors"]
    ndim = max(t.ndim for t in tensors)
    used = [t for t in tensors if t.ndim == ndim]  # others are empty, and skipped
    return np.concatenate(used, axis=whole(given["dim"], ndim))


def _stack(_al: Numbers, given: Given) -> Array:
    tensors = given["tensors"]
    return np.stack(tensors, axis=given["dim"] % (tensors[0].ndim + 1))


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


def _triangle(keep_lower: bool) -> Rule:
    def rule(_al: Numbers, given: Given) -> Array:
        x, diagonal = given["self"], given["diagonal"]
        rows, columns = x.shape[-2:]
        offset = np.arange(columns) - np.arange(rows)[:, None]
        kept = offset <= diagonal if keep_lower else offset >= diagonal
        return np.where(kept, x, filled((), 0))

    return rule


def _pixel_shuffle(_al: Numbers, given: Given) -> Array:
    """[*, c r r, h, w] -> [*, c, h r, w r]."""
    x: Array = given["self"]
    r = given["upscale_factor"]
    *lead, _, h, w = x.shape
    at = len(lead)
    blocks = x.reshape(*lead, -1, r, r, h, w)
    return blocks.transpose([*range(at), at, at + 3, at + 1, at + 4, at + 2]).reshape(given.shape)


def _pixel_unshuffle(_al: Numbers, given: Given) -> Array:
    """[*, c, h r, w r] -> [*, c r r, h, w]."""
    x: Array = given["self"]
    r = given["downscale_factor"]
    *lead, c, h, w = x.shape
    at = len(lead)
    blocks = x.reshape(*lead, c, h // r, r, w // r, r)
    return blocks.transpose([*range(at), at, at + 2, at + 4, at + 1, at + 3]).reshape(given.shape)


def _scalar(_al: Numbers, given: Given) -> Array:
    return filled((), given["s"])


RULES: Mapping[str, Rule] = MappingProxyType(
    {
        **{f"aten.{name}": _unwritten for name in ("empty.memory_format", "empty_like.default", "new_empty.default")},
        **{f"aten.{name}": _unwritten for name in ("empty_strided.default", "new_empty_strided.default")},
        **{f"aten.{name}.default": _filled(0) for name in ("zeros", "zeros_like", "new_zeros", "_efficientzerotensor")},
        **{f"aten.{name}.default": _filled(1) for name in ("ones", "ones_like", "new_ones")},
        **{f"aten.{name}.default": _filled("fill_value") for name in ("full", "full_like", "new_full")},
        **{f"aten.arange.{name}": _arange for name in ("default", "start", "start_step")},
        "aten.scalar_tensor.default": _scalar,
        "aten.eye.default": _eye,
        "aten.eye.m": _eye,
        "aten.linspace.default": _linspace,
        "aten.fill.Scalar": _fill,
        "aten.fill.Tensor": _fill,
        "aten.zero.default": _zero,
        "aten.copy.default": _copy,
        "aten.cat.default": _cat,
        "aten.stack.default": _stack,
        "aten.repeat.default": _repeat,
        "aten.flip.default": _flip,
        "aten.roll.default": _roll,
        "aten.constant_pad_nd.default": _constant_pad,
        "aten.tril.default": _triangle(keep_lower=True),
        "aten.triu.default": _triangle(keep_lower=False),
        "aten.pixel_shuffle.default": _pixel_shuffle,
        "aten.pixel_unshuffle.default": _pixel_unshuffle,
    }
)
