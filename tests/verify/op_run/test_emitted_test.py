"""Tests that are written out: they fail for the finding's reason, and pass once the operator is right."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from nnscaler.errors import NnscalerError
from verify.evidence.verify_op_options import OpOptions
from verify.operators.run.replay import emit_tests
from verify.operators.run.targets import find_jobs
from verify.operators.run.tensors_as_python_text import LARGEST, NotWritable, tensor_text
from verify.operators.run.verify_many import PoolSettings, run_many

OPTIONS = OpOptions(prove=False, timeout=60.0)
# name, annotation, body of the wrong operator, body of the right one
WRONG = [
    ("softmax", "a b -> a b", "x: Tensor", "x.softmax(-1)", "x * 2"),
    ("mean", "a b+ -> a", "x: Tensor", "x.mean(1)", "x.sum(1)"),
    ("bias", "m k+, n k+, n -> m n", "x: Tensor, w: Tensor, b: Tensor", "x @ w.T + b", "x @ w.T * b"),
    ("additive", "m k+, n k+, +n -> m n", "x: Tensor, w: Tensor, b: Tensor", "x @ w.T + b.abs()", "x @ w.T + b"),
    ("heads", "b (h e) -> b (h e)", "x: Tensor, h: int", "x.unflatten(1, (h, -1)).flip(1).flatten(1)", "x * 2"),
    ("raises", "a b -> a b", "x: Tensor", "x * [2][int(x.shape[1] == 6)]", "x * 2"),
    (
        "filled",
        "a b^ -> a b^",
        "x: Tensor",
        "torch.cat([x[:, 1:] - x.detach().mean(), x[:, :1] * 0 - 1e30], 1)",
        "torch.cat([x[:, 1:] * 2, x[:, :1] * 0 - 1e30], 1)",
    ),
    ("two", "a b -> a b, a b", "x: Tensor", "(x * 2, x.cumsum(0))", "(x * 2, x * 3)"),
]
HEAD = "import nnscaler, torch\nfrom torch import Tensor\n\n"
SOURCE = """
@nnscaler.register_op("{annotation}", name="NAME_{name}")
def {name}({parameters}):
    return {body}
"""
BACKWARD = """
@nnscaler.register_op("a b -> a b", name="NAME_counts")
class Counts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.rows = x.shape[0]
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g * 2 * FACTOR
"""


ASKED = """
@nnscaler.register_op("a b, a b -> a b", name="NAME_asked")
class Asked(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx, g):
        x, y = ctx.saved_tensors
        return g * y, g * x * (1 if ctx.needs_input_grad[0] else 3)
