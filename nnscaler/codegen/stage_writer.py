"""One stage of a rank program as a Python class: a line of the model is a line of the program."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from nnscaler.codegen.blocks import Block, blocks, header
from nnscaler.codegen.conversion_text import conversion_text
from nnscaler.codegen.expressions import arguments
from nnscaler.codegen.layout_text import layout_text
from nnscaler.codegen.operators import RANDOM, function_text, needs_device, returns_sequence
from nnscaler.codegen.places import Places
from nnscaler.communication.communicated import Compute, Convert, StageProgram, Statement, Version
from nnscaler.ir.graph import Graph
from nnscaler.ir.layout import Invariant, Layout, Replicated
from nnscaler.ir.mesh import MICRO
from nnscaler.ir.placement import Stage

INDENT = "    "


@dataclass(frozen=True, slots=True)
class StageWriter:
    """Writes the bodies of `prepare` and `forward` of one stage."""

    graph: Graph
    program: StageProgram

    @property
    def stage(self) -> Stage:
        return self.program.stage

    def text_of(self, version: Version) -> str:
        """The variable, or the attribute of the stage for a stored tensor."""
        stored = any(s.variable == version.variable for s in self.program.stored)
        return f"self.{version.variable}" if stored else version.variable

    def body(self, statements: Sequence[Statement], after: frozenset[str]) -> list[str]:
        """The statements as lines. `after`: variables that are read after the body."""
        lines: list[str] = []
        places = Places(self.graph.name)
        stored = frozenset(s.variable for s in self.program.stored)
        for block in blocks(statements, after, stored):
            inner = INDENT if block.recompute or block.header else ""
            if block.recompute:
                lines += ["", f"def {block.recompute}({', '.join(block.reads)}):"]
                places.forget_line()
            written = block.statements if block.recompute else statements
            first = written.index(block.statements[0])
            outside = "" if block.header else inner
            for position, statement in enumerate(block.statements):
                comments = places.before(written, first + position)
                lines += [(inner if position else outside) + c if c else "" for c in comments]
                if block.header and position == 0:
                    lines.append(block.header)
                region = (
                    header(statement.operation.region) if block.recompute and isinstance(statement, Compute) else ""
                )
                if region:
                    lines.append(inner + region)
                lines.append(inner + (INDENT if region else "") + self._line(statement))
            if block.recompute:
                lines.extend(self._end_of_recompute(block))
                places.forget_line()
        return lines

    def _end_of_recompute(self, block: Block) -> Iterable[str]:
        results = ", ".join(block.writes) + ("," if len(block.writes) == 1 else "")
        yield f"{INDENT}return {results}"
        yield ""
        yield f"{results} = recompute({', '.join((block.recompute or '', *block.reads))})"

    def _line(self, statement: Statement) -> str:
        """A statement, and what it makes: the layout of results, the row of conversions."""
        if isinstance(statement, Convert):
            before, after = (v.layout[statement.move.axis] for v in (statement.source, statement.target))
            needs_grad = self.graph.tensors[statement.source.tensor].needs_grad
            row = statement.move.row
            backward = f"; backward: {row.backward}" if needs_grad and row.backward else ""
            return f"{self._convert(statement)}  # {before} -> {after}{backward}"
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
        if operator in RANDOM:
            given.extend(self._place_of_draws(statement))
        targets = ["_" if v is None else v.variable for v in statement.outputs]
        left = ", ".join(targets)
        if returns_sequence(operator, len(targets)) and len(targets) == 1:
            left += ","
        return f"{left} = {function_text(operator)}({', '.join(given)})"

    def _place_of_draws(self, statement: Compute) -> list[str]:
        """A random number depends on the place of its element in the logical tensor, not on the rank."""
        version = statement.outputs[0]
        assert version is not None, statement.operation.name
        shape = self.graph.tensors[version.tensor].shape
        return ["self", repr(statement.operation.name), states_text(version.layout, self.stage), repr(shape)]

    def _convert(self, statement: Convert) -> str:
        axis = f"self.{self.stage.names[statement.move.axis]}"
        call = conversion_text(statement.move, self.stage.sizes, self.text_of(statement.source), axis)
        return f"{statement.target.variable} = {call}"


def states_text(layout: Layout, stage: Stage, at_rest: bool = False) -> str:
    """`{"dp": Sharded(0), "tp": Partial()}`: what a role module declares; `Invariant` is left out."""
    entries: list[str] = []
    for axis, state in zip(stage.axes, layout, strict=True):
        if isinstance(state, Invariant) or (axis.size == 1 and axis.name == MICRO):
            continue
        if at_rest and isinstance(state, Replicated):
            continue
        text = f"{state}()" if isinstance(state, Replicated) else str(state)
        entries.append(f'"{axis.name}": {text}')
    return "{" + ", ".join(entries) + "}"
