"""The lines of a role file that declare what a stage stores, takes, receives, sends, and in which order it runs."""

from __future__ import annotations

import ast
from pathlib import Path

from verify.programs.localise.culprit import RoleLine
from verify.programs.role_text import index_of_stage

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
