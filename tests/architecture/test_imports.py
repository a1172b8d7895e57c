"""Imports go down only and never in a cycle; the runtime stands on torch alone; every module can be imported."""

from __future__ import annotations

import ast
import graphlib
import importlib
import multiprocessing
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal

import pytest

from tests.architecture.conftest import BLOCKS, PACKAGES, statements

When = Literal["at import", "in a function", "for types"]
Imports = Mapping[str, Mapping[When, set[str]]]  # of each module

# `nnscaler` tells type checkers its public names, which it imports on first use; its version is read below it.
# (importer, imported), as patterns -> why it is imported inside a function
LATE = {
    ("nnscaler.cli.*", "nnscaler.*"): "`--help` and wrong arguments are answered without torch",
    ("nnscaler.cli.*", "verify*"): "the same",
    ("nnscaler.cli.*", "op_registry*"): "the same",
    ("nnscaler.pytest_plugin", "nnscaler.cli*"): "it is loaded in every test run of everybody who installed nnscaler",
    ("nnscaler.model_file", "nnscaler.*"): "a file that is not there is told without torch",
    ("nnscaler.scheduling.v_shaped", "nnscaler.scheduling.search*"): "schedules are listed without the search",
    ("nnscaler.plan_source", "nnscaler.*"): "a plan that cannot be is told without torch",
    (
        "nnscaler.planning.auto_plan_request",
        "nnscaler.planning.*",
    ): "plans that are named need neither planner nor HiGHS",
    ("nnscaler.model_file", "nnscaler.runtime*"): "a file that is there is found without torch",
    ("op_registry.register", "op_registry.define_user_functions_in_torch"): "annotations are read without torch",
    ("op_registry.registry", "op_registry.builtin*"): "the front door of the registry is open before its operators are",
    ("verify.programs.loaded_model_and_plan", "nnscaler.*"): "a record of what is to be verified is made without torch",
    ("verify.programs.verify_request", "verify.*"): "a request that cannot be verified is refused without torch",
    ("verify.external.verify_request", "verify.*"): "the same",
    ("verify.evidence.inputs.import_user_code", "nnscaler.runtime*"): "targets are read without torch",
    ("verify.programs.opened_program", "nnscaler.runtime*"): "a manifest is read without torch",
    ("verify.evidence.inputs.find_operator", "verify.evidence.inputs.optimizer*"): "names are read without torch",
    ("verify.evidence.inputs.find_operator", "nnscaler.training*"): "the same",
}


def module_name(path: str) -> str:
    """The dotted name of a module, by its path in the repository; `__init__` as the package itself."""
    parts = Path(path).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def import_statements(node: ast.AST, when: When = "at import") -> Iterator[tuple[When, ast.Import | ast.ImportFrom]]:
    """Every import statement below a node, with the time at which it runs."""
    for_types = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
    for block in BLOCKS:
        for child in getattr(node, block, ()):
            inner = when
            if for_types and block == "body":
                inner = "for types"
            elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) and when == "at import":
                inner = "in a function"
            if isinstance(child, ast.Import | ast.ImportFrom):
                yield inner, child
            yield from import_statements(child, inner)


def targets_of(statement: ast.Import | ast.ImportFrom, known: Iterable[str]) -> list[str]:
    """The modules that a statement names."""
    if isinstance(statement, ast.Import):
        return [alias.name for alias in statement.names]
    inner = [f"{statement.module}.{alias.name}" for alias in statement.names]
    return [target if target in known else str(statement.module) for target in inner]


def imports_of(name: str, tree: ast.Module, known: Iterable[str]) -> dict[When, set[str]]:
    """The modules of ours that module `name` imports, by the time at which it does.

    With each come its packages, which run their `__init__` first, but for those that `name` itself lies in: they are
    being imported already, which is harmless unless `name` takes a name from them.
    """
    found: dict[When, set[str]] = {"at import": set(), "in a function": set(), "for types": set()}
    for when, statement in import_statements(tree):
        targets = targets_of(statement, known)
        found[when].update(target for target in targets if target in known and target != name)
        for target in targets:
            parts = target.split(".")
            packages = (".".join(parts[:count]) for count in range(1, len(parts)))
            found[when].update(p for p in packages if p in known and not f"{name}.".startswith(f"{p}."))
    return found


def graph_of(imports: Imports, *times: When) -> dict[str, set[str]]:
    """Each module, with the modules that it imports at one of these times."""
    return {name: set().union(*(found[when] for when in times)) for name, found in imports.items()}


def circles(graph: Mapping[str, set[str]]) -> list[frozenset[str]]:
    """The strongly connected components of more than one module: each of its members imports every other in the end."""
    reached: dict[str, set[str]] = {}
    for start in graph:
        seen, open_ends = set(), [start]
        while open_ends:
            new = graph[open_ends.pop()] - seen
            seen |= new
            open_ends.extend(new)
        reached[start] = seen
    found = {frozenset(b for b in reached[a] if a in reached[b]) for a in graph}
    return sorted((circle for circle in found if len(circle) > 1), key=sorted)


def described(circle: frozenset[str], graph: Mapping[str, set[str]]) -> str:
    """A circle with the imports that make it up, one module a line."""
    return "\n".join(f"{name} imports {', '.join(sorted(graph[name] & circle))}" for name in sorted(circle))