"""


def emit(target: str, file: Path) -> tuple[int, list[str]]:
    results = list(run_many(find_jobs([target]), OPTIONS, PoolSettings(workers=1)))
    return emit_tests([(result.job, result.report) for result in results], file, OPTIONS)


def run_pytest(file: Path, repository: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(file.parent), str(file)]
    environment = {"PYTHONPATH": str(repository), "OMP_NUM_THREADS": "1", "PATH": ""}
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=file.parent, check=False)


@pytest.mark.long
def test_they_fail_and_then_pass(write: Callable[[str], str], tmp_path: Path, repository: Path) -> None:
    """All in one file of operators; then the same file with right ones."""
    sources = [SOURCE.format(name=n, annotation=a, parameters=p, body=w) for n, a, p, w, _ in WRONG]
    source = "".join(sources) + BACKWARD.replace("FACTOR", "ctx.rows")
    file = write(source)
    written, problems = emit(file, tmp_path / "test_it.py")
    assert (written, problems) == (len(WRONG) + 1, [])
    tests = sorted(tmp_path.glob("test_it_*.py"))
    for test in tests:
        tree = ast.parse(test.read_text())
        modules = {n.names[0].name for n in ast.walk(tree) if isinstance(n, ast.Import)}
        assert modules <= {"importlib.util", "sys", "torch"}, test.name
    found = run_pytest(tmp_path, repository)
    count = len(WRONG) + 2  # two findings on the backward: it is no derivative, and depends on the shard
    assert found.stdout.splitlines()[-1].startswith(f"{count} failed in "), found.stdout
    assert all(reason in found.stdout for reason in ("Tensor-likes are not close", "IndexError", "GradcheckError"))
    number = file.removeprefix("ops_").removesuffix(".py")
    right = source.replace("return g * 2 * ctx.rows", "return g * 2")
    for *_, wrong, fixed in WRONG:
        right = right.replace(f"return {wrong}\n", f"return {fixed}\n")
    (tmp_path / file).write_text(HEAD + right.replace("NAME", f"run_{number}"))
    found = run_pytest(tmp_path, repository)
    assert found.stdout.splitlines()[-1].startswith(f"{count} passed in "), found.stdout


def test_one_operator_gives_one_file(write: Callable[[str], str], tmp_path: Path) -> None:
    source = "".join(SOURCE.format(name=n, annotation=a, parameters=p, body=w) for n, a, p, w, _ in WRONG[:1])
    file = tmp_path / "test_one.py"
    assert emit(write(source), file) == (1, [])
    text = file.read_text()
    assert "def test_softmax_annotation_wrong():" in text
    assert '"""output 0 of `run_' in text and "# Every rank (split b in 2)" in text
    assert max(map(len, text.splitlines())) <= 120


def test_nothing_is_written_for_a_pass(write: Callable[[str], str], tmp_path: Path) -> None:
    source = SOURCE.format(name="double", annotation="a b -> a b", parameters="x: Tensor", body="x * 2")
    assert emit(write(source), tmp_path / "test_none.py") == (0, [])
    assert not (tmp_path / "test_none.py").exists()


def test_a_death_has_no_test(write: Callable[[str], str], tmp_path: Path) -> None:
    source = SOURCE.format(
        name="dies", annotation="a b -> a b", parameters="x: Tensor", body="__import__('os').abort()"
    )
    written, problems = emit(write(source), tmp_path / "test_none.py")
    assert written == 0 and "would end the process" in problems[0]


def test_a_folder_that_is_not_there(write: Callable[[str], str], tmp_path: Path) -> None:
    source = "".join(SOURCE.format(name=n, annotation=a, parameters=p, body=w) for n, a, p, w, _ in WRONG[:1])
    with pytest.raises(NnscalerError) as caught:
        emit(write(source), tmp_path / "nowhere" / "test_it.py")
    assert caught.value.code == "cannot_write"


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(3.5, dtype=torch.float64),
        torch.randn(4, 5, dtype=torch.float64),
        torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0]),
        torch.randint(0, 9, (3, 2)),
        torch.tensor([True, False]),
        torch.zeros(0, 3),
        torch.randn(3, dtype=torch.complex128),
        torch.randn(7, dtype=torch.bfloat16),
    ],
    ids=lambda t: f"{t.dtype}-{tuple(t.shape)}",
)
def test_tensors_are_written_exactly(tensor: torch.Tensor) -> None:
    text = tensor_text(tensor)
    again = eval(text.replace("\n", " "), {"torch": torch})
    torch.testing.assert_close(again, tensor, rtol=0, atol=0, equal_nan=True)
    assert again.dtype == tensor.dtype


def test_a_large_tensor_is_not_written() -> None:
    with pytest.raises(NotWritable, match="too large"):
        tensor_text(torch.zeros(LARGEST + 1))


def test_what_a_test_would_not_show_is_not_written(write: Callable[[str], str], tmp_path: Path) -> None:
    """Its gradient is wrong where one input alone asks for it."""
    count, problems = emit(write(ASKED), tmp_path / "test_asked.py")
    assert count == 0 and not list(tmp_path.glob("test_asked*"))
    assert any("a plain call, as a test makes it, is right" in problem for problem in problems), problems
