"""Diagonals of vectors and matrices: what becomes one is frozen, the other dims are free."""

from __future__ import annotations

from op_registry.builtin._dims import annotate, letters, linear_in, marked, output_shape, tensor, whole
from op_registry.call import Call
from op_registry.spec import OperatorSpec


def _whole(call: Call) -> str:
    """`diag(x)`, `diagflat(x)`: a vector onto a diagonal, or the diagonal of a matrix."""
    inputs = marked(letters(tensor(call, 0, "self").ndim), "^")
    return annotate([inputs], [[str(size) for size in output_shape(call)]])


def _of_matrices(call: Call) -> str:
    """`linalg_diagonal(A, offset, dim1, dim2)`: keywords all, of the last two dims by default."""
    names = letters(tensor(call, 0, "A").ndim)
    pair = {whole(call.kwargs.get(f"dim{i}", i - 3), len(names)) for i in (1, 2)}
    inputs = [f"{n}^" if i in pair else n for i, n in enumerate(names)]
    return annotate([inputs], [[*(n for i, n in enumerate(names) if i not in pair), str(output_shape(call)[-1])]])


_FIRST = linear_in({0})

SPECS: tuple[OperatorSpec, ...] = (
    OperatorSpec("aten.diag.default", _whole, linear=_FIRST),
    OperatorSpec("aten.linalg_diagonal.default", _of_matrices, linear=_FIRST),
    OperatorSpec("aten.diagflat.default", _whole, linear=_FIRST),
)
