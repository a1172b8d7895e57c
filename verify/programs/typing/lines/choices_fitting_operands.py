"""Enumerate the choices that could explain the states of a line's operands, on one axis.

Nothing here says what a choice means: the states that it gives, and whether it is legal, are those of
`nnscaler.ir.derive_operand_layouts`. A choice that is missing here makes a right line untypable, and never types a
wrong one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from math import gcd, prod
from typing import Any

from op_registry.annotation.splits import balanced
from op_registry.call import instances_in
from op_registry.rank_expression import Expression

from nnscaler.ir.derive_operand_layouts import around_axis, is_legal, over_slices, resolve
from nnscaler.ir.operation_annotations import Signature
from nnscaler.ir.operation_placement import Choice, RunInvariant, RunPartial, RunReplicated, Split
from nnscaler.layout import Invariant, Prefix, Replicated, Sharded, State, rows_of
from verify.programs.typing.lines.uniform_value_dims import NO_DIMS, Dims, same_piece
from verify.programs.typing.program_files.rank_program_syntax import Assignment
from verify.programs.typing.typed_value import Axes

# Read the layout from a line's comment. It is never trusted, only tried first where several typings are legal.


def as_told(states: Sequence[State], axis: str, hint: str) -> bool:
    """Return whether the first result is cut over the axis along the dim that the comment names, or along none."""
    shape = hint.partition("(")[2].partition(")")[0].split(", ")
    told = next((dim for dim, text in enumerate(shape) if re.search(rf"[/*]{axis}\b", text)), None)
    first = states[0] if states else None
    return told == (first.dim if isinstance(first, Sharded) else None)


@dataclass(frozen=True)
class FreeSplits:
    """How an identifier that no input has may be split.

    outers    outers that the other axes may put above it, and those that the line states
    sections  those that the line states
    tables    numbers by rank that the line states
    """

    outers: tuple[int, ...]
    sections: tuple[tuple[int, ...], ...] = ()
    tables: tuple[tuple[int, ...], ...] = ()


def told_by(line: Assignment, axis: str, outers: tuple[int, ...]) -> FreeSplits:
    """Collect how a line says that a dim is cut along an axis, in its arguments and its comment.

    They are not trusted: a choice has to give the line.
    """
    arguments = (line.args, dict(line.kwargs))
    stated = [states[axis] for states in _states(arguments) if isinstance(states.get(axis), Sharded)]
    gaps = [int(gap) for gap in re.findall(rf"/(\d+)\*{axis}\b", line.hint)]
    every = (*outers, *(gap * outer for gap in gaps for outer in outers), *(state.outer for state in stated))
    sections = re.findall(rf"[/*]{axis}\[([\d ]+)\]", line.hint)
    return FreeSplits(
        tuple(sorted(set(every))),
        tuple(
            dict.fromkeys([s.sections for s in stated if s.sections] + [tuple(map(int, s.split())) for s in sections])
        ),
        tuple(dict.fromkeys([*_tables(arguments, axis), *(s.sizes for s in stated)])),
    )


def _states(value: Any) -> Iterator[Mapping[Any, Any]]:
    match value:
        case Mapping():
            yield value
            for item in value.values():
                yield from _states(item)
        case list() | tuple():
            for item in value:
                yield from _states(item)


def _tables(value: Any, axis: str) -> Iterator[tuple[int, ...]]:
    for expression in instances_in(value, Expression):
        yield from (table for name, table in expression.terms if name == axis and isinstance(table, tuple))


def legal_choices(signature: Signature, states: Sequence[State], parts: int, told: FreeSplits) -> list[Choice]:
    """Return the legal choices that operands in these states, or the line, suggest."""
    wanted = (*whole_choices(signature), *_resolved(signature, states, parts), *_output_only(signature, parts, told))
    return [c for c in dict.fromkeys(wanted) if is_legal(signature, c, parts)]


def whole_choices(signature: Signature) -> Iterator[Choice]:
    yield RunInvariant()
    yield RunReplicated()
    for slots in signature.linear:
        yield RunPartial(slots)


def every_split(signature: Signature, outers: Sequence[int]) -> Iterator[Choice]:
    """Yield all splits with these outers: for naming what an operation was probably meant to do."""
    if signature.bound is not None:
        for identifier in signature.identifiers:
            for outer in outers:
                yield Split(identifier, outer)


def _resolved(signature: Signature, states: Sequence[State], parts: int) -> Iterator[Choice]:
    """Yield the splits that shard some operand as it is sharded, also with what then circulates."""
    if signature.bound is not None:
        prefixes = any(isinstance(state, Prefix) for state in states)
        for operand, state in zip(signature.bound.inputs, states, strict=True):
            split = resolve(operand, rows_of(state), parts)
            if split is not None:
                yield over_slices(signature, split) if prefixes else split
                around = around_axis(signature, split)
                if around is not None and not prefixes:
                    yield around


def _output_only(signature: Signature, parts: int, told: FreeSplits) -> Iterator[Choice]:
    if signature.bound is None:
        return
    given = {i for operand in signature.bound.inputs if operand is not None for i in operand.identifiers()}
    for identifier in signature.identifiers:
        if identifier not in given:
            for outer in told.outers:
                yield Split(identifier, outer)
            for sections in told.sections:
                yield Split(identifier, sections=sections)
            yield from _unevenly(identifier, signature.bound.sizes[identifier], parts, told.tables)


def _unevenly(identifier: str, size: int, parts: int, tables: Sequence[tuple[int, ...]]) -> Iterator[Split]:
    """Yield unequal splits of an identifier of `size`: into balanced sizes, and those that numbers by rank suggest.

    These may be sizes, or where shards begin, in any unit.
    """
    sizes = balanced(size, parts)
    if sizes:
        yield Split(identifier, sizes=sizes)
    for table in (t for t in tables if len(t) == parts):
        for parts_of_block in _multiples(table, size):
            block = sum(parts_of_block)
            if block > 0 and size % block == 0:
                yield Split(identifier, size // block, (), parts_of_block)
        for first in _multiples([b - a for a, b in pairwise(table)], size):
            for sign in (1, -1):
                steps = tuple(sign * step for step in first)
                yield Split(identifier, sizes=(*steps, size - sum(steps)))


def _multiples(numbers: Sequence[int], most: int) -> Iterator[tuple[int, ...]]:
    """Yield the numbers in every whole unit in which none is larger than `most`, which the model says: the text may
    have any numbers. The smallest unit comes first."""
    common = gcd(*numbers)
    if common:
        smallest = [number // common for number in numbers]
        for times in range(min(common, most // max(map(abs, smallest))), 0, -1):
            if common % times == 0:
                yield tuple(number * times for number in smallest)


def matches(need: State, have: State, needs_grad: bool, uniform: Dims = NO_DIMS) -> bool:
    """Return whether an operand in state `have` may stand where `need` is wanted.

    Without gradient, `Invariant` and `Replicated` are one, and so are all cuts of a `uniform` dim into pieces of the
    same lengths.
    """
    if not needs_grad and isinstance(need, Invariant | Replicated):
        return isinstance(have, Invariant | Replicated)
    return same_piece(need, have, uniform)


def outers_above(axes: Axes, axis: int) -> tuple[int, ...]:
    """Return the outers that other axes may put above a split: products of their sizes."""
    others = [size for i, size in enumerate(axes.sizes) if i != axis and size > 1]
    found = {
        prod(s for s, taken in zip(others, mask, strict=True) if taken) for mask in product((0, 1), repeat=len(others))
    }
    return tuple(sorted(found))
