"""Attention and group norm, kept whole: batch, heads, queries and the values' entries are free; so are whole groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from verify.evidence.dimension_types.rules.call_with_states import Operand, Rule, RuleCall, unknown
from verify.evidence.dimension_types.rules.convolution_pooling_resizing import Straddles, grouped, regrouped
from verify.evidence.dimension_types.rules.labelled_dims_rule import Labelled, Labels, labelled
from verify.evidence.dimension_types.states import (
    PARTIAL_SUM,
    SAME,
    Constant,
    PartialSum,
    Same,
    Size,
    State,
    Zero,
    quotient,
    split_dims,
)


def _batch(ndim: int, kept: int) -> list[str | None]:
    """Labels of the dims ahead of the last `kept`, aligned at the right."""
    return [f"b{i}" for i in reversed(range(ndim - kept))]


def _labels(call: RuleCall) -> dict[str, Labels]:
    """Labels by argument: [*, l, e], [*, s, e], [*, s, v]; of the mask [*, l, s]; of the result [*, l, v]."""
    rows = None if call["is_causal"] else "l"
    ends: dict[str, Labels] = {
        "query": [rows, None],
        "key": [None, None],
        "value": [None, "v"],
        "attn_mask": [rows, None],
        "grad": [rows, "v"],
    }
    found: dict[str, Labels] = {}
    for name, end in ends.items():
        operand = call.operand(name)
        if operand is not None:
            own = [*_batch(operand.ndim, 2), *end]
            found[name] = [None if size == 1 else label for label, size in zip(own, operand.sizes, strict=True)]
    if _splits_groups(call):
        for name in ("key", "value"):
            found[name] = [None if label == "b0" else label for label in found[name]]
    return found


def _splits_groups(call: RuleCall) -> bool:
    """Return whether query heads `(h g)` are split by `g`: the heads that share one head of keys and values."""
    query, key = call.tensor("query"), call.tensor("key")
    if not call["enable_gqa"] or query.ndim < 3 or key.ndim < 3 or call.is_split(key.sizes[-3]):
        return False
    lies = query.shard(call.split)
    if lies is None or lies.dim != query.ndim - 3 or lies.outer is None:
        return False
    return quotient(lies.outer, key.sizes[-3]) is not None


def _result(labels: Mapping[str, Labels], ndim: int) -> list[str | None]:
    batch = _batch(ndim, 2)
    known = {name for own in labels.values() for name in own}
    rows = "l" if "l" in known else None
    return [*(name if name in known else None for name in batch), rows, "v"]


def _attention(call: RuleCall) -> tuple[State, ...]:
    labels = _labels(call)
    return labelled(call, Labelled(labels, [_result(labels, call.output.ndim)], (), [["value"]]))


def _attention_backward(call: RuleCall) -> tuple[State, ...]:
    """One gradient per floating tensor: sums over what that tensor lacks."""
    labels = _labels(call)
    batch = [n for own in labels.values() for n in own if n is not None]
    labels["grad"] = [n if n in batch or n in ("l", "v") else None for n in labels["grad"]]
    of = [n for n in ("query", "key", "value", "attn_mask") if _floating(call.operand(n))]
    others = [o.state for name, o in call.arguments.items() if isinstance(o, Operand) and name != "value"]
    if isinstance(call.tensor("value").state, PartialSum):
        if any(not isinstance(state, Same | Constant | Zero) for state in others):
            return unknown(call, "not linear in value alone")
        if any(split_dims(o.sizes, call.split) for o in call.operands()):
            return unknown(call, "partial sums meet a shard")
        return tuple(SAME if name == "value" else PARTIAL_SUM for name in of)  # its own gradient does not read it
    sums = [name for name in batch if name is not None]
    return labelled(call, Labelled(labels, [labels[name] for name in of], sums, [["grad"]]))


def _floating(operand: Operand | None) -> bool:
    return operand is not None and operand.dtype.is_floating_point


def _normed(call: RuleCall, names: Mapping[str, int], outputs: Sequence[tuple[Labels, int]]) -> tuple[State, ...]:
    """`names`: the dim of channels of each tensor; `outputs`: labels with groups seen as a dim of their own, and
    the dim of channels."""
    groups: Size = call["num_groups"]
    arguments = dict(call.arguments)
    inputs: dict[str, Labels] = {}
    try:
        for name, dim in names.items():
            operand = call.operand(name)
            if operand is not None:
                arguments[name] = grouped(operand, dim, groups, call)
                rest = [None] * (operand.ndim - dim)
                inputs[name] = [*(["b"] if dim else []), "g", *rest]
    except Straddles as reason:
        return unknown(call, str(reason))
    inner = RuleCall(call.overload, arguments, call.outputs, call.split)
    states = labelled(inner, Labelled(inputs, [labels for labels, _ in outputs], ["b"], [["grad"]]))
    return tuple(regrouped(state, dim, groups) for state, (_, dim) in zip(states, outputs, strict=True))


def _group_norm(call: RuleCall) -> tuple[State, ...]:
    places = [None] * (call.tensor("input").ndim - 1)
    return _normed(call, {"input": 1, "weight": 0, "bias": 0}, [(["b", "g", *places], 1)])


def _group_norm_backward(call: RuleCall) -> tuple[State, ...]:
    places = [None] * (call.tensor("input").ndim - 1)
    outputs: list[tuple[Labels, int]] = [(["b", "g", *places], 1)]
    outputs += [(["g", None], 0) for name in ("weight", "bias") if call.operand(name) is not None]
    return _normed(call, {"grad": 1, "input": 1, "weight": 0, "bias": 0}, outputs)


RULES: Mapping[str, Rule] = MappingProxyType(
    {
        "nnscaler_proofs.attention.default": _attention,
        "nnscaler_proofs.attention_backward.default": _attention_backward,
        "nnscaler_proofs.group_norm.default": _group_norm,
        "nnscaler_proofs.group_norm_backward.default": _group_norm_backward,
    }
)

SIZES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "nnscaler_proofs.group_norm.default": ("num_groups",),
        "nnscaler_proofs.group_norm_backward.default": ("num_groups",),
    }
)