def top_level_imports(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, first two parts of the name) of every import of a module, those inside functions included."""
    for node in statements(tree):
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


def test_runtime_stands_on_torch_and_the_standard_library(product: dict[str, ast.Module]) -> None:
    """Generated programs import the runtime: on a cluster it must not drag the compiler in."""
    ground = "manifest instructions split_backward_graph records_as_json layout communication_buckets is_user_file"
    ground += " exception_in_one_line"
    own = {f"nnscaler.{name}" for name in ("runtime", *ground.split())}
    allowed = {"torch", *own, *sys.stdlib_module_names}
    wrong = [
        f"{path}:{line} imports {name}"
        for path, tree in product.items()
        if path.startswith("nnscaler/runtime/")
        for line, name in top_level_imports(tree)
        if name not in allowed and name.split(".")[0] not in allowed
    ]
    assert not wrong, "\n".join(wrong)


@pytest.fixture(scope="module")
def imports(product: dict[str, ast.Module]) -> Imports:
    """The imports of all modules of the product."""
    trees = {module_name(path): tree for path, tree in product.items()}
    return {name: imports_of(name, tree, trees) for name, tree in trees.items()}


def test_imports_have_no_cycle(imports: Imports) -> None:
    """A cycle shows only when the import begins at some of its members; without one, each can be imported first."""
    assert len(imports) > 500
    list(graphlib.TopologicalSorter(graph_of(imports, "at import")).static_order())  # its CycleError names the cycle


def test_imports_have_no_circle_through_functions(imports: Imports) -> None:
    """An import inside a function hides a circle from Python, not from a reader: neither file is understood first."""
    graph = graph_of(imports, "at import", "in a function")
    found = [described(circle, graph) for circle in circles(graph)]
    assert not found, "import circles:\n\n" + "\n\n".join(found)


def test_circles_for_type_checkers_are_known(imports: Imports) -> None:
    """Imports under TYPE_CHECKING never run. Circles of them are those of the front door, which names what it has."""
    graph = dict(graph_of(imports, "at import", "for types"))
    assert all("nnscaler" in circle for circle in circles(graph))
    graph["nnscaler"] = type(graph["nnscaler"])()
    assert not list(circles(graph))


def test_imports_inside_functions_are_for_start_up(imports: Imports) -> None:
    """A late import without need hides what a module stands on."""
    late = [(name, target) for name, by in imports.items() for target in by["in a function"] - by["at import"]]
    rules = {edge: [rule for rule in LATE if all(map(fnmatchcase, edge, rule))] for edge in late}
    wrong = [f"{name} imports {target} inside a function" for (name, target), found in rules.items() if not found]
    assert not wrong, "\n".join(sorted(wrong))
    assert not set(LATE).difference(*rules.values()), "rules that allow nothing"


def test_a_cycle_is_seen() -> None:
    texts = {
        "p": "from p.a import one",
        "p.a": "import q",
        "q": "def f():\n    import p\n\nfrom p.b import two",
        "p.b": "if TYPE_CHECKING:\n    import q\nelse:\n    import p.c",
        "p.c": "class C:\n    async def f(self):\n        with self:\n            from p.b import three",
    }
    found = {name: imports_of(name, ast.parse(text), texts) for name, text in texts.items()}
    graph = graph_of(found, "at import")
    assert graph == {"p": {"p.a"}, "p.a": {"q"}, "q": {"p", "p.b"}, "p.b": {"p.c"}, "p.c": set()}
    with pytest.raises(graphlib.CycleError):
        list(graphlib.TopologicalSorter(graph).static_order())
    assert circles(graph) == [frozenset({"p", "p.a", "q"})]
    graph = graph_of(found, "at import", "in a function")
    assert circles(graph) == [frozenset({"p", "p.a", "q"}), frozenset({"p.b", "p.c"})]
    assert "p.c imports p.b" in described(frozenset({"p.b", "p.c"}), graph)
    assert circles(graph_of(found, "at import", "for types")) == [frozenset({"p", "p.a", "p.b", "q"})]


def test_every_module_imports(product: dict[str, ast.Module], trees: dict[str, ast.Module]) -> None:
    """In a process that has what this one has imported already; and benchmarks, examples and pages, which nothing else
    imports, take names that are there."""
    taken = [
        (f"{path}:{statement.lineno}", statement.module, alias.name)
        for path, tree in trees.items()
        for _, statement in import_statements(tree)
        if isinstance(statement, ast.ImportFrom) and str(statement.module).split(".")[0] in PACKAGES
        for alias in statement.names
    ]
    arguments = list(map(module_name, product)), taken
    process = multiprocessing.get_context("fork").Process(target=import_all, args=arguments)
    process.start()
    process.join()
    assert process.exitcode == 0


def import_all(names: Iterable[str], taken: Iterable[tuple[str, str, str]]) -> None:
    modules = {name: importlib.import_module(name) for name in names}
    gone = [f"{at}: {module} has no {name}" for at, module, name in taken if not hasattr(modules.get(module), name)]
    assert not gone, "\n".join(gone)


def test_front_door_of_the_registry_needs_no_torch(repository: Path) -> None:
    script = "import sys, op_registry; sys.exit('torch' in sys.modules)"
    result = run([sys.executable, "-c", script], repository)
    assert result.returncode == 0, result.stderr or "op_registry imports torch at import time"
