"""Annotations of reductions, scans and sorting. A sum over a split dim gives partial sums; what is no sum freezes its
dims. A mean over a split dim divides the shard's sum by the logical count: the sum of that is the mean, however many
axes (micro-batches among them) share the dim."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf, prod

from op_registry.builtin._name_and_broadcast_dims import (
    aligned,
    annotate,
    letters,
    linear_in,
    linear_in_all,
    marked,
    output_shape,
    parts,
    tensor,
    whole,
    whole_dims,
)
from op_registry.call import Call, TensorArgument
from op_registry.spec import AnnotationFunction, LinearSets, OperatorSpec, Shards


def reduced(ndim: int, dims: Sequence[int], keepdim: bool, mark: str) -> tuple[list[str], list[str]]:
    """Dims of a tensor whose `dims` are reduced, and those of the result."""
    names = letters(ndim)
    inputs = [n + mark if i in dims else n for i, n in enumerate(names)]
    outputs = [("1" if i in dims else n) for i, n in enumerate(names) if keepdim or i not in dims]
    return inputs, outputs


def _over(
    mark: str | Callable[[Call], str],
    keepdim_at: int = 2,
    outputs: int = 1,
    dim_at: int = 1,
    default: int | Sequence[int] | None = None,
) -> AnnotationFunction:
    """A reduction over the dims given at `dim_at` (None: all), with `keepdim` at `keepdim_at`."""

    def annotation(call: Call) -> str:
        ndim = tensor(call, 0, "self").ndim
        dims = whole_dims(call.get(dim_at, "dim", default), ndim)
        how = mark if isinstance(mark, str) else mark(call)
        inputs, result = reduced(ndim, dims, bool(call.get(keepdim_at, "keepdim", False)), how)
        return annotate([inputs], [result] * outputs)

    return annotation


def of_all(mark: str | Callable[[Call], str], outputs: int = 1) -> AnnotationFunction:
    """A reduction of every dim to scalars; other arguments do not matter."""

    def annotation(call: Call) -> str:
        ndim = tensor(call, 0, "self").ndim
        inputs, result = reduced(ndim, range(ndim), False, mark if isinstance(mark, str) else mark(call))
        return annotate([inputs], [result] * outputs)

    return annotation


def norm_mark(position: int, name: str = "ord") -> Callable[[Call], str]:
    """How the norm of a part belongs to that of the whole: a sum for the orders 0 and 1, a maximum for infinity.

    Other norms are roots of sums, which no sum of roots makes: their dims are frozen.
    """

    def mark(call: Call) -> str:
        order = call.get(position, name)
        return "+" if order in (0, 1) else "+max" if order == inf else "^"

    return mark


def unless_cast(call: Call) -> LinearSets:
    """`dtype=` is a cast before the sum."""
    return () if call.kwargs.get("dtype") is not None else linear_in_all(call)


def _localize_mean(call: Call, shards: Shards) -> Call:
    """The mean of a shard's part, in units of the logical mean."""
    x = tensor(call, 0, "self")
    of_all = call.operator == "aten.mean.default"
    dims = whole_dims(None if of_all else call.get(1, "dim"), x.ndim)
    names = letters(x.ndim)
    if all(parts(shards, names[d]) == 1 for d in dims):
        return call
    count = prod(x.shape[d] for d in dims)
    keepdim = False if of_all else bool(call.get(2, "keepdim", False))
    kwargs = {"dtype": call.kwargs["dtype"]} if call.kwargs.get("dtype") is not None else {}
    return Call("nnscaler.mean_over", (x, list(dims), keepdim, count), kwargs, call.outputs)


def _quantile(call: Call) -> str:
    """`quantile(x, q, dim, keepdim)`: each quantile asked for is a result of its own, in front."""
    x = tensor(call, 0, "self")
    inputs, result = reduced(x.ndim, whole_dims(call.get(2, "dim"), x.ndim), bool(call.get(3, "keepdim", False)), "^")
    asked = call.get(1, "q")
    if not isinstance(asked, TensorArgument):
        return annotate([inputs], [result])
    return annotate([inputs, ["q"] * asked.ndim], [["q"] * asked.ndim + result])


