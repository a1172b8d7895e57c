"""Mutants of a program: a few changed lines, and the change that made them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from difflib import SequenceMatcher

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Edit:
    """A changed line of a role file, or several that follow each other.

    line    the first of them, counted from 1
    before  their text
    after   the text instead: as many lines as it takes, or none
    """

    file: str
    line: int
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {_shown(self.before)} -> {_shown(self.after)}"

    @property
    def places(self) -> frozenset[tuple[str, int]]:
        """The file and number of each line that it changes."""
        return frozenset((self.file, self.line + more) for more in range(self.before.count("\n") + 1))


Edits = tuple[Edit, ...]
State = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class StateEdit:
    """A change of the tensors in a program's folder.

    kind   a key of `STATE_EDITS`
    name   of the tensor
    other  a second tensor, where the edit takes one
    """

    kind: str
    name: str
    other: str = ""

    def __str__(self) -> str:
        return f"state.pt: {self.kind}: " + " and ".join(f"`{n}`" for n in (self.name, self.other) if n)

    def apply(self, state: State) -> dict[str, Tensor]:
        """Return the tensors with the edit."""
        return {**state, **STATE_EDITS[self.kind](state, self.name, self.other)}


def _one_element(state: State, name: str, _: str) -> State:
    changed = state[name].detach().clone()
    changed.view(-1)[-1] += 1
    return {name: changed}


STATE_EDITS: Mapping[str, Callable[[State, str, str], State]] = {
    "exchanged": lambda s, a, b: {a: s[b], b: s[a]},
    "twice": lambda s, a, b: {a: s[b]},
    "one element changed": _one_element,
    "twice as large": lambda s, a, _: {a: 2 * s[a].detach()},
    "rows turned": lambda s, a, _: {a: s[a].detach().roll(1, 0)},
    "transposed": lambda s, a, _: {a: s[a].detach().t().contiguous()},
    "rounded": lambda s, a, _: {a: s[a].detach().bfloat16().to(s[a].dtype)},
    "of another dtype": lambda s, a, _: {a: s[a].detach().bfloat16()},
    "of another shape": lambda s, a, _: {a: s[a].detach().unsqueeze(0)},
}


@dataclass(frozen=True, slots=True)
class Mutant:
    """One mutant of a program.

    family   group of the mutation operator
    kind     name of the mutation operator
    edits    lines that differ from the right program
    changed  file -> its whole text, for each file that differs
    runtime  name of a patch of the runtime, where the text is right and the runtime is wrong
    state    change of the tensors that the program starts from
    """

    model: str
    plan: str
    family: str
    kind: str
    edits: Edits
    changed: Mapping[str, str]
    runtime: str = ""
    state: StateEdit | None = None

    @property
    def place(self) -> str:
        """file:line of the first edit."""
        return f"{self.edits[0].file}:{self.edits[0].line}" if self.edits else self.runtime or "state.pt"

    @property
    def told(self) -> str:
        """Describe the first change."""
        return str(self.edits[0]) if self.edits else self.runtime or str(self.state)

    def sources(self, right: Mapping[str, str]) -> dict[str, str]:
        """Return the whole program: the right one with the changed files in it."""
        return {**right, **self.changed}


def apply_edits(sources: Mapping[str, str], edits: Edits) -> dict[str, str]:
    """Return the changed files. Raises ValueError where a line is not what the edit says."""
    changed: dict[str, list[str | None]] = {}  # None: the line is a part of the one before
    for edit in edits:
        lines = changed.setdefault(edit.file, [*sources[edit.file].split("\n")])
        before = edit.before.split("\n")
        there = slice(edit.line - 1, edit.line - 1 + len(before))
        if lines[there] != before:
            raise ValueError(f"{edit.file}:{edit.line} is not {edit.before!r}")
        lines[there] = [edit.after, *[None] * (len(before) - 1)]
    return {file: "\n".join(line for line in lines if line is not None) for file, lines in changed.items()}


def edits_between(before: Mapping[str, str], after: Mapping[str, str]) -> Edits:
    """Return the edits that lead from one program to another, block by block."""
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
