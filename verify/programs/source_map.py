"""Find the place in the model of a line that a generated program quotes, a tensor, or a parameter."""

from __future__ import annotations

from pathlib import Path

from op_registry.spec import SourceLocation

from nnscaler.ir.graph import Graph
from verify.programs.role_text import ModelLine


class SourceMap:
    """Looks places up in a graph."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        located = [op.where for op in graph.operations if op.where is not None]
        self._by_line = {(Path(where.file).name, where.line): where for where in located}

    def of_line(self, quoted: ModelLine | None) -> SourceLocation | None:
        """Return the whole path of `gpt.py:31`, as a comment of a program has it."""
        if quoted is None:
            return None
        file, line, text = quoted
        return self._by_line.get((file, line), SourceLocation(file, line, text))

    def of_tensor(self, name: str) -> SourceLocation | None:
        """Return the line that computes a tensor of the graph."""
        producer = self._graph.producers.get(name)
        return None if producer is None else producer.where

    def of_parameters(self) -> dict[str, SourceLocation]:
        """Return, by name of a parameter or buffer, the line that uses it first."""
        used = self.of_stored()
        tensors = self._graph.with_role("parameter", "buffer")
        return {fqn: used[tensor.name] for tensor in tensors if tensor.name in used for fqn in tensor.fqns}

    def of_stored(self) -> dict[str, SourceLocation]:
        """Return, by tensor of the graph that no operation computes, the line that uses it first."""
        found: dict[str, SourceLocation] = {}
        for tensor in self._graph.with_role("parameter", "buffer", "constant", "input"):
            uses = (op.where for op, _ in self._graph.consumers[tensor.name] if op.where is not None)
            place = next(uses, None)
            if place is not None:
                found[tensor.name] = place
        return found