def _to_size(call: Call) -> str:
    """`sum_to_size(x, size)`: the reverse of a broadcast."""
    x, shape = tensor(call, 0, "self"), output_shape(call)
    names = letters(x.ndim)
    ahead = x.ndim - len(shape)
    summed = [i < ahead or shape[i - ahead] != size for i, size in enumerate(x.shape)]
    inputs = [f"{n}+" if gone else n for n, gone in zip(names, summed, strict=True)]
    return annotate([inputs], [["1" if summed[i] else names[i] for i in range(ahead, x.ndim)]])


def _histc(call: Call) -> str:
    """Counts in bins between two bounds add up; without bounds they are the smallest and largest of all values."""
    mark = "^" if call.get(2, "min", 0) == call.get(3, "max", 0) else "+"
    return annotate([marked(letters(tensor(call, 0, "self").ndim), mark)], [[str(s) for s in output_shape(call)]])


def _extreme_specs() -> tuple[OperatorSpec, ...]:
    """A partial maximum has no gradient: such a split is legal where none is needed, as in masks."""
    return (
        OperatorSpec("aten.amax.default", _over("+max")),
        OperatorSpec("aten.max.default", of_all("+max")),
        OperatorSpec("aten.any.default", of_all("+max")),
        *(OperatorSpec(f"aten.any.{n}", _over("+max")) for n in ("dim", "dims")),
    )


def _norm_specs() -> tuple[OperatorSpec, ...]:
    last = (-2, -1)
    return (
        OperatorSpec("aten.linalg_vector_norm.default", _over(norm_mark(1), 3, dim_at=2)),
        OperatorSpec("aten.linalg__powsum.default", _over("+", 3, dim_at=2)),
        OperatorSpec("aten.linalg_norm.default", _over("^", 3, dim_at=2)),
        OperatorSpec("aten.linalg_norm.ord_str", _over("^", 3, dim_at=2)),
        OperatorSpec("aten.linalg_matrix_norm.default", _over("^", 3, dim_at=2, default=last)),
        OperatorSpec("aten.linalg_matrix_norm.str_ord", _over("^", 3, dim_at=2, default=last)),
        OperatorSpec("aten.norm.Scalar", of_all(norm_mark(1, "p"))),
        OperatorSpec("aten.norm.ScalarOpt_dtype", of_all(norm_mark(1, "p"))),
        OperatorSpec("aten.norm.ScalarOpt_dim", _over(norm_mark(1, "p"), 3, dim_at=2)),
        OperatorSpec("aten.norm.ScalarOpt_dim_dtype", _over(norm_mark(1, "p"), 3, dim_at=2)),
        OperatorSpec("aten.frobenius_norm.dim", _over("^")),
        OperatorSpec("aten.nuclear_norm.default", of_all("^")),
        OperatorSpec("aten.nuclear_norm.dim", _over("^")),
    )


def _frozen_specs() -> tuple[OperatorSpec, ...]:
    plain = ("amin", "argmax", "argmin", "logsumexp", "special_logsumexp", "nanmean")
    dims = ("all.dim", "all.dims", "prod.dim_int", "var.dim", "std.dim")
    keep = {"var.dim": 3, "std.dim": 3}
    everything = ("all", "min", "prod", "median", "nanmedian", "var", "std")
    indexed = ("max.dim", "min.dim", "median.dim", "nanmedian.dim")
    return (
        *(OperatorSpec(f"aten.{n}.default", _over("^")) for n in plain),
        *(OperatorSpec(f"aten.{n}", _over("^", keep.get(n, 2))) for n in dims),
        *(OperatorSpec(f"aten.{n}", _over("^", 2, outputs=2)) for n in indexed),
        *(OperatorSpec(f"aten.{n}.correction", _over("^", 3)) for n in ("var", "std")),
        *(OperatorSpec(f"aten.{n}.correction", _over("^", 3, outputs=2)) for n in ("var_mean", "std_mean")),
        *(OperatorSpec(f"aten.{n}.dim", _over("^", 3, outputs=2)) for n in ("var_mean", "std_mean")),
        *(OperatorSpec(f"aten.{n}.default", of_all("^", 2)) for n in ("var_mean", "std_mean")),
        *(OperatorSpec(f"aten.{n}.default", of_all("^")) for n in everything),
        OperatorSpec("aten.aminmax.default", _over("^", outputs=2)),
        OperatorSpec("aten.kthvalue.default", _over("^", 3, outputs=2, dim_at=2, default=-1)),
        OperatorSpec("aten.mode.default", _over("^", outputs=2, default=-1)),
        *(
            OperatorSpec(f"aten.{n}.{of}", _quantile)
            for n in ("quantile", "nanquantile")
            for of in ("default", "scalar")
        ),
    )


