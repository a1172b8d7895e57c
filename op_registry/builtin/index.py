"""Annotations of operators that read and write through indices.

The dim that indices point into is `v`. Reading from a block of it gives zeros for what is elsewhere, a partial sum;
writing to a block drops what is elsewhere. With several index tensors, or a mask, those dims are frozen. Index dims are
free: under their split the tensor is replicated and its gradient a partial sum. Writes that add are reductions over the
index dims; writes that replace are frozen there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count

from op_registry.builtin._name_and_broadcast_dims import (
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
from op_registry.builtin.embedding_and_index_hooks import (
    localize_gather,
    localize_index,
    localize_index_put,
    localize_masked_scatter,
    localize_write,
)
from op_registry.call import Call, TensorArgument
from op_registry.spec import AnnotationFunction, LinearSets, OperatorSpec, Shards

_FIRST = linear_in({0})
LinearFunction = Callable[[Call], LinearSets]
Hook = Callable[[Call, Shards], Call]


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
    dims = _pointed_dims(x, indices, "v^" if x.dtype == "bool" else "v+")
    common = letters(len(target), avoid=(*letters(x.ndim, avoid="v"), "v"))
    reads = _with_gaps(indices, [aligned(t.shape, target, common) for t in used])
    return annotate([dims, *reads], [_placed(dims, indices, common)])


def _pick(call: Call) -> str:
    """`nnscaler.pick(x, index)`: rows are the same in both."""
    x, index = tensor(call, 0, "x"), tensor(call, 1, "index")
    rows, *rest = letters(x.ndim - 1, avoid="v")
    common = letters(index.ndim - 1, avoid=("v", rows, *rest))
    return annotate([[rows, "v^", *rest], [rows, *common]], [[rows, *common, *rest]])


def _pointed_dims(x: TensorArgument, indices: Sequence[TensorArgument | None], pointed: str) -> Dims:
    """Dims of x: the one that an index points into is `pointed`; several such dims are frozen."""
    names = letters(x.ndim, avoid="v")
    at = [i for i, t in enumerate(indices) if t is not None]
    if len(at) == 1:
        return [pointed if i == at[0] else n for i, n in enumerate(names)]
    return [f"{n}^" if i in at else n for i, n in enumerate(names)]


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
    dims = _pointed_dims(x, indices, "v")
    common = marked(letters(len(target), avoid=(*letters(x.ndim, avoid="v"), "v")), "+" if accumulate else "^")
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
    source, taken = _paired(x, indices, dim, "v^" if x.dtype == "bool" else "v+", "")
    return annotate([source, taken], [taken])


def _paired(x: TensorArgument, indices: TensorArgument, dim: int, pointed: str, mark: str) -> tuple[Dims, Dims]:
    """Dims of x (`pointed` for its `dim`) and of indices (with `mark`); other dims are shared where sizes agree."""
    source, taken = [], []
    for i, n in enumerate(letters(x.ndim, avoid="v")):
        if i == dim:
            source.append(pointed)
            taken.append(f"{n}i{mark}")
        elif x.shape[i] == indices.shape[i]:
            source.append(n)
            taken.append(n)
        else:
            source.append(f"{n}^")
            taken.append(f"{n}i^")
    return source, taken


def _scatter(call: Call) -> str:
    """`scatter(x, dim, index, src)` replaces entries: those of the index are frozen."""
    return _scattered(call, "^", additive=False)


def _scatter_reduce(call: Call) -> str:
    """A sum that the old values take part in is `scatter_add`."""
    return _scatter_add(call) if _adds(call) else _scatter(call)


def _adds(call: Call) -> bool:
    return call.get(4, "reduce") in ("sum", "add") and bool(call.kwargs.get("include_self", True))


def _reduce_linear(call: Call) -> LinearSets:
    return linear_in({0, 2})(call) if _adds(call) else ()


def _scatter_add(call: Call) -> str:
    """`scatter_add`: what several shards add to x is summed."""
    return _scattered(call, "+", additive=True)


def _scattered(call: Call, mark: str, additive: bool) -> str:
    x, indices, src = tensor(call, 0, "self"), tensor(call, 2, "index"), call.get(3, "src")
    if x.ndim != indices.ndim or not x.ndim:
        return all_frozen(call)
    dims, taken = _paired(x, indices, whole(call.get(1, "dim"), x.ndim), "v", mark)
    if not isinstance(src, TensorArgument):
        return annotate([dims, taken], [dims])
    if src.shape != indices.shape:  # a part of src is read
        dims = [n if n == "v" else f"{n.rstrip('^')}^" for n in dims]
        reads = [[f"{n.rstrip('^+')}{side}^" for n in taken] for side in ("x", "y")]
        return annotate([dims, *reads], [dims])
    return annotate([operand(dims, additive), taken, taken], [dims])


def _named(x: TensorArgument, dim: int, pointed: str, index: str) -> tuple[Dims, Dims]:
    """Dims of x, and of what is read from it or written to it along `dim`."""
    names = letters(x.ndim, avoid="v")
    at = whole(dim, x.ndim)
    source = [pointed if i == at else n for i, n in enumerate(names)]
    return source, [f"{n}i{index}" if i == at else n for i, n in enumerate(names)]


def _index_select(call: Call) -> str:
    x, indices = tensor(call, 0, "self"), tensor(call, 2, "index")
    if x.ndim == 0 or indices.ndim != 1:
        return all_frozen(call)
    dim = call.get(1, "dim")
    source, taken = _named(x, dim, "v^" if x.dtype == "bool" else "v+", "")
    return annotate([source, [taken[whole(dim, x.ndim)]]], [taken])


def _index_add(call: Call) -> str:
    """`index_add(x, dim, index, source)`."""
    x, indices = tensor(call, 0, "self"), tensor(call, 2, "index")
    if x.ndim == 0 or indices.ndim != 1:
        return all_frozen(call)
    dim = call.get(1, "dim")
    target, added = _named(x, dim, "v", "+")
    return annotate([operand(target, additive=True), [added[whole(dim, x.ndim)]], added], [target])


def _index_written(call: Call) -> str:
    """`index_copy(x, dim, index, source)`, `index_fill(x, dim, index, value)` replace entries along a dim."""
    x, indices, value = tensor(call, 0, "self"), tensor(call, 2, "index"), call.args[3]
    if x.ndim == 0 or indices.ndim != 1:
        return all_frozen(call)
    dim = call.get(1, "dim")
    target, source = _named(x, dim, "v", "^")
    given = [source if value.ndim else []] if isinstance(value, TensorArgument) else []
    return annotate([target, [source[whole(dim, x.ndim)]], *given], [target])


def _take_along_dim(call: Call) -> str:
    """`take_along_dim(x, indices, dim)`: gather whose other dims broadcast; without a dim, of flat tensors."""
    x, indices, dim = tensor(call, 0, "self"), tensor(call, 1, "indices"), call.get(2, "dim")
    if dim is None:
        names = letters(x.ndim + indices.ndim)
        i = names[x.ndim :]
        return annotate([marked(names[: x.ndim], "^"), i], [[f"({' '.join(i)})" if len(i) > 1 else i[0] if i else "1"]])
    at = whole(dim, x.ndim)
    target = [max(a, b) if i != at else b for i, (a, b) in enumerate(zip(x.shape, indices.shape, strict=True))]
    names = letters(x.ndim, avoid="v")
    source = ["v^" if i == at else n if x.shape[i] == target[i] else "1" for i, n in enumerate(names)]
    return annotate([source, aligned(indices.shape, target, names)], [names])


def _take(call: Call) -> str:
    """`take(x, index)`: of the flattened tensor."""
    x, indices = tensor(call, 0, "self"), tensor(call, 1, "index")
    names = letters(x.ndim + indices.ndim)
    return annotate([marked(names[: x.ndim], "^"), names[x.ndim :]], [names[x.ndim :]])


def _masked_scatter(call: Call) -> str:
    """`masked_scatter(x, mask, source)`: entries where the mask is true take those of source in their order. A block of
    the first dim takes them from where the block before it ends; the mask is read whole."""
    x, mask, source = call.tensors()
    if x.ndim < 2 or mask.shape != x.shape:
        return all_frozen(call)
    rest = letters(x.ndim - 1, avoid="v")
    names = marked(rest, "^")
    taken = [f"n{i}^" for i in range(source.ndim)]
    return annotate([["v", *names], ["w^", *names], taken], [["v", *names]])


def _buckets(call: Call) -> str:
    """`bucketize(x, boundaries)` counts the boundaries below x, and counts add up."""
    return "* -> *" if len(call.tensors()) == 1 else "*, n+ -> *"


def _spec(
    name: str,
    annotation: AnnotationFunction,
    hook: Hook,
    linear: LinearFunction | LinearSets = (),
    gathers: bool = False,
) -> OperatorSpec:
    return OperatorSpec(
        f"aten.{name}",
        annotation,
        linear=linear,
        contiguous=_POINTED,
        localize=hook,
        uneven=True,
        gathers=gathers,
    )


_POINTED = frozenset({"v"})
_ADDED = linear_in({0, 2})

SPECS: tuple[OperatorSpec, ...] = (
    _spec("index.Tensor", _index, localize_index, _FIRST, gathers=True),
    OperatorSpec("nnscaler.pick", _pick, linear=_FIRST, gathers=True, uneven=True),
    _spec("index_put.default", _index_put, localize_index_put, _put_linear),
    _spec("gather.default", _gather, localize_gather, _FIRST, gathers=True),
    _spec("index_select.default", _index_select, localize_gather, _FIRST, gathers=True),
    _spec("index_add.default", _index_add, localize_write, _ADDED),
    _spec("index_copy.default", _index_written, localize_write, _ADDED),
    _spec("index_fill.int_Scalar", _index_written, localize_write),
    _spec("index_fill.int_Tensor", _index_written, localize_write, _ADDED),
    _spec("masked_scatter.default", _masked_scatter, localize_masked_scatter, _ADDED),
    _spec("scatter.src", _scatter, localize_write, _ADDED),
    _spec("scatter.value", _scatter, localize_write),
    _spec("scatter.reduce", _scatter_reduce, localize_write, _reduce_linear),
    _spec("scatter.value_reduce", _scatter, localize_write),
    _spec("scatter_reduce.two", _scatter_reduce, localize_write, _reduce_linear),
    _spec("index_reduce.default", _index_written, localize_write),
    _spec("scatter_add.default", _scatter_add, localize_write, _ADDED),
    OperatorSpec("aten.take_along_dim.default", _take_along_dim, linear=_FIRST),
    OperatorSpec("aten.take.default", _take, linear=_FIRST),
    OperatorSpec("aten.masked_select.default", all_frozen, linear=_FIRST),  # how many there are depends on values
    OperatorSpec("aten.nonzero.default", all_frozen),
    OperatorSpec("aten.bucketize.Tensor", _buckets),
)
