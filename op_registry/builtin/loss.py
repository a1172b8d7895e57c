"""Annotations of losses. A sum over samples gives partial sums; a mean divides by the logical number of samples.

A mean that counts labels (`ignore_index`, class weights) is not the mean of local means: tracing lowers the usual cross
entropy to the `ce_*` operators, which share the count; what it does not lower is frozen here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

from op_registry.builtin._name_and_broadcast_dims import (
    Dims,
    all_frozen,
    annotate,
    broadcast,
    broadcast_shape,
    linear_in,
    marked,
    tensor,
)
from op_registry.call import Call, TensorArgument
from op_registry.rank_expression import block_start
from op_registry.spec import LinearSets, OperatorSpec, Shards

NONE, MEAN, SUM = 0, 1, 2
_MEAN_OF = "nnscaler.mean_of"


Arguments = tuple[tuple[str, object], ...]


def _reduction(call: Call, position: int) -> int:
    found = call.get(position, "reduction", MEAN)
    assert isinstance(found, int), call.operator
    return found


def _by_sample(inputs: Sequence[Dims], free: Dims, reduction: int) -> str:
    """A loss with one entry for each place of the `free` dims: kept, or summed to a scalar."""
    if reduction == NONE:
        return annotate(inputs, [free])
    summed = {n: f"{n}+" for n in free}
    return annotate([[summed.get(n, n) for n in dims] for dims in inputs], [[]])


def _pointwise(call: Call) -> tuple[list[Dims], Dims, int]:
    """All tensors broadcast together, and each entry has a loss."""
    operands, result = broadcast([t.shape for t in call.tensors()])
    return operands, result, prod(broadcast_shape([t.shape for t in call.tensors()]))


def _along_last(call: Call) -> tuple[list[Dims], Dims, int]:
    """Vectors are compared: the last dim is frozen; a tensor of fewer dims (labels) has none."""
    tensors = call.tensors()
    vectors = [t for t in tensors if t.ndim == max(t.ndim for t in tensors)]
    operands, result = broadcast([t.shape for t in vectors])
    last, free = result[-1], result[:-1]
    spelled = iter([[f"{n}^" if n == last else n for n in dims] for dims in operands])
    count = prod(broadcast_shape([t.shape for t in vectors])[:-1])
    return [next(spelled) if t in vectors else free[len(free) - t.ndim :] for t in tensors], free, count


def _rows(call: Call) -> tuple[list[Dims], Dims, int]:
    """`multi_margin_loss(x[n, c], labels[n])` and the like: classes are frozen."""
    x, labels, *weight = call.tensors()
    free = ["n"][: x.ndim - 1]
    return (
        [[*free, "c^"][: x.ndim], [*free, "c^"][: labels.ndim], *[["c^"]] * len(weight)],
        free,
        x.shape[0] if free else 1,
    )


@dataclass(frozen=True, slots=True)
class _Loss:
    """A loss whose mean divides by the number of entries (or samples) that the shapes give.

    `arguments`: positional ones with their defaults. `layout`: from a call to the dims of its tensors, those that
    have a loss each, and how many losses there are.
    """

    arguments: Arguments
    layout: Callable[[Call], tuple[list[Dims], Dims, int]] = _pointwise

    @property
    def reduction_at(self) -> int:
        return [name for name, _ in self.arguments].index("reduction")

    def annotation(self, call: Call) -> str:
        inputs, free, _ = self.layout(call)
        return _by_sample(inputs, free, _reduction(call, self.reduction_at))

    def linear(self, call: Call) -> LinearSets:
        """In a weight of its own for each entry."""
        if call.operator == _MEAN_OF:  # of a shard
            return ()
        places = [i for i, (name, _) in enumerate(self.arguments) if name == "weight"]
        found = [call.get(i, "weight") for i in places] if self.layout is _pointwise else []
        return linear_in(*({t.index} for t in found if isinstance(t, TensorArgument)))(call)

    def localize(self, call: Call, shards: Shards) -> Call:
        """The sum of the shard's losses over the logical number of losses."""
        if not shards or _reduction(call, self.reduction_at) != MEAN:
            return call
        given = [call.get(i, name, default) for i, (name, default) in enumerate(self.arguments)]
        given[self.reduction_at] = SUM
        named = {name for name, _ in self.arguments}
        kwargs = {k: v for k, v in call.kwargs.items() if k not in named}
        name = call.operator.split(".")[1]
        return Call(_MEAN_OF, (name, self.layout(call)[2], *given), kwargs, call.outputs)


