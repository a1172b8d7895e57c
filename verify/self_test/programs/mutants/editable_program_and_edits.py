"""The text of a role program as mutation operators see it: statements and declarations, each on one line."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from nnscaler.codegen.compiled_program import Program
from nnscaler.instructions import read_instruction
from nnscaler.ir.graph import LogicalTensor
from verify.self_test.programs.mutants.mutant import Edit, Edits


@dataclass(frozen=True, slots=True)
class Statement:
    """`targets = callee(arguments)` in a stage's method. Arguments are source text."""

    file: str
    line: int
    text: str
    stage: int
    method: str
    targets: tuple[str, ...]
    callee: str
    arguments: tuple[str, ...]
    keywords: tuple[tuple[str, str], ...]
    without_gradient: bool

    @property
    def indent(self) -> str:
        return self.text[: len(self.text) - len(self.text.lstrip())]

    @property
    def call(self) -> str:
        inside = [*self.arguments, *(f"{name}={value}" for name, value in self.keywords)]
        return f"{self.callee}({', '.join(inside)})"

    @property
    def axis(self) -> str:
        """The axis of a communication, `tp` of `self.tp`."""
        return self.arguments[1].removeprefix("self.")

    def keyword(self, name: str) -> str | None:
        return dict(self.keywords).get(name)

    def with_keywords(self, **changed: str | None) -> Statement:
        """Return the statement with keywords set, or left out (None)."""
        merged = {**dict(self.keywords), **changed}
        return replace(self, keywords=tuple((n, v) for n, v in merged.items() if v is not None))

    def with_argument(self, position: int, value: str) -> Statement:
        changed = (*self.arguments[:position], value, *self.arguments[position + 1 :])
        return replace(self, arguments=changed)

    def becomes(self, *values: str) -> Edit:
        """`targets = value`; further values are further lines."""
        lines = [f"{self.indent}{', '.join(self.targets)} = {values[0]}"]
        lines += [f"{self.indent}{more}" for more in values[1:]]
        return Edit(self.file, self.line, self.text, "\n".join(lines))

    def becomes_text(self, text: str) -> Edit:
        return Edit(self.file, self.line, self.text, text)


@dataclass(frozen=True, slots=True)
class DeclarationEntry:
    """One entry of a declaration: `"attribute": Parameter(...)` of `parameters`, or the line of `loss`, `sends`."""

    file: str
    line: int
    text: str
    stage: int
    section: str
    name: str
    arguments: tuple[str, ...]
    keywords: tuple[tuple[str, str], ...]

    @property
    def states(self) -> str:
        """The layout per axis, as text."""
        found = [a for a in self.arguments if a.startswith("{")]
        return found[0] if found else "{}"

    @property
    def state_nodes(self) -> dict[str, ast.expr]:
        """Axis -> its state, parsed."""
        node = ast.parse(self.states, mode="eval").body
        if not isinstance(node, ast.Dict):
            return {}
        return {str(ast.literal_eval(k)): v for k, v in zip(node.keys, node.values, strict=True) if k is not None}

    def keyword(self, name: str) -> str:
        return dict(self.keywords).get(name, "")

    def exchangeable(self, other: DeclarationEntry) -> bool:
        """Return whether both stand in one file and differ in the name of what they hold only."""
        return (self.file, self.arguments[1:], self.keywords) == (other.file, other.arguments[1:], other.keywords)

    def named(self, other: DeclarationEntry) -> Edit:
        """Return the edit after which it holds what the other one does."""
        return self.swapped(self.arguments[0], other.arguments[0])

    def exchanged(self, other: DeclarationEntry) -> Edits:
        """Return the edits after which each holds what the other one does."""
        return self.named(other), other.named(self)

    def with_more(self, keyword: str) -> Edit:
        """Return the edit that adds a keyword."""
        return Edit(self.file, self.line, self.text, f"{self.text.rstrip().removesuffix('),')}, {keyword}),")

    def with_states(self, old: str, new: str) -> Edit:
        """Return the edit of one part of the layout."""
        return self.swapped(self.states, self.states.replace(old, new, 1))

    def without_state(self, entry: str) -> Edit:
        """Return the edit that leaves one axis out of the layout."""
        return self.swapped(self.states, without_entry(self.states, entry))

    def with_state(self, axis: str, state: str) -> Edit:
        """Return the edit that adds the state of an axis to the layout."""
        more = f'"{axis}": {state}'
        return self.swapped(self.states, f"{{{more}}}" if self.states == "{}" else f"{self.states[:-1]}, {more}}}")

    def swapped(self, old: str, new: str) -> Edit:
        """Return the line with one part of it replaced."""
        return Edit(self.file, self.line, self.text, self.text.replace(old, new, 1))


