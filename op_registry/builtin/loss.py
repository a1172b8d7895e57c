"""Losses. A sum over samples gives partial sums; a mean divides by the logical number of samples.

A mean that counts labels (`ignore_index`, class weights) is not the mean of local means: tracing lowers the usual cross
entropy to the `ce_*` operators, which share the count; what it does not lower is frozen here.
"""

from __future__ import annotations

from math import prod

from op_registry.builtin._dims import annotate, broadcast, broadcast_shape, linear_in, marked, tensor
from op_registry.call import Call, TensorArgument
from op_registry.local_size import block_start
from op_registry.spec import AnnotationFunction, OperatorSpec, Shards

NONE, MEAN, SUM = 0, 1, 2


def _pointwise(reduction_at: int) -> AnnotationFunction:
    """A loss entry by entry: kept, or summed to a scalar."""

    def annotation(call: Call) -> str:
        mark = "" if call.get(reduction_at, "reduction", MEAN) == NONE else "+"
        operands, result = broadcast([t.shape for t in call.tensors()], mark)
        return annotate(operands, [[] if mark else result])

    return annotation


def _localize_mean(call: Call, shards: Shards, reduction_at: int) -> Call:
    """The sum of the shard's entries over the logical number of entries."""
    if not shards or call.get(reduction_at, "reduction", MEAN) != MEAN:
        return call
    count = prod(broadcast_shape([t.shape for t in call.tensors()]))
    name = call.operator.split(".")[1]
    defaults = _DEFAULTS[name]
    arguments = [call.get(i, argument, default) for i, (argument, default) in enumerate(defaults)]
    arguments[reduction_at] = SUM
    return Call("nnscaler.mean_of", (name, count, *arguments), {}, call.outputs)


# Positional arguments of the pointwise losses, with defaults.
_DEFAULTS: dict[str, tuple[tuple[str, object], ...]] = {
    "mse_loss": (("self", None), ("target", None), ("reduction", MEAN)),
    "l1_loss": (("self", None), ("target", None), ("reduction", MEAN)),
    "soft_margin_loss": (("self", None), ("target", None), ("reduction", MEAN)),
    "smooth_l1_loss": (("self", None), ("target", None), ("reduction", MEAN), ("beta", 1.0)),
    "huber_loss": (("self", None), ("target", None), ("reduction", MEAN), ("delta", 1.0)),
    "binary_cross_entropy": (("self", None), ("target", None), ("weight", None), ("reduction", MEAN)),
    "binary_cross_entropy_with_logits": (
        ("self", None),
        ("target", None),
        ("weight", None),
        ("pos_weight", None),
        ("reduction", MEAN),
    ),
}


def _pointwise_spec(name: str) -> OperatorSpec:
    at = [argument for argument, _ in _DEFAULTS[name]].index("reduction")
    return OperatorSpec(
        f"aten.{name}.default",
        _pointwise(at),
        localize=lambda call, shards: _localize_mean(call, shards, at),
        uneven=True,
    )


def _classes(call: Call) -> str:
    """`cross_entropy_loss(x, target, weight, reduction)`, `nll_loss_nd`: classes are frozen."""
    x, target = tensor(call, 0, "self"), tensor(call, 1, "target")
    reduction = call.get(3, "reduction", MEAN)
    mark = {NONE: "", MEAN: "^", SUM: "+"}[reduction]
    samples = marked(["n", *(f"s{i}" for i in range(x.ndim - 2))], mark) if x.ndim > 1 else []
    dims = [samples[0], "c^", *samples[1:]] if samples else ["c^"]
    inputs = [dims, dims if target.ndim == x.ndim and target.dtype.startswith(("float", "bfloat")) else samples]
    if isinstance(call.get(2, "weight"), TensorArgument):
        inputs.append(["c^"])
    return annotate(inputs, [samples if reduction == NONE else []])


def _localize_pick(call: Call, shards: Shards) -> Call:
    """The first class of the block."""
    axes = shards.get("c")
    if not axes:
        return call
    return call.replace(3, "first_class", block_start("c", tensor(call, 0, "logits").shape[1], axes))


_CE = (
    OperatorSpec("nnscaler.ce_max", "n c+max -> n"),
    OperatorSpec("nnscaler.ce_sumexp", "n c+, n -> n"),
    OperatorSpec(
        "nnscaler.ce_pick",
        "n c+, n -> n",
        linear=linear_in({0}),
        contiguous=frozenset({"c"}),
        localize=_localize_pick,
        uneven=True,
    ),
    OperatorSpec("nnscaler.ce_tail", "n+, n+, n+, n+ -> ()"),
    OperatorSpec("nnscaler.ce_count", "n+ -> ()"),
)

SPECS: tuple[OperatorSpec, ...] = (
    *_CE,
    *(_pointwise_spec(name) for name in _DEFAULTS),
    OperatorSpec("aten.cross_entropy_loss.default", _classes),
    OperatorSpec("aten.nll_loss_nd.default", _classes),
)
