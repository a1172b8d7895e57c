"""Transfer rules of attention and RMS norm as torch runs them on a CPU, and of the mean of a loss over rows.

A traced step has these, forward and backward, beside the operators of `verify.evidence.dimension_types.rules`. The mean
is the one place where a shard's result is not a term of the whole's: a mean over a rank's rows divides by its own
count. If all parts have the same count, the parts' means add up to `parts` times the whole's, and each count is the
whole's divided by `parts`. That the counts agree is a condition of the proof, which is checked on the batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from types import MappingProxyType

from verify.evidence.dimension_types.rules import conclude
from verify.evidence.dimension_types.rules.call_with_states import Operand, Rule, RuleCall, unknown
from verify.evidence.dimension_types.rules.labelled_dims_rule import Labelled, Labels, labelled, letters
from verify.evidence.dimension_types.states import PARTIAL_SUM, SAME, State, Unknown, checked, split_dims

_SUM = 2  # `reduction`
_MEAN = 1
UNIT = Fraction(1)
OWN_ROWS = "nnscaler.own_rows"  # stands for `aten.index.Tensor` whose first index counts the rows


@dataclass(frozen=True, slots=True)
class Transferred:
    """
    states     one per output
    factors    each output lies in its state of this number times the whole's output
    ignored    of a mean loss: the label that does not count. It relies on equal numbers of others in all data parts
    """

    states: tuple[State, ...]
    factors: tuple[Fraction, ...]
    ignored: int | None = None


def transfer(call: RuleCall, parts: int) -> Transferred:
    """Return the states of a call's outputs on an axis of `parts` ranks."""
    name = str(call.overload)
    if name == "aten.nll_loss_forward.default" and call["reduction"] == _MEAN:
        return _mean_loss(call, parts)
    if name == "aten.nll_loss_backward.default" and call["reduction"] == _MEAN:
        call = replace(call, arguments={**call.arguments, "reduction": _SUM})  # the divisor is `total_weight`
        if call["total_weight"].state != SAME or call.operand("weight") is not None:
            return _plain(unknown(call, "its divisor is not the same on every rank"))
    rule = RULES.get(name)
    return _plain(conclude(call) if rule is None else _by(rule, call))


def _plain(states: tuple[State, ...]) -> Transferred:
    return Transferred(states, (UNIT,) * len(states))


def _by(rule: Rule, call: RuleCall) -> tuple[State, ...]:
    if call.arguments.get("dropout_p"):
        return unknown(call, "draws random numbers")
    return tuple(
        state if out is None else checked(state, out.sizes, call.split)
        for state, out in zip(rule(call), call.outputs, strict=True)
    )


def _mean_loss(call: RuleCall, parts: int) -> Transferred:
    if call.operand("weight") is not None:
        return _plain(unknown(call, "weights of classes"))
    if not split_dims(call.tensor("target").sizes, call.split):
        return _plain(conclude(call))
    states = conclude(replace(call, arguments={**call.arguments, "reduction": _SUM}))
    if states[0] != PARTIAL_SUM:
        return _plain((states[0], Unknown("its loss is unknown")))
    return Transferred((PARTIAL_SUM, SAME), (Fraction(parts), 1 / Fraction(parts)), call["ignore_index"])


def _attention_labels(call: RuleCall) -> dict[str, Labels]:
    """Batch, heads and queries are free (queries not under a causal mask, which counts them)."""
    rows = None if call["is_causal"] else "l"
    labels: dict[str, Labels] = {
        "query": ["b", "h", rows, None],
        "key": ["b", "h", None, None],
        "value": ["b", "h", None, None],
        "out": ["b", "h", rows, None],
        "grad_out": ["b", "h", rows, None],
        "logsumexp": ["b", "h", rows],
    }
    mask = call.operand("attn_mask")
    if mask is not None:
        own = ["b", "h", rows, None][4 - mask.ndim :]
        labels["attn_mask"] = [None if s == 1 else name for name, s in zip(own, mask.sizes, strict=True)]
    return labels


def _attention(call: RuleCall) -> tuple[State, ...]:
    labels = _attention_labels(call)
    return labelled(call, Labelled(labels, [labels["query"], labels["logsumexp"]]))


def _attention_backward(call: RuleCall) -> tuple[State, ...]:
    labels = _attention_labels(call)
    outputs = [labels["query"], labels["key"], labels["value"]]
    return labelled(call, Labelled(labels, outputs, ["l"], [["grad_out"]]))


def _rms_norm_backward(call: RuleCall) -> tuple[State, ...]:
    """The gradient of the weight sums over all rows."""
    ndim, count = call.tensor("input").ndim, len(call["normalized_shape"])
    labels = letters(ndim, range(ndim - count, ndim))
    rows = [name for name in labels if name is not None]
    inputs: dict[str, Labels] = dict.fromkeys(("grad_out", "input", "rstd"), labels)
    return labelled(call, Labelled(inputs, [labels, [None] * count], rows, [["grad_out"]]))


def _own_rows(call: RuleCall) -> tuple[State, ...]:
    """`x[arange(rows), ...]`: each row of the result reads the same row of `x`, so that they are split together."""
    x, rows = call.tensor("self"), call["indices"][0]
    others = [o for o in call["indices"][1:] if isinstance(o, Operand)]
    ndim = max(o.ndim for o in (rows, *others))
    common = letters(ndim, prefix="i")
    inputs: dict[str, Labels] = {}
    for i, index in enumerate(call["indices"]):
        if isinstance(index, Operand):
            own = common[ndim - index.ndim :]
            inputs[f"indices.{i}"] = [None if s == 1 else name for name, s in zip(own, index.sizes, strict=True)]
    at = split_dims(rows.sizes, call.split)
    inputs["self"] = [inputs["indices.0"][at[0]] if at else None, *[None] * (x.ndim - 1)]
    rest = [None] * (x.ndim - 1 - len(others))
    return labelled(call, Labelled(inputs, [[*common, *rest]]))


RULES: Mapping[str, Rule] = MappingProxyType(
    {
        "aten._scaled_dot_product_flash_attention_for_cpu.default": _attention,
        "aten._scaled_dot_product_flash_attention_for_cpu_backward.default": _attention_backward,
        OWN_ROWS: _own_rows,
        "aten._fused_rms_norm_backward.default": _rms_norm_backward,
    }
)
