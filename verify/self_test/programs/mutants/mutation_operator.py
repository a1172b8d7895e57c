"""A mutation operator (DeMillo, Lipton and Sayward 1978): a way to make a right program wrong, and where it applies.

One row each: family, kind, which places of a program are edited, and how one of them is. `each_of(places, how)` joins
the last two. The level that must refute a family is in `tally`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

from verify.self_test.programs.mutants.editable_program import RightProgram, Statement
from verify.self_test.programs.mutants.mutant import Edit, Edits

Find = Callable[[RightProgram], Iterator[Edits] | Iterator[Edit]]
Place = TypeVar("Place")
Places = Callable[[RightProgram], Iterator[Place]]


@dataclass(frozen=True, slots=True)
class MutationOperator:
    """`find` yields every place where it applies, and does not where the result would mean the same."""

    family: str
    kind: str
    find: Find

    def places(self, subject: RightProgram) -> list[Edits]:
        """Return all edits that the operator can make to a program; each changes something."""
        found: list[Edits] = []
        for made in self.find(subject):
            edits = (made,) if isinstance(made, Edit) else made
            if edits and all(e.before != e.after for e in edits):
                found.append(edits)
        return found


def operators(family: str, kinds: Mapping[str, Find]) -> tuple[MutationOperator, ...]:
    """Return the rows of a family."""
    return tuple(MutationOperator(family, kind, find) for kind, find in kinds.items())


def each_of(places: Places[Place], how: Callable[[RightProgram, Place], Iterable[Edit]]) -> Find:
    """Return the edits that `how` makes of every place."""

    def find(subject: RightProgram) -> Iterator[Edit]:
        for place in places(subject):
            yield from how(subject, place)

    return find


def with_value(places: Places[Statement], how: Callable[[RightProgram, Statement], Iterable[str]]) -> Find:
    """Return one edit for each expression that `how` puts in the place of a statement's call."""
    return each_of(places, lambda subject, statement: map(statement.becomes, how(subject, statement)))