_PAIR: Arguments = (("self", None), ("target", None), ("reduction", MEAN))
_TWO: Arguments = (("input1", None), ("input2", None), ("target", None), ("margin", 0.0), ("reduction", MEAN))
_TRIPLET: Arguments = (
    ("anchor", None),
    ("positive", None),
    ("negative", None),
    ("margin", 1.0),
    ("p", 2.0),
    ("eps", 1e-6),
    ("swap", False),
    ("reduction", MEAN),
)
_WEIGHTED: Arguments = (*_PAIR[:2], ("weight", None), ("reduction", MEAN))
_LOSSES: dict[str, _Loss] = {
    "mse_loss": _Loss(_PAIR),
    "l1_loss": _Loss(_PAIR),
    "soft_margin_loss": _Loss(_PAIR),
    "kl_div": _Loss(_PAIR),
    "smooth_l1_loss": _Loss((*_PAIR, ("beta", 1.0))),
    "huber_loss": _Loss((*_PAIR, ("delta", 1.0))),
    "binary_cross_entropy": _Loss(_WEIGHTED),
    "binary_cross_entropy_with_logits": _Loss((*_WEIGHTED[:3], ("pos_weight", None), ("reduction", MEAN))),
    "hinge_embedding_loss": _Loss((*_PAIR[:2], ("margin", 1.0), ("reduction", MEAN))),
    "poisson_nll_loss": _Loss(
        (("input", None), ("target", None), ("log_input", True), ("full", False), ("eps", 1e-8), ("reduction", MEAN))
    ),
    "margin_ranking_loss": _Loss(_TWO),
    "cosine_embedding_loss": _Loss(_TWO, _along_last),
    "triplet_margin_loss": _Loss(_TRIPLET, _along_last),
    "multi_margin_loss": _Loss(
        (*_PAIR[:2], ("p", 1), ("margin", 1), ("weight", None), ("reduction", MEAN)),
        _rows,
    ),
    "multilabel_margin_loss": _Loss(_PAIR, _rows),
}


def _is_probabilities(call: Call) -> bool:
    x, target = tensor(call, 0, "self"), tensor(call, 1, "target")
    return target.ndim == x.ndim and target.dtype.startswith(("float", "bfloat"))


def _classes(call: Call) -> str:
    """`cross_entropy_loss(x, target, weight, reduction)`, `nll_loss`: classes are frozen.

    A mean over labels counts those that are not ignored, by their weights; one over probabilities counts rows.
    """
    x = tensor(call, 0, "self")
    reduction = _reduction(call, 3)
    mark = {NONE: "", MEAN: "+" if _is_probabilities(call) else "^", SUM: "+"}[reduction]
    samples = marked(["n", *(f"s{i}" for i in range(x.ndim - 2))], mark) if x.ndim > 1 else []
    dims = [samples[0], "c^", *samples[1:]] if samples else ["c^"]
    inputs = [dims, dims if _is_probabilities(call) else samples]
    if isinstance(call.get(2, "weight"), TensorArgument):
        inputs.append(["c^"])
    return annotate(inputs, [samples if reduction == NONE else []])


def _probabilities_linear(call: Call) -> LinearSets:
    """In the probabilities, which label smoothing shifts, and in the weights of the classes."""
    if call.operator == _MEAN_OF or not _is_probabilities(call):
        return ()
    weights = isinstance(call.get(2, "weight"), TensorArgument)
    return linear_in(*[{1}] * (not call.get(5, "label_smoothing", 0.0)), *[{2}] * weights)(call)


def _localize_classes(call: Call, shards: Shards) -> Call:
    """Of probabilities: the sum of the shard's rows over the logical number of rows."""
    if not shards or _reduction(call, 3) != MEAN or not _is_probabilities(call):
        return call
    x = tensor(call, 0, "self")
    rows = prod(x.shape) // x.shape[1]
    rest = [call.get(i, name, default) for i, (name, default) in enumerate(_CROSS_ENTROPY)][2:]
    rest[1] = SUM
    target = tensor(call, 1, "target")
    return Call(_MEAN_OF, ("cross_entropy_loss", rows, x, target, *rest), {}, call.outputs)


