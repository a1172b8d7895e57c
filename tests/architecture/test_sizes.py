"""Files of at most 400 lines, functions of at most 60: what a reader can hold at once."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

FILE_LINES = 400
FUNCTION_LINES = 60
TEXT = {".py", ".md", ".toml", ".sh", ".yml", ".yaml", ".cfg", ".json"}


def test_no_file_is_longer_than_the_limit(files: list[Path], repository: Path) -> None:
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in files if path.suffix in TEXT}
    long = {str(path.relative_to(repository)): n for path, n in lengths.items() if n > FILE_LINES}
    assert not long, f"longer than {FILE_LINES} lines: {long}"


def _statements(node: ast.AST) -> Iterator[ast.stmt]:
    """All statements below a node. Expressions, which are most of what `ast.walk` visits, hold none."""
    for name in ("body", "orelse", "finalbody", "handlers", "cases"):
        for child in getattr(node, name, ()):
            if isinstance(child, ast.stmt):
                yield child
            yield from _statements(child)


def test_no_function_is_longer_than_the_limit(python_files: list[Path], repository: Path) -> None:
    long: list[str] = []
    for path in python_files:
        for node in _statements(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > FUNCTION_LINES:
                    long.append(f"{path.relative_to(repository)}:{node.lineno} {node.name}: {length} lines")
    assert not long, f"functions longer than {FUNCTION_LINES} lines:\n" + "\n".join(long)