@dataclass(frozen=True, slots=True)
class Role:
    """One file: its lines, statements and declarations, and the lines of its schedule: the first, and the one after."""

    file: str
    lines: tuple[str, ...]
    statements: tuple[Statement, ...]
    entries: tuple[DeclarationEntry, ...]
    schedule: tuple[int, int]

    @property
    def written(self) -> str:
        """The text of the schedule."""
        first, end = self.schedule
        return "\n".join(self.lines[first - 1 : end - 1])

    @property
    def order(self) -> tuple[str, ...]:
        return tuple(self.written.split())

    def reordered(self, order: Sequence[str]) -> Edit:
        """Return the edit that writes this order; one that changes nothing where it is the order that is there."""
        after = self.written if tuple(order) == self.order else " ".join(order)
        return Edit(self.file, self.schedule[0], self.written, after)


@dataclass(frozen=True)
class RightProgram:
    """A right program, taken apart.

    axes       stage -> its axes
    variables  (stage, variable) -> logical tensor and text of its layout
    """

    model: str
    plan: str
    program: Program
    roles: tuple[Role, ...]
    axes: Mapping[int, Mapping[str, int]]
    variables: Mapping[tuple[int, str], tuple[LogicalTensor, str]]

    def statements(self, prefix: str = "") -> Iterator[Statement]:
        """Yield every statement that calls something with this prefix."""
        for role in self.roles:
            yield from (s for s in role.statements if s.callee.startswith(prefix))

    def entries(self, *sections: str) -> Iterator[DeclarationEntry]:
        for role in self.roles:
            yield from (e for e in role.entries if e.section in sections)

    def role_of(self, place: Statement) -> Role:
        return next(r for r in self.roles if r.file == place.file)

    def made_before(self, place: Statement) -> list[str]:
        """Return the variables of earlier lines of the same method, in their order."""
        lines = self.role_of(place).statements
        return [t for s in lines if s.line < place.line and s.method == place.method for t in s.targets]

    def tensor(self, stage: int, variable: str) -> LogicalTensor | None:
        found = self.variables.get((stage, variable))
        return found[0] if found else None

    def layout(self, stage: int, variable: str) -> str:
        return self.variables[stage, variable][1]

    def trained(self, statement: Statement) -> bool:
        """Return whether a gradient flows through the statement's first result, a floating-point tensor."""
        tensor = self.tensor(statement.stage, statement.targets[0])
        flows = tensor is not None and tensor.needs_grad and not statement.without_gradient
        return flows and self.runs_backward(statement.stage)

    def runs_backward(self, stage: int) -> bool:
        """Return whether the schedule has a backward of the stage."""
        return any(i[0] != "F" and i[1:].split(".")[0] == str(stage) for role in self.roles for i in role.order)

    def used_after(self, statement: Statement, variable: str) -> bool:
        """Return whether a later line of the method reads the variable."""
        later = (
            s for s in self.role_of(statement).statements if s.line > statement.line and s.stage == statement.stage
        )
        return any(variable in names_in(" ".join((*s.arguments, *(v for _, v in s.keywords)))) for s in later)


def without_entry(states: str, entry: str) -> str:
    """Return the text of a dict of states without one entry."""
    return states.replace(entry, "").replace("{, ", "{").replace(", }", "}").replace(", , ", ", ")


def micro_of(word: str) -> int:
    """Return the micro-batch of an instruction."""
    read = read_instruction(word)
    assert read is not None, "the words of an order are instructions"
    return read.micro


def names_in(source: str) -> frozenset[str]:
    """Return the words of a piece of Python."""
    word = "".join(c if c.isalnum() or c == "_" else " " for c in source)
    return frozenset(word.split())


