"""Random edits of declarations: states, sums, copies, messages, names.

A mutation operator plants a bug, and knows which. These edits know nothing: most are wrong, some only spell the same
program otherwise, and which is which must come out of reading the text. Where a declaration stands in several stages
(a tied parameter), an edit mostly changes all of them: programs that agree with themselves are harder to refute.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from random import Random

from nnscaler.layout import MICRO
from verify.self_test.programs.mutants.editable_program_and_edits import DeclarationEntry
from verify.self_test.programs.mutants.mutant import Edit, Edits
from verify.self_test.programs.soundness.program_under_random_edits import FED, STORED, Draft, Propose


def _parts(draft: Draft, entry: DeclarationEntry, axis: str) -> int:
    return {**draft.subject.axes[entry.stage], **draft.in_time}[axis]


def _shape(draft: Draft, entry: DeclarationEntry) -> tuple[int, ...]:
    if entry.section in STORED:
        return tuple(ast.literal_eval(entry.arguments[1]))
    tensor = draft.subject.program.graph.tensors.get(ast.literal_eval(entry.arguments[0]))
    return () if tensor is None else tensor.shape


def _cut(chance: Random, size: int, parts: int, how: str) -> str:
    """The keywords of a cut of a dim of this size."""
    if how == "outer":
        outers = [n for n in range(2, size + 1) if size % (n * parts) == 0]
        return f", outer={chance.choice(outers or [2])}"
    if how == "sections":
        unit = parts if size % parts == 0 and size >= 2 * parts else 1
        pieces = _sizes(chance, size // unit, chance.choice((2, 2, 3)))
        return f", sections=({', '.join(str(p * unit) for p in pieces)})"
    if how == "sizes":
        return f", sizes=({', '.join(map(str, _sizes(chance, size, parts)))})"
    return ""


def _sizes(chance: Random, size: int, count: int) -> list[int]:
    """So many numbers that add up to `size`, none of them 0 if that can be."""
    count = max(1, min(count, size))
    cuts = sorted(chance.sample(range(1, size), count - 1))
    return [b - a for a, b in zip([0, *cuts], [*cuts, size], strict=True)]


def _state(chance: Random, shape: tuple[int, ...], parts: int, how: str = "") -> str:
    """A state for an axis; empty for the one that is not written."""
    if not shape:
        return chance.choice(("", "Partial()", "Replicated()", "Invariant()", 'Partial("max")'))
    how = how or chance.choice(("whole", "plain", "plain", "outer", "sections", "sections", "sizes", "odd"))
    if how == "whole":
        return ""
    if how == "odd":
        return chance.choice(("Partial()", "Replicated()", "Invariant()", f"Sharded({len(shape)})"))
    least = 2 * parts if how in ("outer", "sections") else parts
    dims = [d for d, size in enumerate(shape) if size >= least and (how == "sizes" or size % parts == 0)]
    dim = chance.choice(dims if dims and chance.random() < 0.9 else range(len(shape)))
    return f"Sharded({dim}{_cut(chance, shape[dim], parts, how)})"


def _written(states: Mapping[str, str]) -> str:
    return "{" + ", ".join(f'"{axis}": {state}' for axis, state in states.items() if state) + "}"


def _with_state(how: str) -> Propose:
    """Another state of one axis of a stored tensor, an input or the loss."""

    def propose(draft: Draft, chance: Random) -> Edits | None:
        entry = draft.entry(chance, *STORED, *FED, *(["loss"] if how in ("", "moved") else []))
        if entry is None or "{" not in entry.text:
            return None
        states = {axis: ast.unparse(state) for axis, state in entry.state_nodes.items()}
        axes = [*draft.subject.axes[entry.stage], *(draft.in_time if entry.section in ("inputs", "loss") else [])]
        if not axes:
            return None
        axis = chance.choice(axes)
        shape = () if entry.section == "loss" else _shape(draft, entry)
        if how == "moved":
            other = chance.choice(axes)
            states[axis], states[other] = states.get(other, ""), states.get(axis, "")
        else:
            states[axis] = _state(chance, shape, _parts(draft, entry, axis), how)
        return draft.everywhere(chance, entry, entry.states, _written(states))

    return propose


def _reduce(draft: Draft, chance: Random) -> Edits | None:
    """One axis more or less in the sum of a gradient, or the axes in another order."""
    entry = draft.entry(chance, "parameters")
    if entry is None:
        return None
    reduce = entry.keyword("reduce")
    names = re.findall(r'"(\w+)"', reduce)
    axis = chance.choice([*draft.subject.axes[entry.stage], MICRO])
    after = [n for n in names if n != axis] if axis in names else [*names, axis]
    if len(names) > 1 and chance.random() < 0.2:
        after = names[::-1]
    text = "reduce=(" + "".join(f'"{n}", ' for n in after).rstrip(" ") + ")"
    if reduce:
        return draft.everywhere(chance, entry, f"reduce={reduce}", text)
    return draft.everywhere(chance, entry, f"{entry.states}", f"{entry.states}, {text}")


def _ranks(draft: Draft, chance: Random) -> Edits | None:
    """Copies or peers in another order, or other ones."""
    entries = [e for e in draft.subject.entries("parameters", "sends", "receives") if _groups(e)]
    entry = draft.pick(chance, entries)
    if not isinstance(entry, DeclarationEntry):
        return None
    keyword = "copies" if entry.section == "parameters" else "peers"
    old = entry.keyword(keyword)
    value = ast.literal_eval(old)
    groups = [list(g) for g in value] if keyword == "copies" else [list(value)]
    group = chance.choice(groups)
    match chance.choice(("order", "groups", "turn", "one", "drop")):
        case "groups":
            chance.shuffle(groups)
        case "turn":
            group.append(group.pop(0))
        case "one":
            group[chance.randrange(len(group))] = chance.randrange(draft.subject.program.plan.ranks)
        case "drop":
            groups = groups[1:]
        case _:
            chance.shuffle(group)
    new = repr(tuple(map(tuple, groups))) if keyword == "copies" else repr(tuple(groups[0] if groups else ()))
    return draft.everywhere(chance, entry, f"{keyword}={old}", f"{keyword}={new}")


def _groups(entry: DeclarationEntry) -> bool:
    return bool(entry.keyword("copies") or entry.keyword("peers"))


def _exchanged_names(draft: Draft, chance: Random) -> Edits | None:
    """Two stored tensors, or two inputs, change places."""
    section = chance.choice((*STORED, *FED))
    entries = list(draft.subject.entries(section))
    if len(entries) < 2:
        return None
    one, two = chance.sample(entries, 2)
    return one.exchanged(two)


def _turned_declarations(draft: Draft, chance: Random) -> Edits | None:
    """Two declarations change their lines: nothing else changes."""
    entries = list(draft.subject.entries(*STORED, *FED, "sends", "receives"))
    pairs = [
        (a, b)
        for a in entries
        for b in entries
        if (a.file, a.stage, a.section) == (b.file, b.stage, b.section) and a.line < b.line
    ]
    if not pairs:
        return None
    one, two = chance.choice(pairs)
    return (Edit(one.file, one.line, one.text, two.text), Edit(two.file, two.line, two.text, one.text))


DECLARED: Mapping[str, Propose] = {
    "state": _with_state(""),
    "state with sections": _with_state("sections"),
    "state with outer": _with_state("outer"),
    "state with sizes": _with_state("sizes"),
    "states of two axes": _with_state("moved"),
    "reduce": _reduce,
    "copies and peers": _ranks,
    "names exchanged": _exchanged_names,
    "declarations turned": _turned_declarations,
}
