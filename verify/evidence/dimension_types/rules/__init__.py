"""Transfer rules: from the states of an ATen operator's arguments to the states of its outputs.

A rule is a pure function `(RuleCall) -> one state per output` (`RULES`, by overload: "aten.mm.default"). It may say
less than the truth (`Unknown`), never more: whatever tensors and numbers of parts fit the states of the arguments, what
each rank computes on what it holds must fit the states of the results. Rules never see values.

`conclude(call)` is what proofs use: the rule, and around it what holds for all of them. An argument that is a
number and depends on what is split gives Unknown, unless `SIZES` names it: the sizes of tensors localise by
themselves, numbers that enter values do not. Random operators, those without a rule and those of other
namespaces give Unknown, except that a deterministic ATen operator on equal inputs has equal outputs.

To try a rule alone, `conclude_on` of `tests/verify/op_proofs/rule_harness.py` takes real tensors and their states:

    conclude_on(torch.ops.aten.mm.default, [a, b], {}, [Shard(1), Shard(0)], size=12)    # (PartialSum(),)

A tensor in state Shard(d, outer) has dim d of size outer * 12 * inner, and the rule sees outer * k * inner; so does
`Sized(lambda k: [4, k])`, an argument that lists sizes. For Constant and Zero tensors, `dims={1: (0, 1)}` says that dim
0 of tensor 1 is split with outer 1. Ranks are to hold, and to call the operator with, `k` -> their own number.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from verify.evidence.dimension_types.rules import (
    attention_and_group_norm,
    cat_and_split,
    convolution_pooling_resizing,
    indexing,
    normalisations_and_losses,
    pointwise,
    reductions_and_products,
    views_and_factories,
)
from verify.evidence.dimension_types.rules.call_with_states import Operand, Rule, RuleCall, unknown
from verify.evidence.dimension_types.states import SAME, ZERO, Constant, Same, State, Unknown, Zero, checked

__all__ = ["RULES", "SIZES", "Rule", "RuleCall", "conclude", "rule_of"]

_FAMILIES = (
    attention_and_group_norm,
    indexing,
    normalisations_and_losses,
    cat_and_split,
    pointwise,
    reductions_and_products,
    views_and_factories,
    convolution_pooling_resizing,
)

RULES: Mapping[str, Rule] = MappingProxyType(
    {name: rule for family in _FAMILIES for name, rule in family.RULES.items()}
)

SIZES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {name: names for family in _FAMILIES for name, names in getattr(family, "SIZES", {}).items()}
)


def rule_of(overload: Any) -> Rule | None:
    """Return the rule of an operator; that of pointwise ones where torch says that it is one."""
    found = RULES.get(str(overload))
    if found is None and torch.Tag.pointwise in overload.tags and not overload._schema.is_mutable:
        return pointwise.TAGGED
    return found


def conclude(call: RuleCall) -> tuple[State, ...]:
    """Return the states of the outputs: never more than is true, whatever the rule says. Does not raise."""
    overload = call.overload
    if overload.namespace not in _NAMESPACES:
        return unknown(call, "not an ATen operator")
    if torch.Tag.nondeterministic_seeded in overload.tags and call.arguments.get("dropout_p") != 0.0:
        return unknown(call, "draws random numbers")
    numbers = [name for name in call.split_numbers() if name not in SIZES.get(str(overload), ())]
    if numbers:
        return unknown(call, f"its argument {numbers[0]} depends on the size that is split")
    rule = rule_of(overload)
    if rule is None:
        return _without_rule(call)
    try:
        states = rule(call)
    except Exception as error:  # noqa: BLE001 - a rule that fails proves nothing
        return unknown(call, f"its rule raises {type(error).__name__}: {error}")
    if len(states) != len(call.outputs):
        return unknown(call, f"its rule gives {len(states)} states for {len(call.outputs)} outputs")
    return tuple(_checked(call, state, out) for state, out in zip(states, call.outputs, strict=True))


def _without_rule(call: RuleCall) -> tuple[State, ...]:
    """A deterministic operator on equal inputs, with nothing that is split, gives equal results."""
    equal = all(isinstance(o.state, Same | Constant | Zero) for o in call.operands())
    split = any(call.is_split(o.sizes) for o in (*call.operands(), *call.outputs) if o is not None)
    lost = next((o.state for o in call.operands() if isinstance(o.state, Unknown)), None)
    if lost is not None:
        return (lost,) * len(call.outputs)
    if equal and not split and str(call.overload) not in _UNDEFINED and call.operands():
        return (SAME,) * len(call.outputs)
    return unknown(call, "has no rule")


_NAMESPACES = ("aten", "nnscaler_proofs")
_UNDEFINED = frozenset({"aten.empty_like.default", "aten.new_empty.default", "aten.new_empty_strided.default"})


def _checked(call: RuleCall, state: State, out: Operand | None) -> State:
    """Return the rule's state if a tensor of these sizes can have it. An empty tensor is zero."""
    if out is None:
        return state
    empty = any(isinstance(size, int) and size == 0 for size in out.sizes)
    return ZERO if empty else _named(call, checked(state, out.sizes, call.split))


def _named(call: RuleCall, state: State) -> State:
    if isinstance(state, Unknown) and not state.reason.startswith("aten."):
        return Unknown(f"{call.overload}: {state.reason or 'unknown'}")
    return state
