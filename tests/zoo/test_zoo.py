"""Architectures of `transformers` through the whole path: traced, split, generated, proved, run and compared.

A sample is in the default run; `-m long` takes all of them (benchmarks/coverage.py prints the figures).
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks import coverage_libraries
from benchmarks.coverage import check
from tests.sampling import every
from tests.zoo.architectures import ARCHITECTURES

# one of each kind that asks something else of the compiler
SAMPLE = (
    ("gpt_neox", "tp=2"),
    ("qwen2", "dp=2,tp=2"),
    ("bloom", "dp=2"),
    ("mixtral", "tp=2"),
    ("mamba", "dp=2"),
    ("deberta", "tp=2"),
    ("bart", "tp=2"),
    ("longformer", "dp=2"),
    ("swinv2", "dp=2"),
    ("convnext", "tp=2"),
    ("wav2vec2", "dp=2"),
    ("clip", "dp=2"),
)


# Those of which a release of the library sends tokens to experts in lists of lengths that it reads from tensors.
READ = ("jetmoe",)


def test_there_are_enough_of_each_kind() -> None:
    assert len(ARCHITECTURES) >= 80 and len({a.name for a in ARCHITECTURES}) == len(ARCHITECTURES)
    assert len({a.family for a in ARCHITECTURES}) >= 8


@pytest.mark.parametrize(("name", "plan"), every(12, SAMPLE))
def test_sample(name: str, plan: str) -> None:
    told = check(name, plan)
    assert told.reached == "verified", told
    assert told.divided is None or told.divided > 0.9, told


PLANS = ["dp=2", "tp=2", "dp=2,tp=2"]


@pytest.mark.long
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", [a.name for a in ARCHITECTURES if a.name not in READ])
def test_all(name: str, plan: str) -> None:
    told = check(name, plan, "default")
    assert told.reached == "verified", told
    assert told.divided is None or told.divided > 0, told


@pytest.mark.long
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", READ)
def test_numbers_that_are_read_are_refused_with_their_line(name: str, plan: str) -> None:
    module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    lines = inspect.getsource(module).splitlines()
    number = next((i for i, line in enumerate(lines, 1) if line.strip() == "expert_size = expert_size.tolist()"), None)
    told = check(name, plan, "default")
    if number is None:
        assert told.reached == "verified", told
    else:
        assert (told.reached, told.code) == ("built", "trace_failed"), told
        assert f"aten.item.default reads from a tensor is used at {module.__file__}:{number}" in told.said, told


class Squares(nn.Module):
    """A model for the tables of benchmarks: `ends` takes the process with it."""

    def __init__(self, ends: bool = False) -> None:
        super().__init__()
        self.ends, self.proj = ends, nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.ends:
            os._exit(3)
        return self.proj(x).square().mean()


def _case(name: str, plan: str = "tp=2", meta: bool = False, ends: bool = False) -> coverage_libraries.Case:
    def build() -> tuple[nn.Module, dict[str, torch.Tensor]]:
        device = "meta" if meta else "cpu"
        return Squares(ends).to(device), {"x": torch.zeros(4, 4, device=device)}

    return coverage_libraries.Case(name, "own", plan, build)


def test_what_was_not_run_and_what_died_are_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    cases = [_case("fine"), _case("meta", meta=True), _case("dies", ends=True), _case("odd", "tp=3")]
    told = coverage_libraries.show(coverage_libraries.sweep(cases, 1, "quick", 0), len(cases), None)
    assert [t.reached for t in told] == ["verified", "proved", "", "verified"]
    assert [t.code for t in told] == ["", "", "died", ""]
    assert "proved and not run 1, verified 1" in "\n".join(coverage_libraries.summary(told))
    assert "1 of 3, 1 not run" in "\n".join(coverage_libraries.table(told))
    assert "dies" in capsys.readouterr().out


def test_rows_of_libraries_are_installed_by_their_wheels(capsys: pytest.CaptureFixture[str]) -> None:
    lines = Path(coverage_libraries.__file__).with_name("library_models").joinpath("wheels.txt").read_text().split()
    assert all(re.fullmatch(r"[\w.-]+==[\w.+-]+", line) for line in lines)
    pinned = {re.sub(r"[-_.]+", "-", line.partition("==")[0]).lower() for line in lines}
    rows = coverage_libraries.ROWS.values()
    libraries = {re.sub(r"[-_.]+", "-", row.library).lower() for row in rows}
    assert len(rows) >= 250 and libraries - pinned <= {"torchmetrics"}  # that one is a dependency of our tests
    assert not coverage_libraries.cases_of(["x-transformers"], ["tp=2"]) or "x_transformers" in sys.modules
    assert f"pip install --no-deps -r {coverage_libraries.WHEELS}" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="no model or library: nobody"):
        coverage_libraries.cases_of(["nobody"], ["tp=2"])


def test_refused_pipelines_are_run_with_one_micro_batch() -> None:
    case = _case("norm", "pp=2")
    said = "aten.x needs the values of all micro-batches at once; use one micro-batch (--micro-batches 1)"
    told = coverage_libraries.Told("norm", "own", False, "pp=2", "traced", None, 1.0, "", "micro_batches_coupled", said)
    assert [c.micro_batches for c in coverage_libraries.again([told], [case])] == [1]
