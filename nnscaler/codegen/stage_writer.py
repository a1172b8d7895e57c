"""Write one stage of a rank program as a Python class: a line of the model is a line of the program."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from op_registry.registry import facts_of

from nnscaler.codegen.python_text_of_calls import (
    arguments,
    conversion_text,
    function_text,
    layout_text,
    local_state_text,
    needs_device,
    returns_sequence,
)
from nnscaler.communication.communicated_graph import (
    Compute,
    Convert,
    Join,
    StageProgram,
    Statement,
    Version,
    chunk_of,
    differentiated,
    group_of,
    reads,
    writes,
)
from nnscaler.ir.graph import Graph, Operation, Region
from nnscaler.ir.operation_placement import Chunk, Stage
from nnscaler.layout import MICRO, Invariant, Layout, Replicated
from nnscaler.transform.hoist_whole_batch_values import SUFFIX

# The comments that say where in the model one is: its layers, and its lines.


@dataclass(slots=True)
class SourceComments:
    """Says of each statement, in the order of the text, what stands above it. `model`: the name of the whole."""

    model: str
    layer: str | None = None
    line: str = ""
    _made_at: dict[str, str] = field(default_factory=dict)  # variable -> the line that makes it

    def before(self, statements: Sequence[Statement], position: int) -> Iterator[str]:
        """Comment lines above the statement at `position`. A conversion stands with the line that made its source,
        where that is the current one, otherwise with the operation that needs it."""
        statement = statements[position]
        if isinstance(statement, Join):
            return
        if not isinstance(statement, Compute):
            if self.line and self._made_at.get(statement.source.variable) == self.line:
                self._made_at[statement.target.variable] = self.line
                return
            needing = next((s for s in statements[position:] if isinstance(s, Compute)), None)
            if needing is not None:
                yield from self._enter(needing.operation)
            return
        yield from self._enter(statement.operation)
        for version in statement.outputs:
            if version is not None:
                self._made_at[version.variable] = self.line

    def _enter(self, operation: Operation) -> Iterator[str]:
        where = operation.where
        line = f"{os.path.basename(where.file)}:{where.line}" if where is not None else ""
        layer = layer_of(operation.module) or self.model
        if layer == self.model and line == self.line and self.layer is not None:
            layer = self.layer  # what one line does around a call of a layer stays with it
        if layer != self.layer:
            if self.layer is not None:
                yield ""
            yield f"# {layer}"
            self.layer, self.line = layer, ""
        if where is not None and line != self.line:
            yield f"# {line}  {where.text}".rstrip()
        self.line = line

    def forget_line(self) -> None:
        """The next statement says its line again: an inner function ends here."""
        self.line = ""


def layer_of(module: str) -> str:
    """`blocks.0` of `blocks.0.attn.qkv`: up to the first number; empty outside of layers."""
    parts = module.split(".")
    number = next((i for i, part in enumerate(parts) if part.isdigit()), None)
    return "" if number is None else ".".join(parts[: number + 1])


# Runs of statements that share a region of the model (no_grad, autocast) or a recompute group.


@dataclass(frozen=True, slots=True)
class StatementGroup:
    """Consecutive statements of one region of the model, of one recomputed group, or of one region that runs in pieces.

    statements   in order
    header       the `with` line around them, "" for none
    function     the name of the function that they become; None where they become none
    reads        arguments of that function
    writes       results of that function
    join         what becomes of the results of pieces; None for a recomputed group
    """

    statements: tuple[Statement, ...]
    header: str = ""
    function: str | None = None
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    join: Join | None = None


def blocks(
    graph: Graph, statements: Sequence[Statement], after: frozenset[str], stored: frozenset[str]
) -> list[StatementGroup]:
    """Consecutive statements of one region or group. Conversions stand outside of regions: what they make may be
    read where gradients are recorded. `after`: variables read later; `stored`: attributes, which are no variables."""
    runs: list[tuple[tuple[str, str | Chunk | None], list[Statement]]] = []
    for i, statement in enumerate(statements):
        key = _key(graph, statements, i)
        if runs and runs[-1][0] == key:
            runs[-1][1].append(statement)
        else:
            runs.append((key, [statement]))
    result: list[StatementGroup] = []
    names: dict[str, int] = {}
    for position, ((header, group), run) in enumerate(runs):
        last = run[-1]
        if isinstance(last, Join):
            results = tuple(v.variable for v in last.sources)
            given = tuple(sorted(_given(run[:-1]) - stored))
            result.append(StatementGroup(tuple(run), "", last.chunk.name, given, results, last))
            continue
        if not isinstance(group, str):
            result.append(StatementGroup(tuple(run), header))
            continue
        later = {v.variable for _, rest in runs[position + 1 :] for s in rest for v in reads(s)} | after
        made = [v.variable for s in run for v in writes(s)]
        names[group] = names.get(group, 0) + 1
        name = group if names[group] == 1 else f"{group}_{names[group]}"
        result.append(
            StatementGroup(
                tuple(run), "", name, tuple(sorted(_given(run) - stored)), tuple(n for n in made if n in later)
            )
        )
    return result


def _given(statements: Iterable[Statement]) -> set[str]:
    """Return the variables that statements read and do not make."""
    read, made = set[str](), set[str]()
    for statement in statements:
        read.update(v.variable for v in reads(statement))
        made.update(v.variable for v in writes(statement))
    return read - made


def _key(graph: Graph, statements: Sequence[Statement], position: int) -> tuple[str, str | Chunk | None]:
    statement, group = statements[position], group_of(graph, statements, position)
    chunk = statement.chunk if isinstance(statement, Join) else chunk_of(statement)
    if chunk is not None:
        return "", chunk
    return (header(statement.operation.region) if isinstance(statement, Compute) and not group else "", group)


def header(region: Region) -> str:
    """Return the `with` line of a region."""
    parts: list[str] = []
    if not region.grad_enabled:
        parts.append("torch.no_grad()")
    if region.autocast == "off":
        parts.append("torch.autocast(self.device.type, enabled=False)")
    elif region.autocast:
        parts.append(f"torch.autocast(self.device.type, dtypes.{region.autocast})")
    return f"with {', '.join(parts)}:" if parts else ""


INDENT = "    "


@dataclass(frozen=True)
class StageWriter:
    """Writes the bodies of `prepare` and `forward` of one stage."""

    graph: Graph
    program: StageProgram

    @cached_property
    def differentiated(self) -> frozenset[str]:
        """The variables of `forward` that get a gradient."""
        return differentiated(self.graph, self.program)

    @property
    def stage(self) -> Stage:
        return self.program.stage

    def text_of(self, version: Version) -> str:
        """Return the variable, or the attribute of the stage for a stored tensor."""
        stored = any(s.variable == version.variable for s in self.program.stored)
        return f"self.{version.variable}" if stored else version.variable

    def body(self, statements: Sequence[Statement], after: frozenset[str]) -> list[str]:
        """Return the statements as lines. `after`: variables that are read after the body."""
        lines: list[str] = []
        places = SourceComments(self.graph.name)
        start = 0
        for block in blocks(self.graph, statements, after, frozenset(s.variable for s in self.program.stored)):
            if block.function is None:
                lines += self._plain(block, statements, start, places)
            elif block.join is not None:
                lines += self._in_pieces(block, block.function, block.join, places)
            else:
                lines += self._recomputed(block, block.function, places)
            start += len(block.statements)
        return lines

    def _plain(
        self, block: StatementGroup, statements: Sequence[Statement], start: int, places: SourceComments
    ) -> Iterator[str]:
        """Statements, in their region of the model."""
        inner = INDENT if block.header else ""
        for i, statement in enumerate(block.statements):
            yield from indented(places.before(statements, start + i), inner if i else "")
            if block.header and i == 0:
                yield block.header
            yield inner + self._line(statement)

    def _recomputed(self, block: StatementGroup, name: str, places: SourceComments) -> Iterator[str]:
        """Yield a function of the statements, and its call."""
        yield from self._function(block, name, block.statements, places)
        results = _targets(block.writes)
        yield from ("", f"{results} = recompute({', '.join((name, *block.reads))})")
        places.forget_line()

    def _in_pieces(self, block: StatementGroup, name: str, join: Join, places: SourceComments) -> Iterator[str]:
        """Yield a function of one piece, and its calls, whose results are joined."""
        yield from self._function(block, name, block.statements[:-1], places)
        axis = join.chunk.axis
        position = self.stage.names.index(axis)
        piece = f"self.in_piece({name}, {axis}=i)"
        call = f"recompute({', '.join((piece, *block.reads))})"
        if not join.chunk.recompute:
            call = f"{piece}({', '.join(block.reads)})"
        states = [local_state_text(v.layout, self.stage.sizes, position) for v in join.sources]
        pieces = f"({call} for i in range({self.stage.sizes[position]}))"
        said = " | ".join(f"{v.layout[position]} -> Invariant" for v in join.sources)
        results = _targets([v.variable for v in join.targets])
        yield from ("", f"{results} = comm.join({', '.join((pieces, f'self.{axis}', *states))})  # {said}")
        places.forget_line()

    def _function(
        self, block: StatementGroup, name: str, statements: Sequence[Statement], places: SourceComments
    ) -> Iterator[str]:
        """Yield a function of statements that returns what the block makes."""
        yield from ("", f"def {name}({', '.join(block.reads)}):")
        places.forget_line()
        for i, statement in enumerate(statements):
            yield from indented(places.before(statements, i), INDENT)
            region = header(statement.operation.region) if isinstance(statement, Compute) else ""
            if region:
                yield INDENT + region
            yield INDENT * (2 if region else 1) + self._line(statement)
        yield f"{INDENT}return {_targets(block.writes)}"

    def _line(self, statement: Statement) -> str:
        """Write a statement with its result: the layout of its outputs, or the row of its conversion."""
        if isinstance(statement, Convert):
            before, after = (v.layout[statement.move.axis] for v in (statement.source, statement.target))
            row, back = statement.move.row, statement.target.variable in self.differentiated
            backward = f"; backward: {row.backward}" if back and row.backward else ""
            return f"{self._convert(statement)}  # {before} -> {after}{backward}"
        assert isinstance(statement, Compute), statement
        shapes = (
            layout_text(self.graph.tensors[v.tensor].shape, v.layout, self.stage.axes)
            for v in statement.outputs
            if v is not None
        )
        return f"{self._compute(statement)}  # {' | '.join(dict.fromkeys(shapes))}"

    def _compute(self, statement: Compute) -> str:
        operator = statement.call.operator
        variables = [self.text_of(v) for v in statement.inputs]
        given = arguments(statement.call, variables)
        if needs_device(operator):
            given.append("device=self.device")
        if facts_of(operator).random:
            given.extend(self._place_of_draws(statement))
        targets = ["_" if v is None else v.variable for v in statement.outputs]
        left = ", ".join(targets)
        if returns_sequence(operator, len(targets)) and len(targets) == 1:
            left += ","
        return f"{left} = {function_text(operator)}({', '.join(given)})"

    def _place_of_draws(self, statement: Compute) -> list[str]:
        """A random number depends on the place of its element in the logical tensor, not on the rank, nor on whether it
        is drawn once per step for all micro-batches."""
        version, name = statement.outputs[0], statement.operation.name
        assert version is not None, name
        name = name.removesuffix(SUFFIX) if statement.placement.prepare else name
        shape = self.graph.tensors[version.tensor].shape
        return ["self", repr(name), states_text(version.layout, self.stage), repr(shape)]

    def _convert(self, statement: Convert) -> str:
        axis = f"self.{self.stage.names[statement.move.axis]}"
        variable, source = statement.target.variable, self.text_of(statement.source)
        call = conversion_text(statement.move, self.stage.sizes, source, axis, variable)
        return f"{statement.target.variable} = {call}"


def _targets(names: Sequence[str]) -> str:
    """Write several results, or a single one, as a tuple."""
    return ", ".join(names) + ("," if len(names) == 1 else "")


def indented(lines: Iterable[str], indent: str) -> Iterator[str]:
    return (indent + line if line else "" for line in lines)


def states_text(layout: Layout, stage: Stage, at_rest: bool = False) -> str:
    """`{"dp": Sharded(0), "tp": Partial()}`: what a role module declares; `Invariant` is left out."""
    entries: list[str] = []
    for axis, state in zip(stage.axes, layout, strict=True):
        if isinstance(state, Invariant) or (axis.size == 1 and axis.name == MICRO):
            continue
        if at_rest and isinstance(state, Replicated):
            continue
        entries.append(f'"{axis.name}": {state!r}')
    return "{" + ", ".join(entries) + "}"
