"""Bugs in a program whose layers run three times, the last time alone with a gradient: each is found where it is."""

from __future__ import annotations

from pathlib import Path

import pytest

import nnscaler
from tests.broken.planting import Edit, Original
from tests.sampling import every
from verify.self_test.programs.tiny_models import Recycled, pairs

VALUE, GRADIENT = "tensor_differs", "tensor_gradient_differs"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Original:
    program = nnscaler.parallelize(Recycled(), dict(pairs()), ranks=2, plan="pp=2", schedule="3f1b", micro_batches=2)
    made = Original(Recycled, dict(pairs()), 2, program.save(tmp_path_factory.mktemp("recycled") / "program"))
    report = made.verify(made.folder)
    assert report.exit_code == 0 and not report.findings, report.to_json()
    return made


BUGS = {
    "a gradient that is not sent back": (
        (
            Edit('"add_7@5", 5, peers=(1,)', '"add_7@5", 5, peers=(1,), needs_grad=False'),
            Edit('"float32", peers=(0,)),', '"float32", peers=(0,), needs_grad=False),', 1),
        ),
        GRADIENT,
        "add_7",
        "not sent back",
    ),
    "a backward that is struck": (
        (Edit(" B4.1", ""), Edit(" B5.1", "", 1)),
        GRADIENT,
        "mse_loss",
        "the schedule lacks B4.1, B5.1",
    ),
    "the result of the run before": (
        (Edit('"add_5@4": add_5', '"add_5@4": add_4', 1),),
        VALUE,
        "add_5",
        "",
    ),
    "a factor in the last run": (
        (Edit("gelu_4 = aten.gelu(linear_5)", "gelu_4 = aten.gelu(linear_5) * 2"),),
        VALUE,
        "gelu_4",
        "",
    ),
    "a factor in a run without gradient": (
        (Edit("gelu_2 = aten.gelu(linear_3)", "gelu_2 = aten.gelu(linear_3) * 2"),),
        VALUE,
        "gelu_2",
        "",
    ),
    "a gradient that the last run loses": (
        (Edit("        add_6 =", "        linear = linear.detach()\n        add_6 ="),),
        GRADIENT,
        "linear",
        "",
    ),
}


@pytest.mark.parametrize("name", every(2, BUGS))
def test_bug_is_named(original: Original, tmp_path: Path, name: str) -> None:
    edits, code, tensor, cause = BUGS[name]
    program = original.broken(tmp_path, edits)
    report = original.verify(program)
    assert report.exit_code == 1, report.to_json()
    first = report.findings[0]
    assert (first.code, f"`{tensor}`" in first.message, cause in str(first.cause)) == (code, True, True), first
    assert not original.read(program).proved
