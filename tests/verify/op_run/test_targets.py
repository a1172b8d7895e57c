"""Targets by name: files, functions, modules, registered names, patterns, operators of torch; and near misses."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from nnscaler.errors import NnscalerError
from verify.evidence.inputs.find_operator import find_operator, matching, record_of
from verify.operators.run.job import address_of, make_job
from verify.operators.run.targets import find_jobs

TWO = """
@nnscaler.register_op("m k+, k+ n -> m n", name="NAME_second")
def second(a: Tensor, b: Tensor) -> Tensor:
    return a @ b

@nnscaler.register_op("a b -> a b", name="NAME_first")
def first(x: Tensor) -> Tensor:
    return x * 2

def plain(x):
    return x * 3

class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g * 2

def make(name, factor):
    @nnscaler.register_op("a b -> a b", name=name)
    def made(x: Tensor) -> Tensor:
        return x * factor
    return made

three = make("NAME_three", 3)
"""


def names(targets: list[str], **more: object) -> list[str]:
    return [job.spec.name for job in find_jobs(targets, **more)]  # type: ignore[arg-type]


def error_of(*targets: str, **more: object) -> NnscalerError:
    with pytest.raises(NnscalerError) as caught:
        find_jobs(targets, **more)  # type: ignore[arg-type]
    return caught.value


def test_a_file_gives_what_it_registers_in_its_order(write: Callable[[str], str]) -> None:
    file = write(TWO)
    assert [name.split("_")[-1] for name in names([file])] == ["second", "first", "three"]


def test_a_function_of_a_file(write: Callable[[str], str]) -> None:
    file = write(TWO)
    (job,) = find_jobs([f"{file}::first"])
    assert job.spec.name.endswith("_first") and job.address == f"{file}::first"


def test_a_pattern_within_a_file(write: Callable[[str], str]) -> None:
    file = write(TWO)
    assert [n.split("_")[-1] for n in names([f"{file}::*_[ft]*"])] == ["first", "three"]


def test_a_registered_name_without_a_variable(write: Callable[[str], str]) -> None:
    """`made` is no attribute of the file; its registered name finds it, also in another process."""
    file = write(TWO)
    name = names([file])[2]
    (job,) = find_jobs([f"{file}::{name}"])
    assert job.spec.name == name and job.address == f"{file}::{name}"


KERNELS = """
def centre(x: Tensor) -> Tensor:
    return x - x.mean(0)

def register(decorate):
    @decorate("a b -> a b", name="NAME_inner")
    def inner(x: Tensor) -> Tensor:
        return x - x.mean(0)
"""


def test_a_file_gives_what_it_registers_of_others(write: Callable[[str], str], monkeypatch: pytest.MonkeyPatch) -> None:
    """They are found again in another process through the file that registers them."""
    kernels = Path(write(KERNELS)).resolve()
    monkeypatch.syspath_prepend(str(kernels.parent))
    text = f"import {kernels.stem} as kernels\n"
    text += 'nnscaler.register_op("a b -> a b", name="NAME_centre")(kernels.centre)\n'
    file = write(f"{text}kernels.register(nnscaler.register_op)\n")
    found = find_jobs([file])
    assert {job.spec.name.split("_")[-1] for job in found} == {"centre", "inner"}
    assert [job.address for job in found] == [f"{file}::{job.spec.name}" for job in found]
    assert [names([str(job.address)]) for job in found] == [[job.spec.name] for job in found]


def test_an_unregistered_function_needs_an_annotation(write: Callable[[str], str]) -> None:
    file = write(TWO)
    assert error_of(f"{file}::plain").code == "not_annotated"
    (job,) = find_jobs([f"{file}::plain"], annotation="a b -> a b")
    assert (job.given, job.address) == ("a b -> a b", f"{file}::plain")
    (job,) = find_jobs([f"{file}::plain"], suggest=True)
    assert job.spec.annotation == ""


def test_an_autograd_function_runs_by_apply(write: Callable[[str], str]) -> None:
    file = write(TWO)
    (job,) = find_jobs([f"{file}::Double"], annotation="a b -> a b")
    assert job.spec.target is not None and float(job.spec.target(torch.ones(()))) == 2.0
    assert [p.name for p in job.spec.parameters] == ["x"]
    assert job.spec.where is not None and job.spec.where.text.startswith("class Double")


def test_apply_is_its_class() -> None:
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(_: object, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(_: object, g: torch.Tensor) -> torch.Tensor:
            return g * 2

    spec = find_operator(Twice.apply, "a -> a")
    assert spec.name == "Twice" and spec.where is not None and spec.where.file == __file__


def test_a_compiled_function_is_the_function() -> None:
    def half(x: torch.Tensor) -> torch.Tensor:
        return x / 2

    spec = record_of(torch.compile(half))
    assert spec is not None and spec.target is half


@pytest.mark.parametrize("text", ["aten.gelu", "aten.gelu.default", "aten::gelu", "gelu"])
def test_operators_of_torch(text: str) -> None:
    assert names([text]) == ["aten.gelu.default"]


def test_a_name_with_several_overloads_means_all_of_them() -> None:
    assert {"aten.sum.default", "aten.sum.dim_IntList"} <= set(names(["aten.sum"]))
    assert find_operator("aten.sum", None).name == "aten.sum.default"


def test_patterns() -> None:
    found = names(["aten.*norm*"])
    assert "aten.layer_norm.default" in found and all("norm" in name for name in found)
    assert names(["aten.gelu", "aten.gel*"]) == ["aten.gelu.default"]  # once


def test_all_means_what_is_built_in(write: Callable[[str], str]) -> None:
    find_jobs([write(TWO)])
    found = names([], builtin=True)
    assert len(found) > 300 and not any(name.startswith("run_") for name in found)


def test_torch_library(write: Callable[[str], str]) -> None:
    file = write(
        """