def take_apart(model: str, plan: str, program: Program) -> RightProgram:
    """Read every role of a program."""
    roles = tuple(read_role_source(file, text) for file, text in program.sources.items())
    axes: dict[int, Mapping[str, int]] = {}
    for text in program.sources.values():
        axes.update(_axes(text))
    variables = {
        (stage, variable): (program.graph.tensors[tensor], layout)
        for stage, held in program.manifest.tensors.items()
        for variable, (tensor, layout) in held.items()
        if tensor in program.graph.tensors
    }
    return RightProgram(model, plan, program, roles, axes, variables)


def _axes(text: str) -> Iterator[tuple[int, Mapping[str, int]]]:
    for stage in _stages(ast.parse(text)):
        values = {
            target.id: node.value
            for node in stage.body
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        yield ast.literal_eval(values["index"]), ast.literal_eval(values["axes"])


def _stages(tree: ast.Module) -> Iterator[ast.ClassDef]:
    return (node for node in tree.body if isinstance(node, ast.ClassDef))


def read_role_source(file: str, text: str) -> Role:
    """Return the statements and declarations of one file. Raises SyntaxError, ValueError where it is no role."""
    tree = ast.parse(text)
    lines = tuple(text.split("\n"))
    statements: list[Statement] = []
    entries: list[DeclarationEntry] = []
    for stage in _stages(tree):
        index = int(stage.name.removeprefix("Stage"))
        for node in stage.body:
            if isinstance(node, ast.FunctionDef):
                statements += _statements(file, lines, index, node)
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                entries += _entries(file, lines, index, node.targets[0].id, node.value)
    first = next(i for i, line in enumerate(lines, 1) if line.startswith("SCHEDULE")) + 1
    end = lines.index('"""', first) + 1
    return Role(file, lines, tuple(sorted(statements, key=lambda s: s.line)), tuple(entries), (first, end))


def _source(lines: Sequence[str], node: ast.expr) -> str:
    """Return the text of a node that stands on one line."""
    return lines[node.lineno - 1].encode()[node.col_offset : node.end_col_offset].decode()


def _statements(file: str, lines: tuple[str, ...], stage: int, method: ast.FunctionDef) -> Iterator[Statement]:
    quiet = {n.lineno for w in ast.walk(method) if isinstance(w, ast.With) for n in w.body}
    for node in ast.walk(method):
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Call) or node.lineno != node.end_lineno:
            continue
        target = node.targets[0]
        names = target.elts if isinstance(target, ast.Tuple) else [target]
        if isinstance(target, ast.Tuple) and len(names) == 1:
            continue
        if not all(isinstance(name, ast.Name) for name in names):
            continue
        yield Statement(
            file,
            node.lineno,
            lines[node.lineno - 1],
            stage,
            method.name,
            tuple(name.id for name in names if isinstance(name, ast.Name)),
            _source(lines, node.value.func),
            tuple(_source(lines, a) for a in node.value.args),
            tuple((str(k.arg), _source(lines, k.value)) for k in node.value.keywords),
            node.lineno in quiet,
        )


def _entries(
    file: str, lines: tuple[str, ...], stage: int, section: str, value: ast.expr
) -> Iterator[DeclarationEntry]:
    found: list[tuple[str, ast.expr]] = []
    if isinstance(value, ast.Dict):
        found = [(str(ast.literal_eval(k)), v) for k, v in zip(value.keys, value.values, strict=True) if k]
    elif isinstance(value, ast.Tuple):
        found = [("", element) for element in value.elts]
    elif isinstance(value, ast.Call):
        found = [("", value)]
    for name, node in found:
        if isinstance(node, ast.Call) and node.lineno == node.end_lineno:
            arguments = tuple(_source(lines, a) for a in node.args)
            keywords = tuple((str(k.arg), _source(lines, k.value)) for k in node.keywords)
            yield DeclarationEntry(file, node.lineno, lines[node.lineno - 1], stage, section, name, arguments, keywords)


# A mutation operator (DeMillo, Lipton and Sayward 1978): a way to make a right program wrong, and where it applies.
#
# One row each: family, kind, which places of a program are edited, and how one of them is. `each_of(places, how)` joins
# the last two. The level that must refute a family is in `tally`.


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
