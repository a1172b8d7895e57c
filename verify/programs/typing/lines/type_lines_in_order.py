"""Type the lines of a function of a stage, one after another.

A line that is no operation of the model may still be harmless: one that only moves elements back to where they were
makes the tensor that it started from, and one that nothing reads changes nothing, if it cannot fail and has no effect.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, product

from nnscaler.ir.graph import Graph
from nnscaler.layout import Layout
from verify.programs.typing.lines.canonical_calls import NoCall, canonical
from verify.programs.typing.lines.chunked_region_border import JOIN, entered, left, number_of_pieces
from verify.programs.typing.lines.conversions import convert
from verify.programs.typing.lines.dead_code_and_undone_moves import (
    Locals,
    MovedTensor,
    as_before,
    idle_at_all_sizes,
    idle_result,
    local_tensors,
    moves,
)
from verify.programs.typing.lines.match_call import draws_numbers, with_axes
from verify.programs.typing.lines.type_operation_lines import Typed, Typer
from verify.programs.typing.lines.uniform_value_dims import NO_DIMS, equal_layouts
from verify.programs.typing.program_files.rank_program_syntax import (
    ALIAS,
    ITEM,
    Assignment,
    OutsideGrammar,
    Recomputed,
    RegionPieces,
    StageText,
    Statement,
    Variable,
    cannot_be_read,
)
from verify.programs.typing.typed_value import Axes, Held, Mistake, in_region

_MANY = 64  # layouts of uniform operands, taken together, that are looked through


@dataclass(frozen=True, slots=True)
class Noted:
    """A mistake, and the line of the text where it is."""

    stage: StageText
    number: int
    mistake: Mistake


@dataclass(frozen=True, slots=True)
class Absent:
    """A result that the model does not have, or never uses."""

    operator: str


@dataclass(frozen=True, slots=True)
class Idle:
    """The result of a line that is no operation of the model, has no effect and cannot fail.

    It is wrong as soon as anything else reads it; `noted` is what is wrong then. `local`: tensors of the ranks' shapes,
    without values.
    """

    noted: Noted
    local: Locals


@dataclass(frozen=True, slots=True)
class Parts:
    """A sequence of results that is not taken apart yet."""

    items: tuple[Held | Absent | None, ...]


Known = Held | Absent | Idle | Parts | None  # None: something was wrong before, so that nothing can be said
Scope = dict[Variable, Known]


@dataclass
class Reading:
    """The results of typing one stage."""

    stage: StageText
    axes: Axes
    mistakes: list[Noted] = field(default_factory=list)
    computed: int = 0
    operations: set[str] = field(default_factory=set)  # of the graph, that its lines are
    converted: int = 0
    drawn: dict[str, set[str]] = field(default_factory=dict)  # operation -> names it draws numbers under
    kept: dict[str, int] = field(default_factory=dict)  # name under which slices keep rows -> line
    read: set[str] = field(default_factory=set)  # stored variables that some line reads
    rows: set[str] = field(default_factory=set)  # functions of the conversion table
    returned: dict[str, Held | None] = field(default_factory=dict)
    made: dict[str, Held] = field(default_factory=dict)
    at_sample: dict[int, Assignment] = field(default_factory=dict)  # idle lines that need not be idle at other sizes

    def note(self, number: int, mistake: Mistake) -> None:
        self.mistakes.append(Noted(self.stage, number, mistake))


@dataclass
class Walk:
    """One function, or one that is recomputed, read from top to bottom.

    `moved`: how variables were made that are other views of a tensor.
    """

    reading: Reading
    graph: Graph
    typer: Typer
    scope: Scope
    moved: dict[Variable, MovedTensor] = field(default_factory=dict)

    def statements(self, statements: Sequence[Statement]) -> None:
        for statement in statements:
            match statement:
                case OutsideGrammar():
                    self.reading.note(statement.line, Mistake("program_unreadable", statement.why))
                    self.scope.update({Variable(name): None for name in statement.targets})
                case Assignment():
                    try:
                        self._line(statement)
                    except Exception as error:  # noqa: BLE001 - no text crashes the prover, and none that does passes
                        why = cannot_be_read(self.reading.stage.source, statement.number, error)
                        self._wrong(statement, Mistake("program_unreadable", why))
                case Recomputed():
                    self._recomputed(statement)
                case RegionPieces():
                    self._pieces(statement)

    def read(self, number: int, variable: Variable) -> Held | None:
        """Return the type of a tensor that is used, and note what is wrong with it."""
        known = self._known(number, variable)
        match known:
            case Absent():
                message = f"`{variable.name}` is read, and the model uses no such result of `{known.operator}`"
                self.reading.note(number, Mistake("operation_differs", message, "the wrong result is used"))
            case Parts():
                message = f"`{variable.name}` is a sequence of tensors, and is read as one tensor"
                self.reading.note(number, Mistake("program_unreadable", message))
            case Idle():
                self.reading.mistakes.append(known.noted)
                self.scope.update(
                    {v: None for v, k in self.scope.items() if isinstance(k, Idle) and k.noted is known.noted}
                )
        return known if isinstance(known, Held) else None

    def _known(self, number: int, variable: Variable) -> Known:
        if variable not in self.scope:
            self.reading.note(number, Mistake("program_unreadable", f"`{variable.name}` is read before it is made"))
            self.scope[variable] = None  # said once
        if variable.stored:
            self.reading.read.add(variable.name)
        return self.scope[variable]

    def _recomputed(self, statement: Recomputed) -> None:
        inner = Walk(self.reading, self.graph, self.typer, {v: k for v, k in self.scope.items() if v.stored})
        for name, given in statement.bound:
            inner.scope[Variable(name)] = self.read(statement.number, given)
        inner.statements(statement.lines)
        for target, result in zip(statement.targets, statement.results, strict=True):
            self._assign(target, inner.read(statement.number, result))

    def _pieces(self, statement: RegionPieces) -> None:
        """Type one piece, which stands for all: its axis has a coordinate that is known in each call."""
        axes, of = self.reading.axes, self.reading.stage.time_axes
        try:
            parts = number_of_pieces(statement, of)
        except Mistake as mistake:
            self.reading.note(statement.number, mistake)
            for target in statement.targets:
                self._assign(target, None)
            return
        position, inside = axes.names.index(statement.axis), in_region(axes, statement.axis, parts)
        region = replace(self.reading, axes=inside, computed=0, converted=0)
        inner = Walk(region, self.graph, self.typer, {})
        for variable, known in self.scope.items():
            if variable.stored:
                inner.scope[variable] = entered(known, position, self.graph) if isinstance(known, Held) else known
        for name, given in statement.bound:
            held = self.read(statement.number, given)
            inner.scope[Variable(name)] = None if held is None else entered(held, position, self.graph)
        inner.statements(statement.lines)
        for target, result, state in zip(statement.targets, statement.results, statement.states, strict=True):
            held, joined = inner.read(statement.number, result), None
            try:
                joined = None if held is None else left(held, state, position, inside, self.graph)
            except Mistake as mistake:
                self.reading.note(statement.number, mistake)
            self._assign(target, joined)
        self.reading.computed += region.computed
        self.reading.converted += region.converted
        self.reading.rows.add(JOIN)

    def _assign(self, target: str, known: Known, move: MovedTensor | None = None) -> None:
        variable = Variable(target)
        self.moved.pop(variable, None)
        self.scope[variable] = known
        if move is not None:
            self.moved[variable] = move
        if isinstance(known, Held):
            self.reading.made[target] = known

    def _line(self, line: Assignment) -> None:
        if line.function in (ALIAS, ITEM):
            self._renamed(line)
            return
        try:
            line = canonical(line, self.typer.user)
        except NoCall as error:
            message = f"`{line.function}` cannot be called as in `{line.text}`: {error}"
            self._wrong(line, Mistake("operation_differs", message))
            return
        if not line.is_conversion:
            line = with_axes(line, self.reading.axes.names)
        if line.is_conversion and not isinstance(line.kwargs.get("x"), Variable):
            self._wrong(line, Mistake("program_unreadable", f"`{line.text}` converts something else than one tensor"))
            return
        used = [line.kwargs["x"]] if line.is_conversion else line.variables
        knowns = {v: self._known(line.number, v) for v in used}
        if line.is_conversion or not _may_be_idle(knowns.values()):
            knowns = {v: self.read(line.number, v) for v in used}
            if None in knowns.values():
                for target in line.targets:
                    self._assign(target, None)
                return
        held = {v: k for v, k in knowns.items() if isinstance(k, Held)}
        try:
            if len(held) == len(knowns):
                self._computed_on_pieces(line, held)
            else:
                idle = next(k for k in knowns.values() if isinstance(k, Idle))
                self._untyped(line, knowns, idle.noted)
        except Mistake as mistake:
            self._untyped(line, knowns, Noted(self.reading.stage, line.number, mistake))

    def _wrong(self, line: Assignment, mistake: Mistake) -> None:
        self.reading.note(line.number, mistake)
        for target in line.targets:
            self._assign(target, None)

    def _renamed(self, line: Assignment) -> None:
        """`y = x`, `y = parts[1]` and `a, b = parts`."""
        variable = line.args[0]
        known, move = self._known(line.number, variable), self.moved.get(variable)
        if line.function == ALIAS and not line.sequence:
            self._assign(line.targets[0], known, move)
            return
        items = known.items if isinstance(known, Parts) else ()
        if line.function == ITEM and known is not None:
            place = line.args[1]
            items = (items[place],) if -len(items) <= place < len(items) else ()
        if known is not None and (len(items) != len(line.targets) or (line.function == ITEM and line.sequence)):
            message = f"`{line.text}` takes apart what is no sequence of that many tensors"
            self._wrong(line, Mistake("program_unreadable", message))
            return
        taken: tuple[Known, ...] = items or (None,) * len(line.targets)
        for target, item in zip(line.targets, taken, strict=True):
            self._assign(target, item)

    def _computed_on_pieces(self, line: Assignment, held: dict[Variable, Held]) -> None:
        """Type the line under all layouts that the operands may have. Raises the Mistake under the first ones."""
        first: Mistake | None = None
        for layouts in islice(product(*map(self._layouts, held.values())), _MANY):
            same = {v: replace(h, layout=layout) for (v, h), layout in zip(held.items(), layouts, strict=True)}
            try:
                self._computed(line, same)
            except Mistake as mistake:
                first = first or mistake
            else:
                return
        assert first is not None
        raise first

    def _layouts(self, held: Held) -> Iterator[Layout]:
        uniform = self.typer.uniform.get(held.tensor, NO_DIMS)
        return equal_layouts(held.layout, uniform, self.reading.axes.sizes)

    def _computed(self, line: Assignment, held: dict[Variable, Held]) -> None:
        """Type a conversion, or an operation of the model. Raises Mistake."""
        if line.is_conversion:
            if not held or len(line.targets) != 1 or line.sequence:
                raise Mistake("program_unreadable", f"`{line.text}` converts nothing into one variable")
            operand = next(iter(held.values()))
            tensor = self.graph.tensors[operand.tensor]
            uniform = self.typer.uniform.get(tensor.name, NO_DIMS)
            result = convert(line, operand, self.reading.axes, tensor, uniform)
            self._keep_rows(line, operand)
            self.reading.converted += 1
            self.reading.rows.add(line.function.removeprefix("comm."))
            self._assign(line.targets[0], result)
            return
        typed = self.typer.type_line(line, held, self.reading.axes)
        self.reading.computed += 1
        self.reading.operations.add(typed.operation.name)
        if draws_numbers(line.function):
            self.reading.drawn.setdefault(typed.operation.name, set()).add(line.kwargs["name"])
        results = _results(typed)
        if len(results) == len(line.targets) and not (line.sequence is False and typed.sequence):
            move = self._move(line, results[0]) if len(results) == 1 else None
            for target, made in zip(line.targets, results, strict=True):
                self._assign(target, made, move)
        else:
            self._assign(line.targets[0], Parts(results))

    def _keep_rows(self, line: Assignment, operand: Held) -> None:
        """Note the name under which slices keep rows for later ones. Raises Mistake for one that has others already."""
        if "name" not in line.kwargs:
            return
        name = line.kwargs["name"]
        if type(name) is not str or self.reading.kept.setdefault(name, line.number) != line.number:
            message = f"`{line.text}` keeps rows of `{operand.tensor}` under {name!r}, where others are kept"
            raise Mistake("layouts_disagree", message, "rows of two tensors would be mixed", operand.tensor)
        sizes = dict(zip(self.reading.axes.names, self.reading.axes.sizes, strict=True))
        if any(sizes[axis] > 1 for axis in self.reading.stage.time_axes):
            message = f"`{line.text}` keeps rows of `{operand.tensor}` in a region that runs in pieces"
            raise Mistake("layouts_disagree", message, "each piece would keep other rows in one place", operand.tensor)

    def _move(self, line: Assignment, result: Held | Absent) -> MovedTensor | None:
        if not moves(line) or not isinstance(result, Held):
            return None
        source = line.kwargs["self"]
        known = self.scope[source]
        return MovedTensor(
            result, line, self.moved.get(source) or MovedTensor(known if isinstance(known, Held) else None)
        )

    def _untyped(self, line: Assignment, knowns: dict[Variable, Known], noted: Noted) -> None:
        """Handle a line that is no operation of the model."""
        if line.is_conversion or len(line.targets) != 1 or line.sequence:
            self._wrong_here_or_before(line, noted)
            return
        axes = self.reading.axes
        source = line.kwargs.get("self")
        if moves(line) and isinstance(source, Variable):
            known = knowns[source]
            move = MovedTensor(
                None, line, self.moved.get(source) or MovedTensor(known if isinstance(known, Held) else None)
            )
            before = as_before(move, self.graph, axes)
            if before is not None:
                path = [local_tensors(step.held, self.graph, axes) for step in move.path() if step.held is not None]
                self._idle(line, path)
                self._assign(line.targets[0], before.held, replace(move, held=before.held))
                return
        else:
            move = None
        local = {v: k.local if isinstance(k, Idle) else k for v, k in knowns.items() if isinstance(k, Idle | Held)}
        result = idle_result(line, local, self.graph, axes)
        if not result:
            self._wrong_here_or_before(line, noted)
            return
        self._idle(line, [k if not isinstance(k, Held) else local_tensors(k, self.graph, axes) for k in local.values()])
        self._assign(line.targets[0], Idle(noted, result), move)

    def _idle(self, line: Assignment, operands: Iterable[Locals]) -> None:
        """Note an idle line that was seen to be idle at the sample's sizes only."""
        if not idle_at_all_sizes(line, operands):
            self.reading.at_sample[line.number] = line

    def _wrong_here_or_before(self, line: Assignment, noted: Noted) -> None:
        """Note the mistake of a line, or that of an idle line whose result it reads: once, whoever reads it next."""
        if noted.number == line.number:
            self._wrong(line, noted.mistake)
            return
        for variable in line.variables:
            self.read(line.number, variable)
        for target in line.targets:
            self._assign(target, None)


def _may_be_idle(knowns: Collection[Known]) -> bool:
    """Return whether a line has operands that are idle, and none of which nothing is known: then they are read."""
    return any(isinstance(k, Idle) for k in knowns) and all(isinstance(k, Idle | Held) for k in knowns)


def _results(typed: Typed) -> tuple[Held | Absent, ...]:
    made = zip(typed.operation.outputs, typed.typing.outputs, strict=True)
    return tuple(
        Absent(typed.operation.operator) if n is None or layout is None else Held(n, layout) for n, layout in made
    )