@torch.library.custom_op("NAME::double", mutates_args=())
def double(x: Tensor) -> Tensor:
    return x * 2

nnscaler.register_op("a b -> a b")(double)
torch.library.define("NAME::bare", "(Tensor x) -> Tensor")
"""
    )
    space = f"run_{file.removeprefix('ops_').removesuffix('.py')}"
    assert names([f"{file}::double"]) == [f"{space}.double.default"]
    for text in (f"{space}::double", f"{space}.double", f"{space}.double.default"):
        assert names([text]) == [f"{space}.double.default"]
    operators = getattr(torch.ops, space)
    for found in (operators.double, operators.double.default):
        assert find_operator(found, None).name == f"{space}.double.default"
    assert error_of(f"{space}::bare").code == "not_annotated"
    assert names([f"{space}::bare"], annotation="a -> a") == [f"{space}.bare.default"]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, numbers: Iterator[int]) -> str:
    """A package with operators in two modules, one of which imports its sibling relatively."""
    name = f"some_package_{next(numbers)}"
    folder = tmp_path / name
    (folder / "inner").mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    (folder / "inner" / "__init__.py").write_text("")
    (folder / "factor.py").write_text("FACTOR = 2\n")
    (folder / "ops.py").write_text(
        "import nnscaler\nfrom torch import Tensor\nfrom .factor import FACTOR\n"
        f'@nnscaler.register_op("a b -> a b", name="{name}_double")\n'
        "def double(x: Tensor) -> Tensor:\n    return x * FACTOR\n"
    )
    (folder / "inner" / "more.py").write_text(
        'import nnscaler\nfrom torch import Tensor\n@nnscaler.register_op("a -> a", '
        f'name="{name}_same")\n'
        "def same(x: Tensor) -> Tensor:\n    return x * 1\n"
    )
    (folder / "__main__.py").write_text("raise SystemExit('this is a script')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return name


def test_modules(package: str) -> None:
    (job,) = find_jobs([f"{package}.ops:double"])
    assert job.address == f"{package}.ops:double"  # by path, its relative import would fail
    assert names([], modules=[f"{package}.ops"]) == [f"{package}_double"]
    assert sorted(names([], modules=[package])) == [f"{package}_double", f"{package}_same"]
    assert error_of(modules=[f"{package}.factor"]).code == "unknown_operator"


def test_settings_of_the_project(package: str, write: Callable[[str], str], tmp_path: Path) -> None:
    file = write(TWO)
    settings = tmp_path / "pyproject.toml"
    settings.write_text(f'[tool.nnscaler.verify-op]\nmodules = ["{package}.ops"]\nfiles = ["{file}"]\n')
    assert [name.split("_")[-1] for name in names([])] == ["double", "second", "first", "three"]


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        ("", "nothing_named", "has no setting"),
        ("[tool.nnscaler.verify-op]\n", "bad_settings", "neither modules nor files"),
        ('[tool.nnscaler.verify-op]\nmodule = ["a"]\n', "bad_settings", "did you mean modules?"),
        ('[tool.nnscaler.verify-op]\nmodules = "a"\n', "bad_settings", "not a list"),
        ("[tool\n", "bad_settings", "cannot read"),
    ],
)
def test_wrong_settings(text: str, code: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pyproject.toml").write_text(text)
    error = error_of()
    assert error.code == code and said in str(error)


@pytest.mark.parametrize(
    ("target", "code", "said"),
    [
        ("aten.gel", "unknown_operator", "did you mean aten.gelu.default"),
        ("aten.linaer", "unknown_operator", "aten.linear.default"),
        ("aten.*nosuch*", "unknown_operator", "matches"),
        ("no_such_file.py", "no_such_file", "no_such_file.py"),
        ("no_such_file.py::f", "no_such_file", "no_such_file.py"),
        ("no.such.module:f", "import_failed", "No module named"),
        ("os:getcwdd", "unknown_operator", "did you mean getcwd"),
        ("os:sep", "unknown_operator", "not an operator"),
    ],
)
def test_what_is_not_there(target: str, code: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    error = error_of(target)
    assert error.code == code and said in str(error), str(error)


def test_near_misses_within_a_file(write: Callable[[str], str], tmp_path: Path) -> None:
    file = write(TWO)
    assert "did you mean plain" in str(error_of(f"{file}::plian"))
    assert f"did you mean {file}" in str(error_of(file.replace("ops", "opz")))
    (tmp_path / "nothing.py").write_text("x = 1\n")
    assert "registers no operator" in str(error_of("nothing.py"))


@pytest.mark.parametrize(
    ("source", "said", "line"),
    [
        ("1 / 0", "ZeroDivisionError: division by zero", 4),
        ("import no_such_module_at_all", "No module named", 4),
        ("raise SystemExit(3)", "sys.exit(3)", None),
        ("def f(:", "SyntaxError", 4),
        ('nnscaler.register_op("a b -> c")(lambda x: x)', "", None),
    ],
)
def test_files_that_do_not_import(write: Callable[[str], str], source: str, said: str, line: int | None) -> None:
    error = error_of(write(source))
    assert said in str(error)
    if line is not None:
        assert error.where is not None and error.where.line == line and error.where.file.endswith(".py")


def test_one_annotation_is_for_one_operator(write: Callable[[str], str]) -> None:
    assert error_of(write(TWO), annotation="a -> a").code == "several_operators"


def test_sample_inputs_of_the_file(write: Callable[[str], str]) -> None:
    file = write(TWO + "\ndef inputs():\n    return (torch.ones(4, 6),)\n")
    (job,) = find_jobs([f"{file}::plain"], annotation="a b -> a b", sample_inputs="inputs")
    assert job.spec.sample_inputs is not None and job.spec.sample_inputs()[0].shape == (4, 6)
    error = error_of(f"{file}::plain", annotation="a b -> a b", sample_inputs="input")
    assert error.code == "unknown_function" and "did you mean inputs" in str(error)


def test_an_annotation_outside_the_language_is_kept_for_a_counter_example(write: Callable[[str], str]) -> None:
    (job,) = find_jobs([f"{write(TWO)}::second"], annotation="m k, k n -> m n")
    assert job.error is not None and job.given == "m k, k n -> m n"


def test_what_has_no_address() -> None:
    """A function that only this process has: no token can name it."""
    scope: dict[str, object] = {}
    exec("def typed(x): return x", scope)
    spec = record_of(scope["typed"])
    assert spec is not None and address_of(spec) is None
    assert not make_job(spec, "a -> a").repeatable
    assert matching("aten.gelu")[0].where is None and address_of(matching("aten.gelu")[0]) == "aten.gelu.default"


@pytest.mark.parametrize("line", ["importlib.import_module('no_such_module')", "import no_such_module"])
def test_failed_imports_are_of_the_users_line(line: str, write: Callable[[str], str], tmp_path: Path) -> None:
    """Not of our hook, which imports in a folder that has a name that means something else."""
    (tmp_path / "types.py").write_text("")
    file = write(f"import importlib\n{line}")
    where = error_of(file).where
    assert where is not None and (where.file, where.text) == (str(Path(file).resolve()), line)
