"""A mutation operator: a way to make a right program wrong, and where in a program it can be applied."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from verify.self_test.plans.mutant import Edit, Edits
from verify.self_test.plans.role_source import Subject

Find = Callable[[Subject], Iterator[Edits] | Iterator[Edit]]


@dataclass(frozen=True, slots=True)
class MutationOperator:
    """`find` yields every place where it applies, and does not where the result would mean the same."""

    family: str
    kind: str
    find: Find

    def places(self, subject: Subject) -> list[Edits]:
        """What it can do to a program: a tuple of edits each, none of which changes nothing."""
        found: list[Edits] = []
        for made in self.find(subject):
            edits = (made,) if isinstance(made, Edit) else made
            if edits and all(e.before != e.after for e in edits):
                found.append(edits)
        return found
