"""Wrong cuts of tensors (sections, outer sizes, unequal sizes), wrong copies of tied parameters, wrong constants, and
wrong tensors in a program's folder."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import permutations

from torch import Tensor

from nnscaler.layout import MICRO
from nnscaler.runtime.tensor_bits_and_differences import same_bits
from verify.self_test.programs.mutants.editable_program_and_edits import (
    DeclarationEntry,
    Find,
    RightProgram,
    Statement,
    each_of,
    operators,
)
from verify.self_test.programs.mutants.mutant import STATE_EDITS, Edit, Edits, StateEdit

Numbers = tuple[int, ...]
_JOINING = ("all_gather", "all_gather_replicated", "place")


@dataclass(frozen=True, slots=True)
class DeclaredCut:
    """A cut of a dim of `size` into `parts`, as a declaration or a conversion says it."""

    place: DeclarationEntry | Statement
    text: str  # of a state; empty in a conversion
    size: int
    parts: int
    dim: int
    outer: int = 1
    sections: Numbers = ()
    sizes: Numbers = ()

    @property
    def plain(self) -> bool:
        return self.outer == 1 and not self.sections and not self.sizes

    def becomes(self, outer: int = 1, sections: Numbers = (), sizes: Numbers = ()) -> Edit:
        """Another cut of the same dim."""
        said: dict[str, str | None] = {
            "outer": str(outer) if outer > 1 else None,
            "sections": repr(sections) if sections else None,
            "sizes": repr(sizes) if sizes else None,
        }
        if isinstance(self.place, Statement):
            return self.place.becomes(self.place.with_keywords(**said).call)
        more = "".join(f", {name}={value}" for name, value in said.items() if value)
        return self.place.swapped(self.text, f"Sharded({self.dim}{more})")


def cuts(subject: RightProgram) -> Iterator[DeclaredCut]:
    """Every cut of a stored tensor, of an input that another one has to fit, and of a conversion that puts shards
    together. One that makes shards may make others: what follows may follow them."""
    tensors = subject.program.graph.tensors
    stored = {fqn: t for t in tensors.values() for fqn in t.fqns}
    fed = list(subject.entries("inputs"))
    for entry in (*subject.entries("parameters", "frozen", "buffers", "constants"), *fed):
        name = str(ast.literal_eval(entry.arguments[0]))
        tensor = tensors.get(name) if entry.section == "inputs" else stored.get(name)
        for axis, state in _states(entry):
            alone = sum(e.stage == entry.stage and f'"{axis}": Sharded' in e.states for e in fed) < 2
            if tensor is None or (entry.section == "inputs" and alone):
                continue  # the rows of one input may come in any order
            parts = subject.program.plan.micro_batches if axis == MICRO else subject.axes[entry.stage][axis]
            given = {str(k.arg): ast.literal_eval(k.value) for k in state.keywords}
            dim = ast.literal_eval(state.args[0])
            yield DeclaredCut(entry, ast.unparse(state), tensor.shape[dim], parts, dim, **given)
    for statement in subject.statements("comm."):
        held, dim = subject.tensor(statement.stage, statement.targets[0]), statement.keyword("dim")
        if held is not None and dim is not None and statement.callee.removeprefix("comm.") in _JOINING:
            given = {n: ast.literal_eval(v) for n, v in statement.keywords if n != "dim"}
            parts = subject.axes[statement.stage].get(statement.axis, 1)
            yield DeclaredCut(statement, "", held.shape[int(dim)], parts, int(dim), **given)


def _states(entry: DeclarationEntry) -> Iterator[tuple[str, ast.Call]]:
    for axis, state in entry.state_nodes.items():
        if isinstance(state, ast.Call) and ast.unparse(state.func) == "Sharded":
            yield axis, state


def _per_cut(wrong: Callable[[DeclaredCut], Iterator[Edit]]) -> Find:
    return each_of(cuts, lambda _, cut: wrong(cut))


def _other_orders(numbers: Numbers) -> Iterator[Numbers]:
    yield from (order for order in dict.fromkeys(permutations(numbers)) if order != numbers)


def _sections_turned(cut: DeclaredCut) -> Iterator[Edit]:
    yield from (cut.becomes(sections=order) for order in _other_orders(cut.sections))


def _other_sections(cut: DeclaredCut) -> Iterator[Edit]:
    """One section is a unit longer, and another one shorter."""
    for one in range(len(cut.sections)):
        for other in range(len(cut.sections)):
            if one != other and cut.sections[other] > cut.parts:
                moved = {one: cut.parts, other: -cut.parts}
                yield cut.becomes(sections=tuple(n + moved.get(i, 0) for i, n in enumerate(cut.sections)))


def _not_said(cut: DeclaredCut) -> Iterator[Edit]:
    if not cut.plain:
        yield cut.becomes()


def _sections_for_plain(cut: DeclaredCut) -> Iterator[Edit]:
    if cut.plain and cut.size % cut.parts == 0:
        for first in range(cut.parts, cut.size, cut.parts):
            yield cut.becomes(sections=(first, cut.size - first))


def _other_outer(cut: DeclaredCut) -> Iterator[Edit]:
    if cut.sizes or cut.size == 0:
        return
    now = 0 if cut.sections else cut.outer
    for outer in range(2, cut.size // cut.parts + 1):
        if outer != now and cut.size % (outer * cut.parts) == 0:
            yield cut.becomes(outer=outer)


def _sizes_turned(cut: DeclaredCut) -> Iterator[Edit]:
    yield from (cut.becomes(outer=cut.outer, sizes=order) for order in _other_orders(cut.sizes))


def _other_sizes(cut: DeclaredCut) -> Iterator[Edit]:
    """One rank has one more, and another one less."""
    now = cut.sizes or ((cut.size // cut.parts,) * cut.parts if cut.plain and cut.size % cut.parts == 0 else ())
    for one, other in permutations(range(len(now)), 2):
        changed = tuple(n + (i == one) - (i == other) for i, n in enumerate(now))
        if min(changed) > 0 and sorted(changed) != sorted(now):
            yield cut.becomes(outer=cut.outer, sizes=changed)


# -- copies -----------------------------------------------------------------------------------------------------------

Copies = tuple[Numbers, ...]


def _copies(change: Callable[[Copies, int], Iterator[Copies]]) -> Find:
    """`change` yields other copies; it is given those that are declared, and the number of ranks."""

    def find(subject: RightProgram) -> Iterator[Edit]:
        for entry in subject.entries("parameters"):
            text = entry.keyword("copies")
            if text:
                copies: Copies = ast.literal_eval(text)
                for other in change(copies, subject.program.plan.ranks):
                    yield entry.swapped(f"copies={text}", f"copies={other!r}")

    return find


def _groups_turned(copies: Copies, _: int) -> Iterator[Copies]:
    yield from (order for order in permutations(copies) if order != copies)


def _ranks_turned(copies: Copies, _: int) -> Iterator[Copies]:
    for place, group in enumerate(copies):
        for order in permutations(group):
            if order != group:
                yield (*copies[:place], order, *copies[place + 1 :])


def _one_copy_less(copies: Copies, _: int) -> Iterator[Copies]:
    for place in range(len(copies)):
        yield copies[:place] + copies[place + 1 :]


def _other_rank(copies: Copies, ranks: int) -> Iterator[Copies]:
    for place, group in enumerate(copies):
        for position in range(len(group)):
            for rank in range(ranks):
                if rank != group[position]:
                    changed = (*group[:position], rank, *group[position + 1 :])
                    yield (*copies[:place], changed, *copies[place + 1 :])


def _twice(copies: Copies, _: int) -> Iterator[Copies]:
    for group in copies:
        yield (*copies, group)


def _untold(subject: RightProgram) -> Iterator[Edits]:
    """Copies of a parameter that one stage alone holds."""
    entries = list(subject.entries("parameters"))
    for entry in entries:
        if not entry.keyword("copies") and "used=False" not in entry.text:
            ranks = next((e.keyword("copies") for e in entries if e.keyword("copies")), "")
            if ranks:
                yield (entry.with_more(f"copies={ranks}"),)


# -- buffers and constants --------------------------------------------------------------------------------------------


def _constants_exchanged(subject: RightProgram) -> Iterator[Edits]:
    """Two buffers, or two constants, of one shape change places."""
    for section in ("buffers", "constants"):
        for one, two in permutations(subject.entries(section), 2):
            if one.line < two.line and one.exchangeable(two):
                yield one.exchanged(two)


def _constant_for_another(subject: RightProgram) -> Iterator[Edit]:
    """One holds the values of another of its shape."""
    for section in ("buffers", "constants"):
        for one, two in permutations(subject.entries(section), 2):
            if one.stage == two.stage and one.arguments[1:] == two.arguments[1:]:
                yield one.named(two)


def _constant_cut(subject: RightProgram) -> Iterator[Edit]:
    """A rank holds its shard of one that every rank needs whole."""
    for entry in subject.entries("buffers", "constants"):
        shape = ast.literal_eval(entry.arguments[1])
        for axis, parts in subject.axes[entry.stage].items():
            for dim, size in enumerate(shape):
                if f'"{axis}"' not in entry.states and size % parts == 0:
                    yield entry.with_state(axis, f"Sharded({dim})")


def _updated(subject: RightProgram) -> Iterator[Edit]:
    """A new value goes to another buffer, or to none."""
    for role in subject.roles:
        for number, line in enumerate(role.lines, 1):
            if not line.strip().startswith("updates = {"):
                continue
            indent = line[: len(line) - len(line.lstrip())]
            updates: Mapping[str, str] = ast.literal_eval(line.strip().removeprefix("updates = "))
            keys = list(updates)
            for left_out in keys:
                kept = {k: v for k, v in updates.items() if k != left_out}
                yield Edit(role.file, number, line, f"{indent}updates = {kept!r}")
            for one, two in permutations(keys, 2):
                turned = {**updates, one: updates[two], two: updates[one]}
                yield Edit(role.file, number, line, f"{indent}updates = {turned!r}")


# -- tensors of the folder --------------------------------------------------------------------------------------------


def state_edits(subject: RightProgram) -> Iterator[StateEdit]:
    """Other values, dtypes and shapes of what the program starts from, none of which leaves it as it is."""
    state = {name: tensor.detach() for name, tensor in subject.program.state.items()}
    for kind in STATE_EDITS:
        several = kind in ("exchanged", "twice")
        places = permutations(state, 2) if several else ((name, "") for name in state)
        for name, other in places:
            edit = StateEdit(kind, name, other)
            if _fits(edit, state) and not all(same_bits(edit.apply(state)[n], state[n]) for n in state):
                yield edit


def _fits(edit: StateEdit, state: Mapping[str, Tensor]) -> bool:
    tensor = state[edit.name]
    if edit.other:
        return tensor.shape == state[edit.other].shape and tensor.dtype == state[edit.other].dtype
    square = tensor.dim() == 2 and tensor.shape[0] == tensor.shape[1]
    floating = tensor.is_floating_point()
    wants = {"transposed": square, "rows turned": tensor.dim() > 0, "rounded": floating, "of another dtype": floating}
    return wants.get(edit.kind, True)


LAYOUT, COPIES, CONSTANTS = "states with sections, outer, sizes", "copies", "constants"
STATE = "state of the folder"
FAMILIES: Mapping[str, Mapping[str, Find]] = {
    LAYOUT: {
        "sections in another order": _per_cut(_sections_turned),
        "other sections": _per_cut(_other_sections),
        "sections, outer or sizes not said": _per_cut(_not_said),
        "sections for a contiguous cut": _per_cut(_sections_for_plain),
        "another outer": _per_cut(_other_outer),
        "sizes in another order": _per_cut(_sizes_turned),
        "other sizes": _per_cut(_other_sizes),
    },
    COPIES: {
        "copies in another order": _copies(_groups_turned),
        "ranks of a copy in another order": _copies(_ranks_turned),
        "one copy less": _copies(_one_copy_less),
        "another rank in a copy": _copies(_other_rank),
        "a copy twice": _copies(_twice),
        "copies of what is not tied": _untold,
    },
    CONSTANTS: {
        "constants exchanged": _constants_exchanged,
        "a constant for another": _constant_for_another,
        "a constant cut": _constant_cut,
        "another buffer updated": _updated,
    },
}
OPERATORS = tuple(row for family, kinds in FAMILIES.items() for row in operators(family, kinds))