# Operators that run along one dim, which is frozen: softmax, cumulative sums and the like.


def along(dim_at: int = 1, default: int | None = None, outputs: int = 1) -> AnnotationFunction:
    """Same shape; the one dim that it runs along is frozen."""

    def annotation(call: Call) -> str:
        ndim = tensor(call, 0, "self").ndim
        dim = whole(call.get(dim_at, "dim", default), ndim)
        names = [f"{n}^" if i == dim else n for i, n in enumerate(letters(ndim))]
        return annotate([names], [names] * outputs)

    return annotation


def cumulative(outputs: int = 1) -> AnnotationFunction:
    """Same shape; each row along the dim reads the rows up to its own."""

    def annotation(call: Call) -> str:
        ndim = tensor(call, 0, "self").ndim
        if ndim == 0:
            return annotate([[]], [[]] * outputs)
        names = [f"{n}<" if i == _along(call) else n for i, n in enumerate(letters(ndim))]
        return annotate([names], [names] * outputs)

    return annotation


def _along(call: Call) -> int:
    return whole(call.get(1, "dim"), tensor(call, 0, "self").ndim)


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
_SOFTMAXES = """
    softmax.int log_softmax.int special_softmax.default special_log_softmax.default
    _softmax.default _log_softmax.default _safe_softmax.default
""".split()

_SCANS: tuple[OperatorSpec, ...] = (
    *(OperatorSpec(f"aten.{name}", along(), keeps_result=True) for name in _SOFTMAXES),
    OperatorSpec("aten.cumsum.default", cumulative(), linear=unless_cast),
    OperatorSpec("aten.cumprod.default", cumulative()),
    OperatorSpec("aten.logcumsumexp.default", cumulative()),
    *(OperatorSpec(f"aten.{name}.default", cumulative(2)) for name in ("cummax", "cummin")),
    OperatorSpec("aten.diff.default", _diff, linear=linear_in_all),
    *(OperatorSpec(f"aten.{n}.dx", _trapezoid(c), linear=linear_in({0})) for n, c in _TRAPEZOIDS.items()),
    *(OperatorSpec(f"aten.{n}.x", _trapezoid(c), linear=linear_in({0}, {1})) for n, c in _TRAPEZOIDS.items()),
)


# Sorting: the dim that is sorted, or searched, is frozen.


def _sorting(dim_at: int, outputs: int = 2) -> AnnotationFunction:
    """`values, indices` of the shape of the input."""

    def annotation(call: Call) -> str:
        ndim = tensor(call, 0, "self").ndim
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


_SORTS: tuple[OperatorSpec, ...] = (
    OperatorSpec("aten.sort.default", _sorting(1)),
    OperatorSpec("aten.sort.stable", _sorting(2)),
    OperatorSpec("aten.argsort.default", _sorting(1, outputs=1)),
    OperatorSpec("aten.argsort.stable", _sorting(2, outputs=1)),
    OperatorSpec("aten.topk.default", _topk),
    OperatorSpec("aten.msort.default", _first_sorted),
    *(OperatorSpec(f"aten.searchsorted.{of}", _searchsorted) for of in ("Tensor", "Scalar")),
)


SPECS: tuple[OperatorSpec, ...] = (
    OperatorSpec("aten.sum.default", of_all("+"), linear=unless_cast),
    OperatorSpec("aten.sum.dim_IntList", _over("+"), linear=unless_cast),
    OperatorSpec("aten.nansum.default", _over("+")),
    OperatorSpec("aten.sum_to_size.default", _to_size, linear=linear_in_all, shape_argument=(1, "size", 0)),
    OperatorSpec("aten.trace.default", of_all("^"), linear=linear_in_all),
    OperatorSpec("aten.mean.default", of_all("+"), linear=unless_cast, localize=_localize_mean, uneven=True),
    OperatorSpec("aten.mean.dim", _over("+"), linear=unless_cast, localize=_localize_mean, uneven=True),
    OperatorSpec("aten.count_nonzero.default", _over("+")),
    OperatorSpec("aten.count_nonzero.dim_IntList", _over("+")),
    OperatorSpec("aten.histc.default", _histc, detached=True),
    *_extreme_specs(),
    *_norm_specs(),
    *_frozen_specs(),
    *_SCANS,
    *_SORTS,
)
