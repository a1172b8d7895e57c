"""Pooling and resizing: batch and channels are free, positions frozen."""

from __future__ import annotations

from op_registry.builtin._dims import annotate, letters, linear_in, output_shape, tensor, whole
from op_registry.call import Call
from op_registry.spec import AnnotationFunction, OperatorSpec


def _positions(spatial: int, outputs: int = 1) -> AnnotationFunction:
    """The last `spatial` dims change size."""

    def annotation(call: Call) -> str:
        names = letters(tensor(call, 0, "self").ndim)
        free, last = names[: len(names) - spatial], names[len(names) - spatial :]
        result = [*free, *(str(s) for s in output_shape(call)[len(free) :])]
        return annotate([[*free, *(f"{n}^" for n in last)]], [result] * outputs)

    return annotation


def _glu(call: Call) -> str:
    """`glu(x, dim)`: the first half times the sigmoid of the second."""
    names = letters(tensor(call, 0, "self").ndim)
    dim = whole(call.get(1, "dim", -1), len(names))
    return annotate([[f"(2 {n})" if i == dim else n for i, n in enumerate(names)]], [names])


_FIRST = linear_in({0})
_AVERAGES = {
    "avg_pool1d.default": 1,
    "avg_pool2d.default": 2,
    "avg_pool3d.default": 3,
    "adaptive_avg_pool1d.default": 1,
    "adaptive_avg_pool2d.default": 2,
    "adaptive_avg_pool3d.default": 3,
    "upsample_nearest1d.vec": 1,
    "upsample_nearest2d.vec": 2,
    "upsample_nearest3d.vec": 3,
    "_upsample_nearest_exact1d.vec": 1,
    "_upsample_nearest_exact2d.vec": 2,
    "_upsample_nearest_exact3d.vec": 3,
    "upsample_linear1d.vec": 1,
    "upsample_bilinear2d.vec": 2,
    "upsample_bicubic2d.vec": 2,
    "upsample_trilinear3d.vec": 3,
}
_MAXIMA = {"max_pool1d.default": 1, "max_pool2d.default": 2, "max_pool3d.default": 3}
_MAXIMA_INDEXED = {
    "max_pool1d_with_indices.default": 1,
    "max_pool2d_with_indices.default": 2,
    "max_pool3d_with_indices.default": 3,
    "adaptive_max_pool1d.default": 1,
    "adaptive_max_pool2d.default": 2,
    "adaptive_max_pool3d.default": 3,
}

SPECS: tuple[OperatorSpec, ...] = (
    *(OperatorSpec(f"aten.{name}", _positions(n), linear=_FIRST) for name, n in _AVERAGES.items()),
    *(OperatorSpec(f"aten.{name}", _positions(n)) for name, n in _MAXIMA.items()),
    *(OperatorSpec(f"aten.{name}", _positions(n, outputs=2)) for name, n in _MAXIMA_INDEXED.items()),
    OperatorSpec("aten.glu.default", _glu),
)
