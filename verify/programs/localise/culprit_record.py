"""The record of a culprit, a place of a program that is wrong by itself, and lines that declare what a stage does."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from op_registry.source_location import SourceLocation

from nnscaler.errors import few
from nnscaler.ir.graph import Operation
from verify.programs.checks.input_and_outcome import SHOWN
from verify.programs.localise.instrument_statements import Statement
from verify.programs.source_map import ModelLine, SourceMap, index_of_stage
from verify.results.finding import Finding

# The lines of a role file that declare what a stage stores, takes, receives, sends, and in which order it runs.

Key = tuple[int, str, str]  # (stage, group, name): (0, "parameters", "w"), (1, "loss", ""), (-1, "SCHEDULE", "")


def declarations(file: Path) -> dict[Key, RoleLine]:
    """Return the line of every declaration. Entries of `sends` have their keys as names."""
    source = file.read_text(encoding="utf-8")
    lines = source.splitlines()
    found: dict[Key, RoleLine] = {}

    def add(key: Key, node: ast.AST) -> None:
        number = getattr(node, "lineno", 1)
        found[key] = RoleLine(str(file), number, lines[number - 1].strip())

    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            add((-1, node.targets[0].id, ""), node)
        if not isinstance(node, ast.ClassDef):
            continue
        stage = index_of_stage(node)
        for statement in node.body:
            if isinstance(statement, ast.FunctionDef):
                add((stage, statement.name, ""), statement)
            if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
                group = statement.targets[0].id
                add((stage, group, ""), statement)
                for name, entry in _entries(statement.value):
                    add((stage, group, name), entry)
    return found


def _entries(value: ast.expr) -> list[tuple[str, ast.expr]]:
    if isinstance(value, ast.Dict):
        keys = zip(value.keys, value.values, strict=True)
        return [(str(k.value), v) for k, v in keys if isinstance(k, ast.Constant)]
    if isinstance(value, ast.Tuple):
        calls = [e for e in value.elts if isinstance(e, ast.Call) and e.args and isinstance(e.args[0], ast.Constant)]
        return [(str(c.args[0].value), c) for c in calls if isinstance(c.args[0], ast.Constant)]
    return []


@dataclass(frozen=True)
class RoleLine:
    """A line of a role file."""

    file: str
    number: int
    text: str


@dataclass(frozen=True)
class Culprit:
    """`tensor`: of the graph, or a parameter's name; `others`: how many more are wrong in the same way."""

    code: str
    message: str
    tensor: str
    line: RoleLine | None = None
    model: ModelLine | None = None
    cause: str | None = None
    help: str | None = None
    facts: Mapping[str, str] = field(default_factory=dict)
    others: tuple[str, ...] = ()

    def finding(self, places: SourceMap, tensors: Mapping[str, str]) -> Finding:
        """Turn the culprit into a finding. `tensors`: parameter's name -> tensor of the graph."""
        tensor = tensors.get(self.tensor, self.tensor)
        where = places.of_tensor(tensor) or places.of_stored().get(tensor) or places.of_line(self.model)
        related: tuple[tuple[str, SourceLocation], ...] = ()
        if self.line is not None:
            related = (("generated program", SourceLocation(self.line.file, self.line.number, self.line.text)),)
        message = self.message
        if self.others:
            message += f" (as are those of {few([f'`{name}`' for name in self.others], 2)})"
        facts = {"tensor": self.tensor, **self.facts}
        return Finding(self.code, message, where, facts, self.cause, self.help, related=related)


def line_of(statement: Statement) -> RoleLine:
    return RoleLine(statement.file, statement.line, statement.text)


def advice_on(operation: Operation | None) -> str | None:
    """Return what to do about an operation that computes something wrong: of the built-in operators the annotations are
    tested; nobody has tested the user's."""
    if operation is None or operation.operator.startswith(("aten.", "nnscaler.")):
        return None
    return f"if the program is as it was generated, the annotation of `{operation.operator}` is wrong: verify-op tells"


def findings_of(culprits: list[Culprit], places: SourceMap, tensors: Mapping[str, str]) -> tuple[Finding, ...]:
    """Return one finding per culprit; the first says how many there are."""
    found = [culprit.finding(places, tensors) for culprit in culprits]
    if len(culprits) > 1:
        shown = f", the first {SHOWN} are shown" if len(culprits) > SHOWN else ""
        facts = {**found[0].counter_example, "places": f"{len(culprits)} lines are wrong by themselves{shown}"}
        first = found[0]
        found[0] = Finding(
            first.code, first.message, first.where, facts, first.cause, first.help, first.reproduce, first.related
        )
    return tuple(found)
