"""One name, one operator: what is refused, and what is the same file imported again."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from op_registry import NnscalerError, default_registry, operator_of, register_op

SOURCE = """
import torch
from op_registry import register_op

@register_op("a -> a", name="test_twice_{name}")
def operator(x):
    return x * {factor}

class Model(torch.nn.Module):
    def forward(self, x):
        return operator(x)
"""


def load(path: Path, module_name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def export(module: ModuleType) -> Any:
    return torch.export.export(module.Model(), (torch.ones(3),), strict=False)


def test_a_file_imported_again_replaces(tmp_path: Path) -> None:
    file = tmp_path / "ops.py"
    file.write_text(SOURCE.format(name="again", factor=2))
    first = load(file, "first_name")
    before = export(first)
    second = load(file, "second_name")
    spec = default_registry().lookup("test_twice_again")
    assert spec is not None and spec.target is second.operator.__wrapped__
    assert spec.where is not None and (spec.where.file, spec.where.line) == (str(file), 6)
    for program in (before, export(first), export(second)):
        assert [operator_of(n.target) for n in program.graph.nodes if n.op == "call_function"] == ["test_twice_again"]
        assert torch.equal(program.module()(torch.ones(3)), 2 * torch.ones(3))


def test_an_edited_file_may_change_the_schema(tmp_path: Path) -> None:
    file = tmp_path / "ops.py"
    file.write_text(SOURCE.format(name="edited", factor=2))
    first = load(file, "edited_first")
    file.write_text(
        SOURCE.format(name="edited", factor="h").replace("(x):\n    return x *", "(x, h=7):\n    return x *")
    )
    second = load(file, "edited_second")
    assert first.operator.overload is not second.operator.overload
    program = export(second)
    assert [operator_of(n.target) for n in program.graph.nodes if n.op == "call_function"] == ["test_twice_edited"]
    assert torch.equal(program.module()(torch.ones(3)), 7 * torch.ones(3))


def test_two_functions_of_one_name_are_refused_with_both_places(tmp_path: Path) -> None:
    one, two = tmp_path / "one.py", tmp_path / "two.py"
    for file in (one, two):
        file.write_text(SOURCE.format(name="conflict", factor=2))
    load(one, "conflict_one")
    with pytest.raises(NnscalerError) as caught:
        load(two, "conflict_two")
    assert caught.value.code == "operator_registered_twice"
    assert str(caught.value) == (
        f"the operator name `test_twice_conflict` is taken: first registered at {one}:6, again at {two}:6\n"
        f"  --> {two}:6   def operator(x):\n"
        '  help: register_op(..., name="...") gives another name than `test_twice_conflict`'
    )


def test_one_line_that_makes_two_functions_is_refused() -> None:
    def make(factor: int) -> Any:
        @register_op("a -> a", name="test_twice_closure")
        def scaled(x):
            return x * factor

        return scaled

    make(2)
    make(2)
    with pytest.raises(NnscalerError, match="this line registered a function with other values of `factor`"):
        make(3)


def test_one_line_that_makes_two_autograd_functions_is_refused() -> None:
    def make(factor: int) -> Any:
        @register_op("a -> a", name="test_twice_class")
        class Scaled(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):  # noqa: ARG004
                return x * factor

        return Scaled

    make(2)
    with pytest.raises(NnscalerError, match="other values of `factor`"):
        make(3)


def test_names_that_differ_only_in_punctuation() -> None:
    first = register_op("a -> a", name="test_twice.name")(lambda x: x + 1)
    second = register_op("a -> a", name="test_twice_name")(lambda x: x + 2)
    assert first.overload is not second.overload  # type: ignore[attr-defined]
    assert operator_of(first.overload) == "test_twice.name"  # type: ignore[attr-defined]
    assert operator_of(second.overload) == "test_twice_name"  # type: ignore[attr-defined]


def test_in_the_main_module(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    tail = """
node, = [n for n in torch.export.export(Model(), (torch.ones(3),)).graph.nodes if n.op == "call_function"]
print(node.target, operator.spec.where)
"""
    script.write_text(SOURCE.format(name="main", factor=2) + tail)
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, script.name], cwd=tmp_path, env={"PYTHONPATH": str(root)}, capture_output=True, text=True,
        timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["nnscaler_user.test_twice_main.default", f"{script}:6"]
