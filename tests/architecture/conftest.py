"""The files of the repository, as the architecture tests see them."""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path

import pytest

PACKAGES = ("op_registry", "nnscaler", "verify")
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
def product(python_files: list[Path], repository: Path) -> dict[str, ast.Module]:
    """The modules of the product, by their paths in the repository."""
    names = {path: path.relative_to(repository) for path in python_files}
    return {
        str(name): ast.parse(path.read_text(encoding="utf-8"))
        for path, name in names.items()
        if name.parts[0] in PACKAGES
    }
