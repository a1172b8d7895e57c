"""Sorting: the dim that is sorted, or searched, is frozen."""

from __future__ import annotations

from op_registry.builtin._dims import annotate, letters, tensor, whole
from op_registry.call import Call, TensorArgument
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


def _first_sorted(call: Call) -> str:
    """`msort(x)` sorts along the first dim."""
    names = letters(tensor(call, 0, "self").ndim)
    dims = [f"{n}^" if i == 0 else n for i, n in enumerate(names)]
    return annotate([dims], [dims])


def _searchsorted(call: Call) -> str:
    """`searchsorted(sequence, x)`: one sequence for all, or one for each place of the dims before the last.

    The result counts the entries below x, and counts of parts add up; a `sorter` points into the whole sequence.
    """
    sequence, x = call.tensors()[0], call.get(1, "self")
    places = x if isinstance(x, TensorArgument) else None
    sorters = len(call.tensors()) - 1 - (places is not None)
    along = "s^" if sorters else "s+"
    names = letters(sequence.ndim - 1, avoid="sx")
    result = [*names, "x"]
    if sequence.ndim == 1:
        result = letters(places.ndim, avoid="s") if places is not None else []
    rows = [*names, along]
    return annotate([rows, *[result] * (places is not None), *[rows] * sorters], [result])


SPECS: tuple[OperatorSpec, ...] = (
    OperatorSpec("aten.sort.default", _sorting(1)),
    OperatorSpec("aten.sort.stable", _sorting(2)),
    OperatorSpec("aten.argsort.default", _sorting(1, outputs=1)),
    OperatorSpec("aten.argsort.stable", _sorting(2, outputs=1)),
    OperatorSpec("aten.topk.default", _topk),
    OperatorSpec("aten.msort.default", _first_sorted),
    *(OperatorSpec(f"aten.searchsorted.{of}", _searchsorted) for of in ("Tensor", "Scalar")),
)
