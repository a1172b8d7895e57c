"""Reading and writing through indices.

The dim that indices point into is frozen in the tensor read from. Index dims are free: under their split the tensor is
replicated and its gradient a partial sum. Writes that add are reductions over the index dims; writes that replace are
frozen there.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

from op_registry.builtin._dims import (
    Dims,
    aligned,
    all_frozen,
    annotate,
    broadcast_shape,
    letters,
    linear_in,
    marked,
    operand,
    output_shape,
    tensor,
    whole,
)
from op_registry.call import Call, TensorArgument
from op_registry.spec import LinearSets, OperatorSpec

_FIRST = linear_in({0})


def _indices(call: Call) -> list[TensorArgument | None]:
    found: Sequence[TensorArgument | None] = call.get(1, "indices")
    return list(found)


def _with_gaps(indices: Sequence[TensorArgument | None], operands: Sequence[Dims]) -> list[Dims]:
    """One operand per entry of the list: a slice (None) keeps its place as a scalar that is not there."""
    given = iter(operands)
    return [next(given) if t is not None else [] for t in indices]


def _is_mask(t: TensorArgument | None) -> bool:
    return t is not None and t.dtype in ("bool", "uint8")


def _placed(x: Dims, indices: Sequence[TensorArgument | None], common: Dims) -> Dims:
    """Dims of `x[indices]`: the indices' common dims stand at the first indexed dim, in front if there are gaps."""
    at = [i for i, t in enumerate(indices) if t is not None]
    rest = [name for i, name in enumerate(x) if i not in at]
    first = at[0] if at == list(range(at[0], at[-1] + 1)) else 0
    return [*rest[:first], *common, *rest[first:]]


def _index(call: Call) -> str:
    """`x[:, i, j]`."""
    x, indices = tensor(call, 0, "self"), _indices(call)
    if any(_is_mask(t) for t in indices):
        return _index_by_mask(call)
    used = [t for t in indices if t is not None]
    target = broadcast_shape([t.shape for t in used])
    names = letters(x.ndim)
    common = letters(len(target), avoid=names)
    dims = [f"{n}^" if i < len(indices) and indices[i] is not None else n for i, n in enumerate(names)]
    reads = _with_gaps(indices, [aligned(t.shape, target, common) for t in used])
    return annotate([dims, *reads], [_placed(dims, indices, common)])


def _masked_dims(call: Call) -> tuple[Dims, Dims, Dims] | None:
    """Dims of x, of the mask and the free rest, for one mask among full slices; None for anything else."""
    x, indices = tensor(call, 0, "self"), _indices(call)
    if sum(t is not None for t in indices) != 1:
        return None
    (at,) = (i for i, t in enumerate(indices) if t is not None)
    mask = indices[at]
    assert mask is not None
    names = letters(x.ndim)
    inside = names[at : at + mask.ndim]
    return names, inside, [n for n in names if n not in inside]


def _index_by_mask(call: Call) -> str:
    """`x[mask]`: how many entries are taken depends on values, so the mask's dims are frozen."""
    found = _masked_dims(call)
    if found is None or any(_is_mask(t) and t.ndim == 0 for t in _indices(call) if t is not None):
        return all_frozen(call)
    names, inside, rest = found
    dims = [f"{n}^" if n in inside else n for n in names]
    at = names.index(inside[0])
    taken = str(output_shape(call)[at])
    reads = _with_gaps(_indices(call), [marked(inside, "^")])
    return annotate([dims, *reads], [[*rest[:at], taken, *rest[at:]]])


def _index_put(call: Call) -> str:
    """`x[indices] = values`, or `+=` with `accumulate`."""
    x, indices, values = tensor(call, 0, "self"), _indices(call), tensor(call, 2, "values")
    if any(_is_mask(t) for t in indices):
        return _index_put_mask(call)
    used = [t for t in indices if t is not None]
    accumulate = bool(call.get(3, "accumulate", False))
    target = broadcast_shape([t.shape for t in used])
    names = letters(x.ndim)
    common = marked(letters(len(target), avoid=names), "+" if accumulate else "^")
    dims = [f"{n}^" if i < len(indices) and indices[i] is not None else n for i, n in enumerate(names)]
    written = _placed(dims, indices, common)
    sizes = _placed([str(s) for s in x.shape], indices, [str(s) for s in target])
    value_dims = aligned(values.shape, [int(s) for s in sizes], written)
    reads = _with_gaps(indices, [aligned(t.shape, target, common) for t in used])
    additive = accumulate and bool(common)
    return annotate([operand(dims, additive), *reads, value_dims], [dims])


def _index_put_mask(call: Call) -> str:
    """`x[mask] = value`: element by element if there is one value, else values are taken in order."""
    values = tensor(call, 2, "values")
    found = _masked_dims(call)
    if found is None or any(_is_mask(t) and t.ndim == 0 for t in _indices(call) if t is not None):
        return all_frozen(call)
    names, inside, rest = found
    if all(size == 1 for size in values.shape):
        return annotate([names, *_with_gaps(_indices(call), [inside]), ["1"] * values.ndim], [names])
    dims = [f"{n}^" if n in inside else n for n in names]
    at = names.index(inside[0])
    number = count()
    spelled = [*rest[:at], None, *rest[at:]][-values.ndim :]
    shape = tensor(call, 0, "self").shape
    value_dims = [
        n if n is not None and size == shape[names.index(n)] else str(size) if size == 1 else f"v{next(number)}^"
        for n, size in zip(spelled, values.shape, strict=True)
    ]
    return annotate([dims, *_with_gaps(_indices(call), [marked(inside, "^")]), value_dims], [dims])


