"""One stage of a rank program as a Python class: a line of the model is a line of the program."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from nnscaler.codegen.blocks import Block, blocks, header
from nnscaler.codegen.expressions import arguments
from nnscaler.codegen.operators import function_text, needs_device, returns_sequence
from nnscaler.communication.communicated import Compute, Convert, StageProgram, Statement, Version
from nnscaler.ir.conversion import Move
from nnscaler.ir.graph import Graph
from nnscaler.ir.layout import Invariant, Layout, Replicated, Sharded, format_layout, letter, local_outer
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
        place = ""
        stored = frozenset(s.variable for s in self.program.stored)
        for block in blocks(statements, after, stored):
            inner = INDENT if block.recompute or block.header else ""
            if block.recompute:
                lines.append("")
                lines.append(f"def {block.recompute}({', '.join(block.reads)}):")
            elif block.header:
                lines.append(block.header)
            for statement in block.statements:
                place = self._comment(lines, statement, place, inner)
                region = (
                    header(statement.operation.region) if block.recompute and isinstance(statement, Compute) else ""
                )
                if region:
                    lines.append(inner + region)
                lines.append(inner + (INDENT if region else "") + self._line(statement))
            if block.recompute:
                lines.extend(self._end_of_recompute(block))
                place = ""
        return lines

    def _end_of_recompute(self, block: Block) -> Iterable[str]:
        results = ", ".join(block.writes) + ("," if len(block.writes) == 1 else "")
        yield f"{INDENT}return {results}"
        yield ""
        yield f"{results} = recompute({', '.join((block.recompute or '', *block.reads))})"

    def _comment(self, lines: list[str], statement: Statement, place: str, inner: str) -> str:
        if not isinstance(statement, Compute) or statement.operation.where is None:
            return place
        where, module = statement.operation.where, statement.operation.module
        here = f"{os.path.basename(where.file)}:{where.line} {module}"
        if here != place:
            of = f" ({module})" if module else ""
            lines.append(f"{inner}# {os.path.basename(where.file)}:{where.line}{of}  {where.text}".rstrip())
        return here

    def _line(self, statement: Statement) -> str:
        if isinstance(statement, Convert):
            text = self._convert(statement)
            before, after = (v.layout[statement.move.axis] for v in (statement.source, statement.target))
            return f"{text}  # {before} -> {after}"
        text = self._compute(statement)
        notes = [format_layout(v.layout, self.stage.names) for v in statement.outputs if v is not None]
        note = " | ".join(dict.fromkeys(n for n in notes if n))
        return f"{text}  # {note}" if note else text

    def _compute(self, statement: Compute) -> str:
        operator = statement.call.operator
        variables = [self.text_of(v) for v in statement.inputs]
        given = arguments(statement.call, variables)
        if needs_device(operator):
            given.append("device=self.device")
        if operator == "nnscaler.dropout":
            given.extend(self._dropout(statement))
        targets = ["_" if v is None else v.variable for v in statement.outputs]
        left = ", ".join(targets)
        if returns_sequence(operator, len(targets)) and len(targets) == 1:
            left += ","
        return f"{left} = {function_text(operator)}({', '.join(given)})"

    def _dropout(self, statement: Compute) -> list[str]:
        """Dropout's mask depends on the place of an element in the logical tensor, not on the rank."""
        version = statement.inputs[0]
        shape = self.graph.tensors[version.tensor].shape
        return ["self", repr(statement.operation.name), states_text(version.layout, self.stage), repr(shape)]

    def _convert(self, statement: Convert) -> str:
        move = statement.move
        axis = self.stage.names[move.axis]
        given = [self.text_of(statement.source), f"self.{axis}", *self._cut(move)]
        return f"{statement.target.variable} = comm.{move.row.function}({', '.join(given)})"

    def _cut(self, move: Move) -> list[str]:
        """Where the dim is cut, in the local coordinates that the other axes leave."""
        sizes = self.stage.sizes
        before, after = move.source[move.axis], move.target[move.axis]
        if isinstance(before, Sharded) and isinstance(after, Sharded):
            outers = [local_outer(layout, sizes, move.axis) for layout in (move.source, move.target)]
            cut = [str(before.dim), str(after.dim)]
            return cut if outers == [1, 1] else [*cut, f"from_outer={outers[0]}", f"to_outer={outers[1]}"]
        if letter(before) == "P" and letter(after) == "I":
            return [] if before.reduction == "sum" else [repr(before.reduction)]  # type: ignore[union-attr]
        cut_state = before if isinstance(before, Sharded) else after
        if not isinstance(cut_state, Sharded):
            return []
        layout: Layout = move.source if cut_state is before else move.target
        if cut_state.sections:
            return [f"dim={cut_state.dim}", f"sections={cut_state.sections}"]
        outer = local_outer(layout, sizes, move.axis)
        return [f"dim={cut_state.dim}"] + ([f"outer={outer}"] if outer > 1 else [])


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