_CROSS_ENTROPY: Arguments = (*_WEIGHTED, ("ignore_index", -100), ("label_smoothing", 0.0))


def _nll_forward(call: Call) -> str:
    """`nll_loss_forward`: the loss, and the total weight of the labels that count."""
    dims, samples = (["n+", "c^"], ["n+"]) if tensor(call, 0, "self").ndim == 2 else (["c^"], [])
    if tensor(call, 0, "self").ndim == 4:
        dims, samples = ["n+", "c^", "s0+", "s1+"], ["n+", "s0+", "s1+"]
    reduction = _reduction(call, 3)
    if reduction != SUM:
        dims, samples = ([f"{n.rstrip('+^')}^" for n in d] for d in (dims, samples))
    weights = [["c^"]] * isinstance(call.get(2, "weight"), TensorArgument)
    return annotate([dims, samples, *weights], [samples if reduction == NONE else [], []])


def _ctc(call: Call) -> str:
    """`ctc_loss(log_probs[t, n, c], targets, lengths, lengths)`: the batch, where lengths are tensors of it."""
    x, targets = tensor(call, 0, "log_probs"), tensor(call, 1, "targets")
    reduction = call.get(5, "reduction", MEAN)
    lengths = call.tensors()[2:]
    if x.ndim != 3 or targets.ndim != 2 or not lengths:
        return all_frozen(call)
    mark = "" if reduction == NONE else "+"
    n = f"n{mark}"
    return annotate([["t^", n, "c^"], [n, "s^"], *[[n]] * len(lengths)], [[n] if reduction == NONE else []])


def _localize_ctc(call: Call, shards: Shards) -> Call:
    """The mean over samples, each divided by its length, in units of the logical batch."""
    if not shards or call.get(5, "reduction", MEAN) != MEAN:
        return call
    batch = tensor(call, 0, "log_probs").shape[1]
    zero_infinity = call.get(6, "zero_infinity", False)
    return Call("nnscaler.ctc_mean", (*call.args[:4], call.get(4, "blank", 0), zero_infinity, batch), {}, call.outputs)


def _localize_pick(call: Call, shards: Shards) -> Call:
    """The first class of the block, and how many classes there are."""
    axes, classes = shards.get("c"), tensor(call, 0, "logits").shape[1]
    if not axes:
        return call
    return call.replace(3, "first_class", block_start("c", classes, axes)).replace(4, "classes", classes)


_CE = (
    OperatorSpec("nnscaler.ce_max", "n c+max -> n", detached=True),
    OperatorSpec("nnscaler.ce_sumexp", "n c+, n -> n"),
    OperatorSpec(
        "nnscaler.ce_pick",
        "n c+, n -> n",
        linear=linear_in({0}),
        gathers=True,
        contiguous=frozenset({"c"}),
        localize=_localize_pick,
        uneven=True,
    ),
    OperatorSpec("nnscaler.ce_tail", "n+, n+, n+, n+ -> ()", keeps_nothing=True),
    OperatorSpec("nnscaler.ce_count", "n+ -> ()"),
    OperatorSpec("nnscaler.ce_weight", "n+, c^ -> ()", linear=(frozenset({1}),)),
)

SPECS: tuple[OperatorSpec, ...] = (
    *_CE,
    *(
        OperatorSpec(f"aten.{n}.default", loss.annotation, linear=loss.linear, localize=loss.localize, uneven=True)
        for n, loss in _LOSSES.items()
    ),
    OperatorSpec(
        "aten.cross_entropy_loss.default",
        _classes,
        linear=_probabilities_linear,
        localize=_localize_classes,
        uneven=True,
    ),
    *(OperatorSpec(f"aten.{name}.default", _classes) for name in ("nll_loss_nd", "nll_loss", "nll_loss2d")),
    *(
        OperatorSpec(f"aten.{name}.default", _nll_forward, detached=frozenset({1}))
        for name in ("nll_loss_forward", "nll_loss2d_forward")
    ),
    OperatorSpec("aten.ctc_loss.Tensor", _ctc, localize=_localize_ctc),
    OperatorSpec("aten.ctc_loss.IntList", _ctc),
)
