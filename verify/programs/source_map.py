"""Read from a generated program which line assigns which variable from which, and which line of the model it is."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from pathlib import Path

from op_registry.source_location import SourceLocation

from nnscaler.ir.graph import Graph
from nnscaler.runtime.training.instrument_role_source import assigned_names

ModelLine = tuple[str, int, str]  # (file name without folder, line, text)
_COMMENT = re.compile(r"^\s*# (?P<file>[^\s:]+\.py):(?P<line>\d+)(?: \((?P<module>[^)]*)\))?\s*(?P<text>.*)$")


@dataclass(frozen=True, slots=True)
class Assignment:
    """A line of `prepare` or `forward`.

    `reads` are local variables and attributes of the stage. The line of the `def` assigns the arguments: what the stage
    takes from the batch and from other stages.
    """

    stage: int
    phase: str
    names: tuple[str, ...]
    reads: tuple[str, ...]
    file: str
    line: int
    text: str
    model: ModelLine | None
    is_arguments: bool = False


def assignments_of(file: str) -> tuple[Assignment, ...]:
    """Return every assignment of every stage of a role file, in the order of the text; empty if it cannot be read."""
    try:
        source = Path(file).read_text(encoding="utf-8")
        tree = ast.parse(source, file)
    except (OSError, SyntaxError, UnicodeDecodeError):
        return ()
    lines = source.splitlines()
    models = model_lines(lines)
    found: list[Assignment] = []
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            stage = index_of_stage(node)
            for method in node.body:
                if isinstance(method, ast.FunctionDef) and method.name in ("prepare", "forward"):
                    found += _assignments(method, stage, file, lines, models)
    return tuple(found)


def describe_line(file: str, line: int) -> Assignment | None:
    """Return the assignment at (or around) a line of a role file; None where there is none."""
    for assignment in assignments_of(file):
        if assignment.line == line:
            return assignment
    source = _line_text(file, line)
    return Assignment(-1, "", (), (), file, line, source, None) if source else None


def _assignments(
    method: ast.FunctionDef, stage: int, file: str, lines: list[str], models: list[ModelLine | None]
) -> list[Assignment]:
    arguments = tuple(a.arg for a in method.args.args if a.arg != "self")
    declared = lines[method.lineno - 1].strip()
    found = [Assignment(stage, method.name, arguments, (), file, method.lineno, declared, None, is_arguments=True)]
    for node in ast.walk(method):
        if not isinstance(node, ast.Assign):
            continue
        names = assigned_names(*node.targets)
        reads = tuple(dict.fromkeys(_reads(node.value)))
        text = lines[node.lineno - 1].strip()
        found.append(Assignment(stage, method.name, names, reads, file, node.lineno, text, models[node.lineno - 1]))
    return sorted(found, key=lambda a: a.line)


def _reads(value: ast.expr) -> list[str]:
    names: list[str] = []
    for node in ast.walk(value):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
            names.append(node.attr)
        elif isinstance(node, ast.Name) and node.id != "self":
            names.append(node.id)
    return names


def index_of_stage(node: ast.ClassDef) -> int:
    """Return the stage that a class of a role is; -1 for another class."""
    for statement in node.body:
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Constant):
            target = statement.targets[0]
            if isinstance(target, ast.Name) and target.id == "index" and isinstance(statement.value.value, int):
                return statement.value.value
    return -1


def model_lines(lines: list[str]) -> list[ModelLine | None]:
    """Return for each line of the file, the model's line in the nearest comment above it."""
    current: ModelLine | None = None
    found: list[ModelLine | None] = []
    for line in lines:
        match = _COMMENT.match(line)
        if match:
            current = (match["file"], int(match["line"]), match["text"])
        elif line.lstrip().startswith(("def ", "class ")):
            current = None
        found.append(current)
    return found


def _line_text(file: str, line: int) -> str:
    try:
        return Path(file).read_text(encoding="utf-8").splitlines()[line - 1].strip()
    except (OSError, IndexError, UnicodeDecodeError):
        return ""


# Find the place in the model of a line that a generated program quotes, a tensor, or a parameter.


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
