"""Changes of dtype. None of them passes partial sums: rounding before the sum is not rounding after it."""

from __future__ import annotations

from collections.abc import Sequence

from op_registry.builtin._dims import annotate, letters, tensor
from op_registry.call import Call
from op_registry.spec import OperatorSpec


def companion(shape: Sequence[int], target: Sequence[int], names: Sequence[str]) -> list[str]:
    """Dims of an operand whose values do not matter (it only gives a dtype).

    It shares a dim of the result where the sizes agree, so that it may stay sharded as the others are.
    """
    offset = len(target) - len(shape)
    return [
        names[offset + i] if offset + i >= 0 and size == target[offset + i] else f"y{i}^"
        for i, size in enumerate(shape)
    ]


def _like_other(call: Call) -> str:
    """`type_as(x, other)`: other gives the dtype only."""
    x, other = tensor(call, 0, "self"), tensor(call, 1, "other")
    names = letters(x.ndim)
    return annotate([names, companion(other.shape, x.shape, names)], [names])


_NAMES = ("to.dtype", "to.dtype_layout", "to.device", "_to_copy.default")

SPECS: tuple[OperatorSpec, ...] = (
    *(OperatorSpec(f"aten.{name}", "* -> *", moves="cast", keeps_nothing=True) for name in _NAMES),
    OperatorSpec("aten.type_as.default", _like_other, moves="cast", keeps_nothing=True),
    OperatorSpec("aten.to.other", _like_other, moves="cast", keeps_nothing=True),
)
