"""The files of the repository, as the architecture tests see them."""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGES = ("op_registry", "nnscaler", "verify")
BLOCKS = ("body", "orelse", "finalbody", "handlers", "cases")  # fields of a node that hold statements
OUTSIDE = {".git", ".venv", "build", "dist", "__pycache__"}


def list_files(root: Path) -> list[Path]:
    """Files that git tracks or would track. Without git (an unpacked archive): all but caches and environments."""
    git = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )
    if git.returncode == 0:
        found = [root / name for name in git.stdout.split("\0") if name]
    else:
        found = [path for path in root.rglob("*") if not OUTSIDE.intersection(path.relative_to(root).parts)]
    return sorted(path for path in found if path.is_file())


@pytest.fixture(scope="session")
def files(repository: Path) -> list[Path]:
    return list_files(repository)


@pytest.fixture(scope="session")
def python_files(files: list[Path]) -> list[Path]:
    return [path for path in files if path.suffix == ".py"]


@pytest.fixture(scope="session")
def trees(python_files: list[Path], repository: Path) -> dict[str, ast.Module]:
    """Every module, parsed once, by its path in the repository."""
    return {str(p.relative_to(repository)): ast.parse(p.read_text(encoding="utf-8")) for p in python_files}


@pytest.fixture(scope="session")
def product(trees: dict[str, ast.Module]) -> dict[str, ast.Module]:
    """The modules of the product."""
    return {name: tree for name, tree in trees.items() if Path(name).parts[0] in PACKAGES}


def statements(node: ast.AST) -> Iterator[ast.stmt]:
    """All statements below a node. Expressions, which are most of what `ast.walk` visits, hold none."""
    for name in BLOCKS:
        for child in getattr(node, name, ()):
            if isinstance(child, ast.stmt):
                yield child
            yield from statements(child)
