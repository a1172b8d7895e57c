"""Losses: entry by entry, then kept, summed, or averaged (which reads everything whole)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from verify.evidence.dimension_types.rules.call_with_states import Operand, Rule, RuleCall, unknown
from verify.evidence.dimension_types.rules.labelled_dims_rule import Labelled, Labels, labelled, letters
from verify.evidence.dimension_types.rules.pointwise import pointwise
from verify.evidence.dimension_types.states import State, Unknown, split_dims

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

RULES: Mapping[str, Rule] = MappingProxyType(
    {
        **{f"aten.{name}.default": _entrywise for name in (*_ENTRYWISE, "binary_cross_entropy_with_logits")},
        **{f"aten.{name}_backward.default": _entrywise_backward for name in _ENTRYWISE},
        "aten.nll_loss_forward.default": _nll,
        "aten.nll_loss2d_forward.default": _nll,
        "aten.nll_loss_backward.default": _nll_backward,
        "aten.nll_loss2d_backward.default": _nll_backward,
    }
)
