"""Transfer rules of losses and normalisations, with their backwards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from verify.evidence.dimension_types.rules.call_with_states import Operand, Rule, RuleCall, unknown
from verify.evidence.dimension_types.rules.labelled_dims_rule import Labelled, Labels, labelled, letters
from verify.evidence.dimension_types.rules.pointwise import pointwise
from verify.evidence.dimension_types.states import SAME, State, Unknown, split_dims

# Losses: entry by entry, then kept, summed, or averaged (which reads everything whole).


NONE, MEAN, SUM = 0, 1, 2


def _entrywise(call: RuleCall) -> tuple[State, ...]:
    """A loss whose inputs broadcast."""
    if call["reduction"] == NONE:
        return pointwise(call)
    operands = {name: o for name, o in call.arguments.items() if isinstance(o, Operand)}
    ndim = max(o.ndim for o in operands.values())
    sums = call["reduction"] == SUM
    names = letters(ndim) if sums else [None] * ndim
    inputs: dict[str, Labels] = {
        name: [None if size == 1 else label for label, size in zip(names[ndim - o.ndim :], o.sizes, strict=True)]
        for name, o in operands.items()
    }
    return labelled(call, Labelled(inputs, [[]], [n for n in names if n is not None]))


def _entrywise_backward(call: RuleCall) -> tuple[State, ...]:
    """The gradient of a mean divides by a number of entries."""
    if call["reduction"] == MEAN and split_dims(call.tensor("self").sizes, call.split):
        return unknown(call, "a mean over a dim that is split")
    return pointwise(call, (("grad_output",),))


def _labels(call: RuleCall) -> tuple[list[str | None], list[str | None]]:
    """Labels of [n, c, *places] and of [n, *places]; a mean reads everything whole."""
    ndim = call.tensor("self").ndim
    free = call["reduction"] != MEAN
    classes = 1 if ndim > 1 else 0
    x = [f"d{i}" if free and i != classes else None for i in range(ndim)]
    return x, [name for i, name in enumerate(x) if i != classes]


def _nll(call: RuleCall) -> tuple[State, ...]:
    """`nll_loss_forward`: the loss, and the sum of weights, which only a mean uses."""
    x, target = _labels(call)
    sums = [name for name in x if name is not None]
    kept = target if call["reduction"] == NONE else []
    states = labelled(call, Labelled({"self": x, "target": target}, [kept, []], sums))
    if call["reduction"] == MEAN or isinstance(states[0], Unknown):
        return states
    return (states[0], Unknown(f"{call.overload}: the sum of weights is not written"))


def _nll_backward(call: RuleCall) -> tuple[State, ...]:
    x, target = _labels(call)
    gradient = target if call["reduction"] == NONE else []
    given = dict(call.arguments)
    if call["reduction"] != MEAN:
        given["total_weight"] = None
    inputs: dict[str, Labels] = {"grad_output": gradient, "self": x, "target": target}
    return labelled(replace(call, arguments=given), Labelled(inputs, [x], (), [["grad_output"]]))


_ENTRYWISE = "mse_loss smooth_l1_loss huber_loss soft_margin_loss binary_cross_entropy".split()

_LOSSES: Mapping[str, Rule] = {
    **{f"aten.{name}.default": _entrywise for name in (*_ENTRYWISE, "binary_cross_entropy_with_logits")},
    **{f"aten.{name}_backward.default": _entrywise_backward for name in _ENTRYWISE},
    "aten.nll_loss_forward.default": _nll,
    "aten.nll_loss2d_forward.default": _nll,
    "aten.nll_loss_backward.default": _nll_backward,
    "aten.nll_loss2d_backward.default": _nll_backward,
}


# Normalisations: what statistics run over is read whole.


def _over_last(call: RuleCall) -> tuple[list[str | None], int]:
    """Labels of the input of `layer_norm`, and how many last dims are read whole."""
    ndim, count = call.tensor("input").ndim, len(call["normalized_shape"])
    return letters(ndim, range(ndim - count, ndim)), count


def _layer_norm(call: RuleCall) -> tuple[State, ...]:
    labels, _ = _over_last(call)
    return labelled(call, Labelled({"input": labels}, [labels] * len(call.outputs)))


def _layer_norm_backward(call: RuleCall) -> tuple[State, ...]:
    """Gradients of weight and bias sum over all rows."""
    labels, count = _over_last(call)
    inputs: dict[str, Labels] = dict.fromkeys(("grad_out", "input", "mean", "rstd"), labels)
    rows = [name for name in labels if name is not None]
    of_weights: list[Labels] = [[None] * count] * (len(call.outputs) - 1)
    return labelled(call, Labelled(inputs, [labels, *of_weights], rows, [["grad_out"]]))


def _group_norm(call: RuleCall) -> tuple[State, ...]:
    labels = ["b", *[None] * (call.tensor("input").ndim - 1)]
    return labelled(call, Labelled({"input": labels}, [labels, ["b", None], ["b", None]]))


def _group_norm_backward(call: RuleCall) -> tuple[State, ...]:
    labels = ["b", *[None] * (call.tensor("input").ndim - 1)]
    inputs: dict[str, Labels] = {"grad_out": labels, "input": labels, "mean": ["b", None], "rstd": ["b", None]}
    return labelled(call, Labelled(inputs, [labels, [None], [None]], ["b"], [["grad_out"]]))


def _channels(call: RuleCall, training: bool) -> list[str | None]:
    ndim = call.tensor("input").ndim
    return [None, "c", *[None] * (ndim - 2)] if training else ["b", "c", *(f"s{i}" for i in range(ndim - 2))]


def _batch_norm(call: RuleCall) -> tuple[State, ...]:
    """In training statistics run over all but channels; otherwise the stored ones are used, entry by entry."""
    labels = _channels(call, call["training"])
    inputs: dict[str, Labels] = {"input": labels}
    inputs |= {name: ["c"] for name in ("weight", "bias", "running_mean", "running_var")}
    states = labelled(call, Labelled(inputs, [labels, *[["c"]] * (len(call.outputs) - 1)]))
    if call["training"] or isinstance(states[0], Unknown):
        return states
    return (states[0], *(SAME for _ in states[1:]))  # saved statistics are empty


def _batch_norm_backward(call: RuleCall) -> tuple[State, ...]:
    labels = _channels(call, call["train"])
    inputs: dict[str, Labels] = dict.fromkeys(("grad_out", "input"), labels)
    of_channels = ("weight", "running_mean", "running_var", "save_mean", "save_invstd")
    inputs |= {name: ["c"] for name in of_channels}
    rows = [name for name in labels if name not in (None, "c")]
    given = dict(call.arguments)
    if not call["train"]:
        given |= {"save_mean": None, "save_invstd": None}  # empty
    how = Labelled(inputs, [labels, ["c"], ["c"]], [name for name in rows if name is not None], [["grad_out"]])
    return labelled(RuleCall(call.overload, given, call.outputs, call.split), how)


def _weight_norm(call: RuleCall) -> tuple[State, ...]:
    labels = _one_dim(call, call.tensor("v").ndim)
    return labelled(call, Labelled({"v": labels, "g": labels}, [labels, labels]))


def _weight_norm_backward(call: RuleCall) -> tuple[State, ...]:
    labels = _one_dim(call, call.tensor("saved_v").ndim)
    inputs: dict[str, Labels] = dict.fromkeys(("grad_w", "saved_v", "saved_g", "saved_norms"), labels)
    return labelled(call, Labelled(inputs, [labels, labels], (), [["grad_w"]]))


def _one_dim(call: RuleCall, ndim: int) -> list[str | None]:
    """Each entry of `dim` has a norm of its own."""
    kept = call["dim"] % ndim
    return ["k" if i == kept else None for i in range(ndim)]


RULES: Mapping[str, Rule] = MappingProxyType(
    {
        **_LOSSES,
        "aten.native_layer_norm.default": _layer_norm,
        "aten.native_layer_norm_backward.default": _layer_norm_backward,
        "aten._fused_rms_norm.default": _layer_norm,
        "aten.native_group_norm.default": _group_norm,
        "aten.native_group_norm_backward.default": _group_norm_backward,
        "aten.native_batch_norm.default": _batch_norm,
        "aten.native_batch_norm_backward.default": _batch_norm_backward,
        "aten._weight_norm_interface.default": _weight_norm,
        "aten._weight_norm_interface_backward.default": _weight_norm_backward,
    }
)

SIZES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"aten.native_group_norm.default": ("N",), "aten.native_group_norm_backward.default": ("N",)}
)