def _put_linear(call: Call) -> LinearSets:
    """In x and the values together; indices are in between."""
    return linear_in({0, tensor(call, 2, "values").index})(call)


def _gather(call: Call) -> str:
    """`gather(x, dim, index)`: index dims that are shorter than x's read a part of it, and are frozen."""
    x, indices = tensor(call, 0, "self"), tensor(call, 2, "index")
    if x.ndim != indices.ndim:  # a scalar is a vector of one
        return all_frozen(call)
    dim = whole(call.get(1, "dim"), x.ndim)
    source, taken = _paired(x, indices, dim, "")
    return annotate([source, taken], [taken])


def _paired(x: TensorArgument, indices: TensorArgument, dim: int, mark: str) -> tuple[Dims, Dims]:
    """Dims of x and of indices into its `dim` (with `mark`); other dims are shared where sizes agree."""
    source, taken = [], []
    for i, n in enumerate(letters(x.ndim)):
        if i == dim:
            source.append(f"{n}^")
            taken.append(f"{n}i{mark}")
        elif x.shape[i] == indices.shape[i]:
            source.append(n)
            taken.append(n)
        else:
            source.append(f"{n}^")
            taken.append(f"{n}i^")
    return source, taken


def _scatter(call: Call) -> str:
    """`scatter(x, dim, index, src)` replaces entries; only dims beside `dim` where all sizes agree are free."""
    return _scattered(call, "^", additive=False)


def _scatter_add(call: Call) -> str:
    """`scatter_add`: what several shards add to x is summed."""
    return _scattered(call, "+", additive=True)


def _scattered(call: Call, mark: str, additive: bool) -> str:
    x, indices, src = tensor(call, 0, "self"), tensor(call, 2, "index"), call.get(3, "src")
    if x.ndim != indices.ndim or not x.ndim:
        return all_frozen(call)
    dims, taken = _paired(x, indices, whole(call.get(1, "dim"), x.ndim), mark)
    if not isinstance(src, TensorArgument):
        return annotate([dims, taken], [dims])
    if src.shape != indices.shape:  # a part of src is read
        every = [f"{n.rstrip('^+')}^" for n in dims]
        reads = [[f"{n.rstrip('^+')}{side}^" for n in taken] for side in ("x", "y")]
        return annotate([every, *reads], [every])
    return annotate([operand(dims, additive), taken, taken], [dims])


def _index_select(call: Call) -> str:
    x, indices = tensor(call, 0, "self"), tensor(call, 2, "index")
    if x.ndim == 0 or indices.ndim != 1:
        return all_frozen(call)
    names = letters(x.ndim)
    dim = whole(call.get(1, "dim"), x.ndim)
    source = [f"{n}^" if i == dim else n for i, n in enumerate(names)]
    taken = [f"{n}i" if i == dim else n for i, n in enumerate(names)]
    return annotate([source, [taken[dim]]], [taken])


def _index_add(call: Call) -> str:
    """`index_add(x, dim, index, source)`."""
    x, indices = tensor(call, 0, "self"), tensor(call, 2, "index")
    if x.ndim == 0 or indices.ndim != 1:
        return all_frozen(call)
    names = letters(x.ndim)
    dim = whole(call.get(1, "dim"), x.ndim)
    target = [f"{n}^" if i == dim else n for i, n in enumerate(names)]
    added = [f"{n}i+" if i == dim else n for i, n in enumerate(names)]
    return annotate([operand(target, additive=True), [added[dim]], added], [target])


def _index_written(call: Call) -> str:
    """`index_copy(x, dim, index, source)`, `index_fill(x, dim, index, value)` replace entries along a dim."""
    x, indices, value = tensor(call, 0, "self"), tensor(call, 2, "index"), call.args[3]
    if x.ndim == 0 or indices.ndim != 1:
        return all_frozen(call)
    dim = whole(call.get(1, "dim"), x.ndim)
    names = letters(x.ndim)
    target = [f"{n}^" if i == dim else n for i, n in enumerate(names)]
    source = [f"{n}i^" if i == dim else n for i, n in enumerate(names)]
    given = [source if value.ndim else []] if isinstance(value, TensorArgument) else []
    return annotate([target, [source[dim]], *given], [target])


def _buckets(call: Call) -> str:
    """`bucketize(x, boundaries)` counts the boundaries below x, and counts add up."""
    return "* -> *" if len(call.tensors()) == 1 else "*, n+ -> *"


SPECS: tuple[OperatorSpec, ...] = (
    OperatorSpec("aten.index.Tensor", _index, linear=_FIRST),
    OperatorSpec("aten.index_put.default", _index_put, linear=_put_linear),
    OperatorSpec("aten.gather.default", _gather, linear=_FIRST),
    OperatorSpec("aten.index_select.default", _index_select, linear=_FIRST),
    OperatorSpec("aten.index_add.default", _index_add, linear=linear_in({0, 2})),
    OperatorSpec("aten.index_copy.default", _index_written, linear=linear_in({0, 2})),
    OperatorSpec("aten.index_fill.int_Scalar", _index_written),
    OperatorSpec("aten.index_fill.int_Tensor", _index_written, linear=linear_in({0, 2})),
    OperatorSpec("aten.masked_scatter.default", all_frozen, linear=linear_in({0, 2})),
    OperatorSpec("aten.scatter.src", _scatter, linear=linear_in({0, 2})),
    OperatorSpec("aten.scatter.value", _scatter),
    OperatorSpec("aten.scatter_reduce.two", _scatter),
    OperatorSpec("aten.scatter_add.default", _scatter_add, linear=linear_in({0, 2})),
    OperatorSpec("aten.bucketize.Tensor", _buckets),
)
