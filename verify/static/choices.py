"""How an operation may have run, judged by what its operands hold: the typings of one axis.

A choice (an identifier is split, the whole operation is repeated, or it runs on partial sums) gives every operand a
state. The states come from the annotation by `op_registry.shard_of`, the function that verify-op checks shards by; the
compiler's own derivation is not used.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import gcd
from typing import Any

from op_registry.annotation.sizes import BoundOperand
from op_registry.annotation.splits import balanced, shard_of, splittable
from op_registry.expression import Expression

from nnscaler.ir.layout import (
    INVARIANT,
    PARTIAL,
    REPLICATED,
    Invariant,
    Partial,
    Replicated,
    Sharded,
    State,
)
from nnscaler.ir.placement import Choice, RunInvariant, RunPartial, RunReplicated, Split
from nnscaler.transform.signature import Signature
from verify.static.text import Line


def input_states(signature: Signature, choice: Choice) -> tuple[State, ...]:
    """The state that each tensor of the call needs."""
    count = signature.inputs
    if isinstance(choice, RunInvariant):
        return (INVARIANT,) * count
    if isinstance(choice, RunReplicated):
        return (REPLICATED,) * count
    if isinstance(choice, RunPartial):
        return tuple(PARTIAL if i in choice.slots else REPLICATED for i in range(count))
    bound = signature.bound
    assert bound is not None
    reduction = bound.marks.get(choice.identifier) == "+"
    states: list[State] = []
    for operand in bound.inputs:
        shard = _shard(signature, operand, choice)
        partial = operand is not None and operand.additive and reduction
        states.append(shard or (PARTIAL if partial else REPLICATED))
    return tuple(states)


def output_states(signature: Signature, choice: Choice, count: int) -> tuple[State, ...]:
    """The state in which each output arises."""
    if isinstance(choice, RunInvariant):
        return (INVARIANT,) * count
    if isinstance(choice, RunReplicated):
        return (REPLICATED,) * count
    if isinstance(choice, RunPartial):
        return (PARTIAL,) * count
    bound = signature.bound
    assert bound is not None
    states: list[State] = []
    for operand in bound.outputs:
        shard = _shard(signature, operand, choice)
        summed = operand is not None and bound.marks.get(choice.identifier) == "+"
        partial = Partial(bound.reductions.get(choice.identifier, "sum"))
        states.append(shard or (partial if summed else REPLICATED))
    return tuple(states)


def _shard(signature: Signature, operand: BoundOperand | None, choice: Split) -> Sharded | None:
    if operand is None:
        return None
    assert signature.bound is not None
    if choice.sections:
        whole = [d for d, dim in enumerate(operand.dims) if _is_whole(operand, d, choice.identifier) and dim.size]
        return Sharded(whole[0], 1, choice.sections) if whole else None
    found = shard_of(signature.bound, operand, choice.identifier, choice.outer, choice.sizes)
    return None if found is None else Sharded(found.dim, found.outer, found.sections, found.sizes)


def _is_whole(operand: BoundOperand, dim: int, identifier: str) -> bool:
    factors = operand.dims[dim].factors
    return len(factors) == 1 and factors[0].identifier == identifier


def explain_illegal(signature: Signature, choice: Choice, parts: int) -> str | None:
    """Why the annotation does not allow the choice over `parts` ranks; None if it does."""
    if isinstance(choice, RunInvariant | RunReplicated):
        return None
    if signature.bound is None or signature.spec is None:
        return signature.reason or "the operator has no annotation"
    if isinstance(choice, RunPartial):
        return None if choice.slots in signature.linear else f"it is not linear in its operands {sorted(choice.slots)}"
    if choice.outer > 1 and choice.identifier in signature.spec.contiguous:
        return f"`{choice.identifier}` only splits into contiguous blocks"
    if choice.sizes and not signature.spec.allows_uneven:
        return "its hook does not know shards of unequal sizes"
    if choice.sections:
        size = signature.bound.sizes.get(choice.identifier)
        if sum(choice.sections) != size or any(s % parts for s in choice.sections):
            return f"sections {choice.sections} do not divide by {parts}"
        return splittable(signature.bound, choice.identifier, 1, 1)
    return splittable(signature.bound, choice.identifier, parts, choice.outer, choice.sizes)


@dataclass(frozen=True)
class Told:
    """How an identifier that no input has may be split: `outers` are what other axes may leave above it, `tables` and
    `sizes` numbers by rank that the line says."""

    outers: tuple[int, ...]
    tables: tuple[tuple[int, ...], ...] = ()


def told_by(line: Line, axis: str, outers: tuple[int, ...]) -> Told:
    """What a line says of the sizes of shards along an axis. It is not trusted: a choice has to give the line."""
    return Told(outers, tuple(dict.fromkeys(_tables((line.args, dict(line.kwargs)), axis))))


def _tables(value: Any, axis: str) -> Iterator[tuple[int, ...]]:
    match value:
        case Expression(terms=terms):
            yield from (table for name, table in terms if name == axis and isinstance(table, tuple))
        case Sharded(sizes=sizes):
            yield sizes
        case list() | tuple():
            for item in value:
                yield from _tables(item, axis)
        case Mapping():
            for item in value.values():
                yield from _tables(item, axis)


def legal_choices(signature: Signature, states: Sequence[State], parts: int, told: Told) -> list[Choice]:
    """Choices that the annotation allows and that operands in these states, or the line, suggest."""
    wanted = (*whole_choices(signature), *_suggested(signature, states), *_output_only(signature, parts, told))
    return [c for c in dict.fromkeys(wanted) if explain_illegal(signature, c, parts) is None]


def whole_choices(signature: Signature) -> Iterator[Choice]:
    yield RunInvariant()
    yield RunReplicated()
    for slots in signature.linear:
        yield RunPartial(slots)


def every_split(signature: Signature, outers: Sequence[int]) -> Iterator[Choice]:
    """All splits with these outers: for naming what an operation was probably meant to do."""
    if signature.bound is not None:
        for identifier in signature.identifiers:
            for outer in outers:
                yield Split(identifier, outer)


def _suggested(signature: Signature, states: Sequence[State]) -> Iterator[Choice]:
    """Splits that shard some operand as it is sharded."""
    if signature.bound is None:
        return
    for operand, state in zip(signature.bound.inputs, states, strict=True):
        if operand is None or not isinstance(state, Sharded) or state.dim >= len(operand.dims):
            continue
        dim, before = operand.dims[state.dim], 1
        for factor in dim.factors:
            if factor.identifier is not None:
                if state.sections:
                    yield Split(factor.identifier) if dim.concat else Split(factor.identifier, 1, state.sections)
                elif state.sizes and state.outer % before == 0:
                    after = max(dim.size // max(before * factor.size, 1), 1)
                    sizes = tuple(size // after for size in state.sizes)
                    yield Split(factor.identifier, state.outer // before, (), sizes)
                elif state.outer % before == 0:
                    yield Split(factor.identifier, state.outer // before)
            before *= factor.size


def _output_only(signature: Signature, parts: int, told: Told) -> Iterator[Choice]:
    if signature.bound is None:
        return
    given = {i for operand in signature.bound.inputs if operand is not None for i in operand.identifiers()}
    for identifier in signature.identifiers:
        if identifier not in given:
            for outer in told.outers:
                yield Split(identifier, outer)
            yield from _unevenly(identifier, signature.bound.sizes[identifier], parts, told.tables)


def _unevenly(identifier: str, size: int, parts: int, tables: Sequence[tuple[int, ...]]) -> Iterator[Split]:
    """Unequal splits of an identifier of `size`: into balanced sizes, and those that numbers by rank suggest. These may
    be sizes, or where shards begin, in any unit."""
    sizes = balanced(size, parts)
    if sizes:
        yield Split(identifier, sizes=sizes)
    for table in (t for t in tables if len(t) == parts):
        for unit in _divisors(gcd(*table)):
            block = sum(table) // unit
            if block > 0 and size % block == 0:
                yield Split(identifier, size // block, (), tuple(part // unit for part in table))
        steps = [b - a for a, b in pairwise(table)]
        for unit in _divisors(gcd(*steps)):
            for sign in (unit, -unit):
                first = tuple(step // sign for step in steps)
                yield Split(identifier, sizes=(*first, size - sum(first)))


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def matches(need: State, have: State, needs_grad: bool) -> bool:
    """Whether an operand in state `have` may stand where `need` is wanted: without gradient, `Invariant` and
    `Replicated` are one."""
    if not needs_grad and isinstance(need, Invariant | Replicated):
        return isinstance(have, Invariant | Replicated)
    return need == have
