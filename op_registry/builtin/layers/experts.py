"""Products by groups: rows sorted by expert, one matrix per expert, and a list of where each expert's rows end.

Rows split into contiguous blocks (the ends are counted from the block's first row), experts into blocks whose other
rows are zero, and hidden dims as in any product.
"""

from __future__ import annotations

from collections.abc import Mapping

from op_registry.builtin._dims import linear_in
from op_registry.builtin.numeric.matmul import product_flops
from op_registry.call import Call
from op_registry.local_size import block_start
from op_registry.spec import OperatorSpec, Shards


def _flops(sizes: Mapping[str, int]) -> int:
    """Every row meets the matrix of one group."""
    return product_flops({name: size for name, size in sizes.items() if name not in ("e", "g")})


def _localize(call: Call, shards: Shards) -> Call:
    """The first row and the first group of this block."""
    if "m" not in shards and "g" not in shards:
        return call
    a, b, ends = call.tensors()
    row = block_start("m", a.shape[0], shards["m"]) if "m" in shards else 0
    group = block_start("g", b.shape[0], shards["g"]) if "g" in shards else 0
    return Call("nnscaler.grouped_mm", (a, b, ends, row, group), {}, call.outputs)


SPECS: tuple[OperatorSpec, ...] = tuple(
    OperatorSpec(
        name,
        "m k+, g+ k+ n, e^ -> m n",
        linear=linear_in({0}, {1}),
        contiguous=frozenset({"m", "g"}),
        localize=_localize,
        uneven=True,
        flops=_flops,
    )
    for name in ("transformers.grouped_mm_fallback.default", "nnscaler.grouped_mm")
)
