"""A mutation operator (DeMillo, Lipton and Sayward 1978): a way to make a right program wrong, and where it applies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from verify.self_test.programs.mutants.mutant import Edit, Edits
from verify.self_test.programs.mutants.role_source import RightProgram

Find = Callable[[RightProgram], Iterator[Edits] | Iterator[Edit]]


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
