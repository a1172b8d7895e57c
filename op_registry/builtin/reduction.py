"""Reductions. A sum over a split dim gives partial sums; what is not a sum freezes the dims that it runs over.

A mean over a split dim divides the shard's sum by the logical count: the sum of that is the mean, however many axes
(micro-batches among them) share the dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from op_registry.builtin._dims import annotate, letters, linear_in_all, parts, tensor, whole, whole_dims
from op_registry.call import Call
from op_registry.spec import AnnotationFunction, LinearSets, OperatorSpec, Shards


def reduced(ndim: int, dims: Sequence[int], keepdim: bool, mark: str) -> tuple[list[str], list[str]]:
    """Dims of a tensor whose `dims` are reduced, and those of the result."""
    names = letters(ndim)
    inputs = [n + mark if i in dims else n for i, n in enumerate(names)]
    outputs = [("1" if i in dims else n) for i, n in enumerate(names) if keepdim or i not in dims]
    return inputs, outputs


def _over(mark: str, keepdim_at: int = 2, outputs: int = 1, dim_at: int = 1) -> AnnotationFunction:
    """A reduction over the dims given at `dim_at` (None: all), with `keepdim` at `keepdim_at`."""

    def annotation(call: Call) -> str:
        ndim = tensor(call, 0, "self").ndim
        dims = whole_dims(call.get(dim_at, "dim"), ndim)
        inputs, result = reduced(ndim, dims, bool(call.get(keepdim_at, "keepdim", False)), mark)
        return annotate([inputs], [result] * outputs)

    return annotation


def _of_all(mark: str, outputs: int = 1) -> AnnotationFunction:
    """A reduction of every dim to scalars; other arguments do not matter."""

    def annotation(call: Call) -> str:
        inputs, result = reduced(tensor(call, 0, "self").ndim, range(tensor(call, 0, "self").ndim), False, mark)
        return annotate([inputs], [result] * outputs)

    return annotation


def _along(dim_at: int = 1, default: int | None = None, outputs: int = 1) -> AnnotationFunction:
    """Same shape; the one dim that it runs along is frozen."""

    def annotation(call: Call) -> str:
        ndim = tensor(call, 0, "self").ndim
        dim = whole(call.get(dim_at, "dim", default), ndim)
        names = [f"{n}^" if i == dim else n for i, n in enumerate(letters(ndim))]
        return annotate([names], [names] * outputs)

    return annotation


def _unless_cast(call: Call) -> LinearSets:
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


def _frozen_specs() -> tuple[OperatorSpec, ...]:
    plain = ("amax", "amin", "argmax", "argmin", "logsumexp")
    dims = ("any.dim", "any.dims", "all.dim", "all.dims", "prod.dim_int", "var.dim", "std.dim")
    keep = {"var.dim": 3, "std.dim": 3}
    everything = ("any", "all", "max", "min", "prod", "median", "var", "std", "norm.Scalar")
    return (
        *(OperatorSpec(f"aten.{n}.default", _over("^")) for n in plain),
        *(OperatorSpec(f"aten.{n}", _over("^", keep.get(n, 2))) for n in dims),
        *(OperatorSpec(f"aten.{n}", _over("^", 2, outputs=2)) for n in ("max.dim", "min.dim", "median.dim")),
        *(OperatorSpec(f"aten.{n}.correction", _over("^", 3)) for n in ("var", "std")),
        *(OperatorSpec(f"aten.{n}.correction", _over("^", 3, outputs=2)) for n in ("var_mean", "std_mean")),
        *(OperatorSpec(f"aten.{n}.dim", _over("^", 3, outputs=2)) for n in ("var_mean", "std_mean")),
        *(OperatorSpec(f"aten.{n}.default", _of_all("^", 2)) for n in ("var_mean", "std_mean")),
        *(OperatorSpec(f"aten.{n}" if "." in n else f"aten.{n}.default", _of_all("^")) for n in everything),
        OperatorSpec("aten.linalg_vector_norm.default", _over("^", 3, dim_at=2)),
        OperatorSpec("aten.linalg_norm.default", _over("^", 3, dim_at=2)),
        OperatorSpec("aten.linalg_norm.ord_str", _over("^", 3, dim_at=2)),
        OperatorSpec("aten.norm.ScalarOpt_dim", _over("^", 3, dim_at=2)),
    )


SPECS: tuple[OperatorSpec, ...] = (
    OperatorSpec("aten.sum.default", _of_all("+"), linear=_unless_cast),
    OperatorSpec("aten.sum.dim_IntList", _over("+"), linear=_unless_cast),
    OperatorSpec("aten.mean.default", _of_all("+"), linear=_unless_cast, localize=_localize_mean, uneven=True),
    OperatorSpec("aten.mean.dim", _over("+"), linear=_unless_cast, localize=_localize_mean, uneven=True),
    OperatorSpec("aten.count_nonzero.default", _over("+")),
    OperatorSpec("aten.count_nonzero.dim_IntList", _over("+")),
    *_frozen_specs(),
    OperatorSpec("aten.softmax.int", _along()),
    OperatorSpec("aten._softmax.default", _along()),
    OperatorSpec("aten.log_softmax.int", _along()),
    OperatorSpec("aten.cumsum.default", _along(), linear=_unless_cast),
    OperatorSpec("aten.cumprod.default", _along()),
    OperatorSpec("aten.diff.default", _diff, linear=linear_in_all),
)
