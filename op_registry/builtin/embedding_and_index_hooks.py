"""Annotations of table look-ups, and the `localize` hooks of all reads and writes through indices into a block of the
entries.

A rank with a block of the vocabulary looks up the ids of its block, and gives zeros for the others.
"""

from __future__ import annotations

from op_registry.builtin._name_and_broadcast_dims import (
    all_frozen,
    annotate,
    letters,
    linear_in,
    marked,
    output_shape,
    tensor,
    whole,
)
from op_registry.call import Call, TensorArgument
from op_registry.rank_expression import Expression, block_start, local_size
from op_registry.spec import LinearSets, OperatorSpec, Shards

# `localize` hooks of reads and writes through indices, for a block `v` of what the indices point into.


def _block(size: int, shards: Shards) -> tuple[Expression, int]:
    """Return where the block begins, and the size of the whole dim."""
    return block_start("v", size, shards["v"]), size


def _listed(call: Call, shards: Shards) -> tuple[list[TensorArgument | None], Expression, int]:
    """Return the indices of `index` and `index_put` up to the last one, and the block."""
    indices = list(call.get(1, "indices"))
    dim = next(i for i, t in enumerate(indices) if t is not None)
    return indices[: dim + 1], *_block(tensor(call, 0, "self").shape[dim], shards)


def localize_index(call: Call, shards: Shards) -> Call:
    """`index(x, [None, index])`."""
    if "v" not in shards:
        return call
    return Call("nnscaler.index_block", (call.args[0], *_listed(call, shards)), {}, call.outputs)


def localize_index_put(call: Call, shards: Shards) -> Call:
    """`index_put(x, [None, index], values, accumulate)`."""
    if "v" not in shards:
        return call
    indices, first, size = _listed(call, shards)
    values, accumulate = tensor(call, 2, "values"), bool(call.get(3, "accumulate", False))
    return Call("nnscaler.index_put_block", (call.args[0], indices, values, accumulate, first, size), {}, call.outputs)


def localize_gather(call: Call, shards: Shards) -> Call:
    """`gather(x, dim, index)`, `index_select(x, dim, index)`."""
    if "v" not in shards:
        return call
    x, dim = tensor(call, 0, "self"), call.get(1, "dim")
    size = x.shape[whole(dim, x.ndim)]
    operator = call.operator.replace("aten.", "nnscaler.").replace(".default", "_block")
    return Call(operator, (x, dim, tensor(call, 2, "index"), *_block(size, shards)), {}, call.outputs)


def localize_write(call: Call, shards: Shards) -> Call:
    """`scatter(x, dim, index, src, ...)`, `index_add(x, dim, index, source, ...)` and their like."""
    if "v" not in shards:
        return call
    x, dim, index = tensor(call, 0, "self"), call.get(1, "dim"), tensor(call, 2, "index")
    value = next((n for n in ("src", "source", "value") if n in call.kwargs), None)
    rest = call.args[3:] if value is None else (call.kwargs[value],)
    kwargs = {n: v for n, v in call.kwargs.items() if n not in ("dim", "index", value)}
    size = x.shape[whole(dim, x.ndim)]
    operator = call.operator.removeprefix("aten.")
    return Call("nnscaler.write_block", (operator, x, dim, index, *_block(size, shards), *rest), kwargs, call.outputs)


def localize_masked_scatter(call: Call, shards: Shards) -> Call:
    """Return a block of the first dim."""
    if "v" not in shards:
        return call
    x, mask, source = call.tensors()
    return Call(
        "nnscaler.masked_scatter_block", (x, mask, source, block_start("v", x.shape[0], shards["v"])), {}, call.outputs
    )


def _counts_ids(call: Call) -> bool:
    """`scale_grad_by_freq` counts the ids of a call, `sparse` makes gradients that collectives do not take."""
    return bool(call.get(3, "scale_grad_by_freq", False)) or bool(call.get(4, "sparse", False))


