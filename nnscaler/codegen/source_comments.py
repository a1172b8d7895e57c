"""The comments that say where in the model one is: its layers, and its lines."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from nnscaler.communication.communicated_graph import Compute, Statement
from nnscaler.ir.graph import Operation


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
