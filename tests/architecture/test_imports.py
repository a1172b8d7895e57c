"""Imports go down only; the runtime stands on torch alone; every module can be imported first."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGES = ("op_registry", "nnscaler", "verify")

# Imports each module given as an argument in a forked child of a process that holds torch, Z3 and nothing of ours.
# A fork costs milliseconds where a new interpreter with torch costs seconds.
IMPORT_ALONE = """
import importlib, os, sys, traceback
import torch, torch._dynamo, torch.fx.experimental.symbolic_shapes, torch._subclasses.fake_tensor, torch.testing
import numpy, sympy, z3

ours = [name for name in sys.modules if name.split(".")[0] in ("op_registry", "nnscaler", "verify")]
assert not ours, ours
failed = []
for name in sys.argv[1:]:
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        try:
            importlib.import_module(name)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    if os.waitpid(child, 0)[1] != 0:
        failed.append(name)
print("\\n".join(failed))
"""


def modules(repository: Path, package: str) -> list[str]:
    """Dotted names of all modules of a package, `__init__` as the package itself."""
    names = []
    for path in sorted((repository / package).rglob("*.py")):
        parts = path.relative_to(repository).with_suffix("").parts
        names.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return names


def top_level_imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, first two parts of the name) of every import in a file, those inside functions included."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module]
            if node.module == "nnscaler":
                names = [f"nnscaler.{alias.name}" for alias in node.names]
        for name in names:
            yield node.lineno, ".".join(name.split(".")[:2])


def run(command: list[str], repository: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(repository)}
    return subprocess.run(command, cwd=repository, env=environment, capture_output=True, text=True, check=False)


def test_import_contracts_hold(repository: Path) -> None:
    script = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"
    result = run([sys.executable, "-c", script], repository)
    assert result.returncode == 0, result.stdout + result.stderr


def test_every_package_has_a_floor(repository: Path) -> None:
    """A new package under nnscaler must say which floor it stands on, else the contract says nothing about it."""
    configuration = tomllib.loads((repository / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = configuration["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    placed = {name.strip(" ()") for layer in layers for name in layer.replace("|", ":").split(":")}
    placed.add("nnscaler.runtime")  # the tower
    packages = {f"nnscaler.{path.parent.name}" for path in (repository / "nnscaler").glob("*/__init__.py")}
    assert packages <= placed


def test_runtime_stands_on_torch_and_the_standard_library(repository: Path) -> None:
    """Generated programs import the runtime: on a cluster it must not drag the compiler in."""
    allowed = {"torch", "nnscaler.runtime", *sys.stdlib_module_names}
    wrong = [
        f"{path.relative_to(repository)}:{line} imports {name}"
        for path in sorted((repository / "nnscaler" / "runtime").rglob("*.py"))
        for line, name in top_level_imports(path)
        if name not in allowed and name.split(".")[0] not in allowed
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("package", PACKAGES)
def test_every_module_imports_alone(repository: Path, package: str) -> None:
    """Each as the first module of ours in a process: an import cycle shows only from some of its members."""
    names = modules(repository, package)
    assert names
    result = run([sys.executable, "-c", IMPORT_ALONE, *names], repository)
    assert result.returncode == 0, result.stderr
    assert not result.stdout.strip(), f"cannot be imported alone: {result.stdout.split()}\n{result.stderr}"


def test_front_door_of_the_registry_needs_no_torch(repository: Path) -> None:
    script = "import sys, op_registry; sys.exit('torch' in sys.modules)"
    result = run([sys.executable, "-c", script], repository)
    assert result.returncode == 0, result.stderr or "op_registry imports torch at import time"
