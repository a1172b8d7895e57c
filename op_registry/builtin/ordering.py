"""Sorting: the dim that is sorted is frozen."""

from __future__ import annotations

from op_registry.builtin._dims import annotate, letters, output_shape, tensor, whole
from op_registry.call import Call
from op_registry.spec import AnnotationFunction, OperatorSpec


def _sorting(dim_at: int, name: str = "self", outputs: int = 2) -> AnnotationFunction:
    """`values, indices` of the shape of the input."""

    def annotation(call: Call) -> str:
        ndim = tensor(call, 0, name).ndim
        dim = whole(call.get(dim_at, "dim", -1), ndim)
        dims = [f"{n}^" if i == dim else n for i, n in enumerate(letters(ndim))]
        return annotate([dims], [dims] * outputs)

    return annotation


def _topk(call: Call) -> str:
    """`topk(x, k, dim)`: the number taken is part of the call."""
    ndim = tensor(call, 0, "self").ndim
    dim = whole(call.get(2, "dim", -1), ndim)
    names = letters(ndim, avoid="k")
    taken = str(call.get(1, "k"))
    result = [taken if i == dim else n for i, n in enumerate(names)] if ndim else []
    return annotate([[f"{n}^" if i == dim else n for i, n in enumerate(names)]], [result] * 2)


def _histc(call: Call) -> str:
    """Bins between the smallest and largest of all values, unless told."""
    dims = [f"{n}^" for n in letters(tensor(call, 0, "self").ndim)]
    return annotate([dims], [[str(s) for s in output_shape(call)]])


SPECS: tuple[OperatorSpec, ...] = (
    OperatorSpec("aten.sort.default", _sorting(1)),
    OperatorSpec("aten.sort.stable", _sorting(2)),
    OperatorSpec("aten.argsort.default", _sorting(1, outputs=1)),
    OperatorSpec("aten.argsort.stable", _sorting(2, outputs=1)),
    OperatorSpec("aten.topk.default", _topk),
    OperatorSpec("aten.histc.default", _histc),
)
