"""Operators that run along one dim, which is frozen: softmax, cumulative sums and the like."""

from __future__ import annotations

from op_registry.builtin._dims import aligned, annotate, letters, linear_in, linear_in_all, tensor, whole
from op_registry.builtin.numeric.reduction import unless_cast
from op_registry.call import Call
from op_registry.spec import AnnotationFunction, OperatorSpec


def along(dim_at: int = 1, default: int | None = None, outputs: int = 1) -> AnnotationFunction:
    """Same shape; the one dim that it runs along is frozen."""

    def annotation(call: Call) -> str:
        ndim = tensor(call, 0, "self").ndim
        dim = whole(call.get(dim_at, "dim", default), ndim)
        names = [f"{n}^" if i == dim else n for i, n in enumerate(letters(ndim))]
        return annotate([names], [names] * outputs)

    return annotation


def _diff(call: Call) -> str:
    """Differences along a dim, which is frozen in every operand."""
    tensors = call.tensors()
    ndim = tensors[0].ndim
    dim = whole(call.get(2, "dim", -1), ndim)
    names = letters(ndim, avoid="n")
    inputs = [[f"z{t.index}^" if i == dim else n for i, n in enumerate(names)] for t in tensors]
    times = call.get(1, "n", 1)
    size = sum(t.shape[dim] for t in tensors) - times if times else tensors[0].shape[dim]  # of none: x as it is
    return annotate(inputs, [[str(max(size, 0)) if i == dim else n for i, n in enumerate(names)]])


def _trapezoid(cumulative: bool) -> AnnotationFunction:
    """`trapezoid(y, x, dim)`: an integral along a dim of y, at the places x (of the dim alone, or of all)."""

    def annotation(call: Call) -> str:
        y, tensors = tensor(call, 0, "y"), call.tensors()
        dim = whole(call.kwargs.get("dim", -1), y.ndim)
        names = [f"{n}^" if i == dim else n for i, n in enumerate(letters(y.ndim))]
        inputs = [names]
        if len(tensors) == 2:
            inputs.append([names[dim]] if tensors[1].ndim == 1 else aligned(tensors[1].shape, y.shape, names))
        size = [str(y.shape[dim] - 1)] if cumulative else []
        return annotate(inputs, [[*names[:dim], *size, *names[dim + 1 :]]])

    return annotation


_TRAPEZOIDS = {"trapezoid": False, "trapz": False, "cumulative_trapezoid": True}
_SOFTMAXES = "softmax.int log_softmax.int special_softmax.default special_log_softmax.default".split()

SPECS: tuple[OperatorSpec, ...] = (
    *(OperatorSpec(f"aten.{name}", along()) for name in _SOFTMAXES),
    *(OperatorSpec(f"aten.{name}.default", along()) for name in ("_softmax", "_log_softmax", "_safe_softmax")),
    OperatorSpec("aten.cumsum.default", along(), linear=unless_cast),
    OperatorSpec("aten.cumprod.default", along()),
    OperatorSpec("aten.logcumsumexp.default", along()),
    *(OperatorSpec(f"aten.{name}.default", along(outputs=2)) for name in ("cummax", "cummin")),
    OperatorSpec("aten.diff.default", _diff, linear=linear_in_all),
    *(OperatorSpec(f"aten.{n}.dx", _trapezoid(c), linear=linear_in({0})) for n, c in _TRAPEZOIDS.items()),
    *(OperatorSpec(f"aten.{n}.x", _trapezoid(c), linear=linear_in({0}, {1})) for n, c in _TRAPEZOIDS.items()),
)
