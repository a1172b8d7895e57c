"""`localize` hooks of reads and writes through indices, for a block `v` of what the indices point into."""

from __future__ import annotations

from op_registry.builtin._dims import tensor, whole
from op_registry.call import Call, TensorArgument
from op_registry.expression import Expression, block_start
from op_registry.spec import Shards


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
