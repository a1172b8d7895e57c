"""Check that the guards on sizes that a trace assumed hold on every shard."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import sympy  # type: ignore[import-untyped]
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

from verify.evidence.dimension_types.states import Symbols, symbols_of
from verify.results.verdict import Condition


@dataclass(frozen=True, slots=True)
class Granted:
    """The guards of a trace, checked on shards.

    blocker     a condition that the proof of a split needs and that may fail on a shard; empty if there is none
    conditions  under which the proof holds, the blocker's among them
    """

    blocker: str = ""
    conditions: tuple[Condition, ...] = ()


AT_LEAST_TWO = "no rank holds less than 2 of it"


def granted(shape_env: Any, split: Symbols, names: Mapping[Any, str]) -> Granted:
    """Check every guard of the trace (the environment's are `Guards`). `names`: identifiers by their symbols."""
    conditions: dict[str, Condition] = {}
    blocker = ""
    for symbol, value in shape_env.replacements.items():
        condition = _condition(sympy.Eq(symbol, value, evaluate=False), names)
        conditions[condition.text] = condition
        if symbol in split or split & symbols_of(value):
            blocker = blocker or f"it runs only where {condition}"
    for guard, own in zip(shape_env.guards, shape_env.guards.own, strict=True):
        expression = reduced(guard.expr)
        if _always(expression, 1) or not symbols_of(expression):
            continue
        condition = _condition(expression, names)
        if _always(expression, 2):
            if own and split & symbols_of(expression):
                before = conditions.get(AT_LEAST_TWO, Condition("", sympy.true)).relation
                conditions[AT_LEAST_TWO] = Condition(AT_LEAST_TWO, sympy.And(before, condition.relation))
            elif own:  # all ranks go the same way, but what the other way does was never traced
                conditions[condition.text] = condition
            continue
        conditions[condition.text] = condition
        if split & symbols_of(expression):
            blocker = blocker or f"it depends on whether {condition}"
    return Granted(blocker, tuple(conditions.values()))


def reduced(relation: Any) -> Any:
    """Return the relation without what both sides have as a factor: sizes are positive."""
    if not isinstance(relation, sympy.core.relational.Relational):
        return relation
    common = sympy.gcd(relation.lhs, relation.rhs)
    if not symbols_of(common) or common.atoms(sympy.Function):
        return relation
    return relation.func(sympy.cancel(relation.lhs / common), sympy.cancel(relation.rhs / common))


def _always(expression: Any, least: int) -> bool:
    """Return whether the expression is true for all sizes of at least `least`."""
    if expression == sympy.true:
        return True
    ranges = {symbol: ValueRanges(least, int_oo) for symbol in symbols_of(expression)}
    found = bound_sympy(expression, ranges)
    return bool(found.is_singleton() and found.lower == sympy.true)


def _condition(expression: Any, names: Mapping[Any, str]) -> Condition:
    known = {s: sympy.Symbol(names[s], integer=True, positive=True) for s in symbols_of(expression) if s in names}
    relations = {sympy.Eq: "==", sympy.Ne: "!="}
    sign = relations.get(type(expression))
    shown = expression.xreplace(known)
    text = f"{shown.lhs} {sign} {shown.rhs}" if sign and isinstance(shown, sympy.Rel) else str(shown)
    return Condition(text, shown)


def equals(name: str, size: int) -> Condition:
    """Return the condition that an identifier has this size."""
    symbol = sympy.Symbol(name, integer=True, positive=True)
    return Condition(f"{name} == {size}", sympy.Eq(symbol, size, evaluate=False))
