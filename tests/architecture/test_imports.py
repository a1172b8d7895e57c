"""Imports go down only and never in a cycle; the runtime stands on torch alone; every module can be imported."""

from __future__ import annotations

import ast
import graphlib
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

PACKAGES = ("op_registry", "nnscaler", "verify")


def modules(repository: Path, package: str) -> dict[str, Path]:
    """Dotted names of all modules of a package, `__init__` as the package itself, and their files."""
    files = {}
    for path in sorted((repository / package).rglob("*.py")):
        parts = path.relative_to(repository).with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return files


def run_at_import(statements: list[ast.stmt]) -> Iterator[ast.Import | ast.ImportFrom]:
    """The imports that run when a module is imported: not those inside of functions or for type checkers alone."""
    for statement in statements:
        if isinstance(statement, ast.Import | ast.ImportFrom):
            yield statement
        elif isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.unparse(statement.test):
            yield from run_at_import(statement.orelse)
        elif not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            for field in ("body", "orelse", "finalbody"):
                yield from run_at_import(getattr(statement, field, []))
            for inner in (*getattr(statement, "handlers", ()), *getattr(statement, "cases", ())):
                yield from run_at_import(inner.body)


def imported_first(name: str, path: Path, known: Iterable[str]) -> set[str]:
    """The modules of ours that are imported before module `name` is complete.

    With each come its packages, which run their `__init__` first, but for those that `name` itself lies in: they are
    being imported already, which is harmless unless `name` takes a name from them.
    """
    first: set[str] = set()
    for statement in run_at_import(ast.parse(path.read_text(encoding="utf-8")).body):
        if isinstance(statement, ast.Import):
            targets = [alias.name for alias in statement.names]
        else:
            inner = [f"{statement.module}.{alias.name}" for alias in statement.names]
            targets = [target if target in known else str(statement.module) for target in inner]
        first.update(target for target in targets if target in known)
        for target in targets:
            parts = target.split(".")
            packages = (".".join(parts[:count]) for count in range(1, len(parts)))
            first.update(p for p in packages if p in known and not f"{name}.".startswith(f"{p}."))
    return first - {name}


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


def test_imports_have_no_cycle(repository: Path) -> None:
    """A cycle shows only when the import begins at some of its members; without one, each can be imported first."""
    files = {name: path for package in PACKAGES for name, path in modules(repository, package).items()}
    assert len(files) > 500
    graph = {name: imported_first(name, path, files) for name, path in files.items()}
    list(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError, which names the cycle


def test_a_cycle_is_seen(tmp_path: Path) -> None:
    texts = {
        "p": "from p.a import one",
        "p.a": "import q",
        "q": "def f():\n    import p\n\nfrom p.b import two",
        "p.b": "",
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    graph = {name: imported_first(name, tmp_path / name, texts) for name in texts}
    assert graph == {"p": {"p.a"}, "p.a": {"q"}, "q": {"p", "p.b"}, "p.b": set()}
    with pytest.raises(graphlib.CycleError):
        list(graphlib.TopologicalSorter(graph).static_order())


def test_every_module_imports(repository: Path) -> None:
    names = [name for package in PACKAGES for name in modules(repository, package)]
    script = "import importlib, sys\nfor name in sys.argv[1:]: importlib.import_module(name)"
    result = run([sys.executable, "-c", script, *names], repository)
    assert result.returncode == 0, result.stderr


def test_front_door_of_the_registry_needs_no_torch(repository: Path) -> None:
    script = "import sys, op_registry; sys.exit('torch' in sys.modules)"
    result = run([sys.executable, "-c", script], repository)
    assert result.returncode == 0, result.stderr or "op_registry imports torch at import time"
