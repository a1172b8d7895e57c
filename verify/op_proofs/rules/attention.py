"""Fused attention: batch and heads are free, and so are queries unless positions are compared."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from verify.op_proofs.rules.call import Operand, Rule, RuleCall
from verify.op_proofs.rules.labelled import Labelled, Labels, labelled
from verify.op_proofs.states import State


def _labels(call: RuleCall) -> dict[str, Labels]:
    """Labels by argument: [b, h, l, e] of queries, [b, h, s, e] of keys and values, and what the mask shares."""
    queries = ["b", "h", None if call["is_causal"] else "l", None]
    others = ["b", "h", None, None]
    found: dict[str, Labels] = dict.fromkeys(("query", "out", "grad_out"), queries)
    found |= dict.fromkeys(("key", "value"), others)
    found["logsumexp"] = queries[:3]
    mask = call.operand("attn_mask")
    if isinstance(mask, Operand):
        own = ["b", "h", queries[2], None][4 - mask.ndim :]
        found["attn_mask"] = [None if size == 1 else label for label, size in zip(own, mask.sizes, strict=True)]
    return found


def _flash(call: RuleCall) -> tuple[State, ...]:
    labels = _labels(call)
    return labelled(call, Labelled(labels, [labels["query"], labels["logsumexp"]]))


def _flash_backward(call: RuleCall) -> tuple[State, ...]:
    """Gradients of keys and values sum over queries."""
    labels = _labels(call)
    return labelled(call, Labelled(labels, [labels["query"], labels["key"], labels["value"]], ["l"], [["grad_out"]]))


RULES: Mapping[str, Rule] = MappingProxyType(
    {
        "aten._scaled_dot_product_flash_attention_for_cpu.default": _flash,
        "aten._scaled_dot_product_flash_attention_for_cpu_backward.default": _flash_backward,
    }
)
