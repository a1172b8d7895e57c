"""Bags of rows of a table (`nn.EmbeddingBag`). Bags of one size are `nnscaler.embedding_bag` after tracing."""

from __future__ import annotations

from op_registry.builtin._dims import Dims, annotate, output_shape, tensor
from op_registry.builtin.embedding import block_start
from op_registry.call import Call, TensorArgument
from op_registry.spec import LinearSets, OperatorSpec, Shards


def _has_scales(call: Call, position: int, name: str) -> bool:
    return isinstance(call.get(position, name), TensorArgument)


def _bags(call: Call) -> str:
    """`nnscaler.embedding_bag(weight, ids, scales)`: the rows of the table are a sum, and so are the ids of a bag."""
    scales = [["b", "l+"]] if _has_scales(call, 2, "scales") else []
    return annotate([["v+", "d"], ["b", "l+"], *scales], [["b", "d"]])


def _linear(call: Call) -> LinearSets:
    both = (frozenset({0}), frozenset({2}))
    return both if _has_scales(call, 2, "scales") else both[:1]


def _localize(call: Call, shards: Shards) -> Call:
    axes = shards.get("v")
    if not axes:
        return call
    return call.replace(4, "first_row", block_start("v", tensor(call, 0, "weight").shape[0], axes))


def _ragged(call: Call) -> str:
    """`aten.embedding_bag(weight, ids, offsets)`: only columns are free, for an offset counts the ids of all bags.

    The other outputs say where the ids went; the largest rows of mode max (2) are chosen column by column.
    """
    column = "d^" if call.get(5, "sparse", False) else "d"  # collectives do not take sparse gradients
    inputs: list[str | Dims] = [["v^", column], ["i^"], ["o^"]]
    if _has_scales(call, 6, "per_sample_weights"):
        inputs.append(["i^"])
    outputs: list[str | Dims] = [[str(output_shape(call)[0]), column], "?", "?", "?"]
    if call.get(4, "mode", 0) == 2:
        outputs[3] = outputs[0]
    return annotate(inputs, outputs)


SPECS: tuple[OperatorSpec, ...] = (
    OperatorSpec("nnscaler.embedding_bag", _bags, linear=_linear, contiguous=frozenset({"v"}), localize=_localize),
    OperatorSpec("aten.embedding_bag.default", _ragged),
    OperatorSpec("aten.embedding_bag.padding_idx", _ragged),
)
