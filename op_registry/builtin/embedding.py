"""Table look-ups. A split vocabulary looks up the ids of its block and gives zeros for the others."""

from __future__ import annotations

from op_registry.builtin._dims import annotate, letters, linear_in, marked, tensor
from op_registry.call import Call
from op_registry.local_size import block_start
from op_registry.spec import LinearSets, OperatorSpec, Shards


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
    return Call("nnscaler.embedding_block", (weight, ids, call.get(2, "padding_idx", -1), first), {}, call.outputs)


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
        contiguous=frozenset({"v"}),
        localize=_localize_embedding,
        uneven=True,
    ),
    OperatorSpec("aten.one_hot.default", _one_hot),
)