def _embedding(call: Call) -> str:
    """`embedding(weight, ids)`: `v+ d, a b -> a b d`."""
    names = letters(tensor(call, 1, "indices").ndim, avoid="dv")
    if _counts_ids(call):
        names = marked(names, "^")
        return annotate([["v^", "d^"], names], [[*names, "d^"]])
    return annotate([["v+", "d"], names], [[*names, "d"]])


def _localize_embedding(call: Call, shards: Shards) -> Call:
    axes = shards.get("v")
    if not axes:
        return call
    weight, ids = tensor(call, 0, "weight"), tensor(call, 1, "indices")
    first = block_start("v", weight.shape[0], axes)
    block = (weight, ids, call.get(2, "padding_idx", -1), first, weight.shape[0])
    return Call("nnscaler.embedding_block", block, {}, call.outputs)


def _bag(call: Call) -> str:
    """`embedding_bag(weight, ids, offsets, weights, mode, ...)`: of a table of ids `v+ d, b l+ -> b d`, of a list with
    offsets `v+ d, n^, o^ -> y d`. A mean divides by what it counts in the whole bag, a maximum reads all of it."""
    mode = call.get(4, "mode")
    rows = ["v^" if mode == 2 else "v+", "d"]
    if isinstance(call.get(2, "offsets"), TensorArgument):
        weights = [["n^"]] if isinstance(call.get(3, "weights"), TensorArgument) else []
        return annotate([rows, ["n^"], ["o^"], *weights], [["y", "d"]])
    ids = ["b", "l+" if mode == 0 else "l^"]
    weights = [ids] if isinstance(call.get(3, "weights"), TensorArgument) else []
    return annotate([rows, ids, *weights], [["b", "d"]])


def _localize_bag(call: Call, shards: Shards) -> Call:
    """A block of the vocabulary, and of the bags that offsets tell."""
    weight, result = tensor(call, 0, "weight"), output_shape(call)
    if "v" in shards:
        call = call.replace(7, "rows", weight.shape[0])
        call = call.replace(8, "first_row", block_start("v", weight.shape[0], shards["v"]))
    if "y" in shards:
        call = call.replace(9, "bags", local_size(result[0], shards["y"]))
        call = call.replace(10, "first_bag", block_start("y", result[0], shards["y"]))
    return call


def _bag_linear(call: Call) -> LinearSets:
    """In the table, and in the weights of the entries; a maximum in neither."""
    return (
        ()
        if call.get(4, "mode") == 2
        else tuple(frozenset({t.index}) for t in call.tensors() if not t.dtype.startswith("int"))
    )


def _linear(call: Call) -> LinearSets:
    return () if _counts_ids(call) else linear_in({0})(call)


def _one_hot(call: Call) -> str:
    """`one_hot(ids, classes)`; without the number of classes it depends on all values."""
    names = letters(tensor(call, 0, "self").ndim)
    classes = call.get(1, "num_classes", -1)
    if classes < 0:
        shape = call.outputs[0]
        assert shape is not None
        return annotate([marked(names, "^")], [[*marked(names, "^"), str(shape.shape[-1])]])
    return annotate([names], [[*names, str(classes)]])


SPECS: tuple[OperatorSpec, ...] = (
    OperatorSpec(
        "aten.embedding.default",
        _embedding,
        linear=_linear,
        gathers=True,
        contiguous=frozenset({"v"}),
        localize=_localize_embedding,
        uneven=True,
    ),
    OperatorSpec(
        "nnscaler.embedding_bag",
        _bag,
        linear=_bag_linear,
        contiguous=frozenset({"v", "y"}),
        localize=_localize_bag,
        uneven=True,
    ),
    *(OperatorSpec(f"aten.embedding_bag.{name}", all_frozen) for name in ("default", "padding_idx")),  # counts, places
    OperatorSpec("aten.one_hot.default", _one_hot),
)
