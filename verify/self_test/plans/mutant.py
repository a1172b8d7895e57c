"""What a mutant of a program is: a few changed lines, and what was changed to get them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import SequenceMatcher


@dataclass(frozen=True, slots=True)
class Edit:
    """`line` (from 1) of a role file: `before` is its text, `after` what stands there instead (several lines, or
    none)."""

    file: str
    line: int
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {_shown(self.before)} -> {_shown(self.after)}"


Edits = tuple[Edit, ...]


@dataclass(frozen=True, slots=True)
class Mutant:
    """`kind`: the mutation operator's name, `family` its group. `edits`: what differs from the right program's text;
    `changed` has the whole text of each file that differs. `runtime`: the name of a patch of the runtime, where the
    text is right and what runs it is wrong."""

    model: str
    plan: str
    family: str
    kind: str
    edits: Edits
    changed: Mapping[str, str]
    runtime: str = ""

    @property
    def place(self) -> str:
        """file:line of the first edit."""
        return f"{self.edits[0].file}:{self.edits[0].line}" if self.edits else self.runtime

    def sources(self, right: Mapping[str, str]) -> dict[str, str]:
        """The whole program: the right one with the changed files in it."""
        return {**right, **self.changed}


def apply_edits(sources: Mapping[str, str], edits: Edits) -> dict[str, str]:
    """The changed files. Raises ValueError where a line is not what the edit says."""
    changed: dict[str, list[str]] = {}
    for edit in edits:
        lines = changed.setdefault(edit.file, sources[edit.file].split("\n"))
        if lines[edit.line - 1] != edit.before:
            raise ValueError(f"{edit.file}:{edit.line} is not {edit.before!r}")
        lines[edit.line - 1] = edit.after
    return {file: "\n".join(lines) for file, lines in changed.items()}


def edits_between(before: Mapping[str, str], after: Mapping[str, str]) -> Edits:
    """The edits that lead from one program to another, block by block."""
    return tuple(edit for file in after for edit in _between(file, before.get(file, ""), after[file]))


def _between(file: str, before: str, after: str) -> Iterator[Edit]:
    old, new = before.split("\n"), after.split("\n")
    for tag, start, end, first, last in SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if tag != "equal":
            yield Edit(file, start + 1, "\n".join(old[start:end]), "\n".join(new[first:last]))


def _shown(text: str) -> str:
    first, _, rest = text.strip().partition("\n")
    code = first.partition("  # ")[0]
    return f"`{code[:110]}{' ...' if len(code) > 110 or rest else ''}`"
