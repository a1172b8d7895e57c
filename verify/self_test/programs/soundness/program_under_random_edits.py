"""A program under random edits: its text so far, and where the next edit goes."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random

from nnscaler.layout import MICRO, SLICE
from verify.self_test.programs.mutants.editable_program_and_edits import (
    DeclarationEntry,
    RightProgram,
    Statement,
    names_in,
    read_role_source,
)
from verify.self_test.programs.mutants.mutant import Edits, apply_edits

NEAR = 0.75  # of the edits are where the reader found something, if it found something

STORED = ("parameters", "frozen", "buffers", "constants")
FED = ("inputs", "prepare_inputs")


@dataclass(frozen=True)
class Draft:
    """A program while it is edited.

    lines  (file, line) in which the reader of the last text found something; empty for a text that it has not seen
    names  variables about which it found something
    said   its findings
    """

    subject: RightProgram
    sources: Mapping[str, str]
    lines: frozenset[tuple[str, int]] = frozenset()
    names: frozenset[str] = frozenset()
    said: str = ""

    @property
    def in_time(self) -> dict[str, int]:
        """The axes in time and their sizes: micro-batches, and slices where there are some."""
        return dict(zip((MICRO, SLICE), self.subject.program.plan.times, strict=False))

    def changed(self, edits: Edits) -> dict[str, str]:
        """Return the whole program with the edits. Raises ValueError where two of them change one line."""
        return {**self.sources, **apply_edits(self.sources, edits)}

    def next(self, sources: Mapping[str, str], lines: frozenset[tuple[str, int]], said: str) -> Draft:
        """Return the edited program, and what the reader says of it.

        Raises SyntaxError and ValueError as reading does.
        """
        known = {role.file: role for role in self.subject.roles}
        roles = tuple(
            known[file] if text == self.sources[file] else read_role_source(file, text)
            for file, text in sources.items()
        )
        near = {n for r in roles for s in r.statements if (r.file, s.line) in lines for n in names_in(s.text)}
        names = frozenset(near | set(re.findall(r"`([\w.]+)`", said)))
        return Draft(replace(self.subject, roles=roles), sources, lines, names, said)

    def near(self, place: Statement | DeclarationEntry) -> bool:
        """Return whether the reader found something at this place, or in a variable that it makes or holds."""
        if (place.file, place.line) in self.lines:
            return True
        made = place.targets if isinstance(place, Statement) else (place.name, place.arguments[0].strip("\"'"))
        return not self.names.isdisjoint(made)

    def pick(
        self, chance: Random, places: Sequence[Statement] | Sequence[DeclarationEntry]
    ) -> Statement | DeclarationEntry | None:
        """Return one of the places."""
        close = [p for p in places if self.near(p)] if self.lines or self.names else []
        chosen = close if close and chance.random() < NEAR else places
        return chance.choice(chosen) if chosen else None

    def statement(self, chance: Random, prefix: str = "") -> Statement | None:
        found = self.pick(chance, list(self.subject.statements(prefix)))
        return found if isinstance(found, Statement) else None

    def entry(self, chance: Random, *sections: str) -> DeclarationEntry | None:
        found = self.pick(chance, list(self.subject.entries(*sections)))
        return found if isinstance(found, DeclarationEntry) else None

    def everywhere(self, chance: Random, entry: DeclarationEntry, old: str, new: str) -> Edits:
        """Return the entry with a part replaced, mostly also where another stage says the same of the same tensor."""
        alike = [
            e
            for e in self.subject.entries(entry.section)
            if e.arguments == entry.arguments and old in e.text and (e.file, e.line) != (entry.file, entry.line)
        ]
        chosen = (entry, *alike) if chance.random() < 0.8 else (entry,)
        return tuple(e.swapped(old, new) for e in chosen)


Propose = Callable[[Draft, Random], Edits | None]
