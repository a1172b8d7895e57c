"""Architectures of `transformers` through the whole path: traced, split, generated, proved, run and compared.

A sample is in the default run; `-m long` takes all of them (benchmarks/coverage.py prints the figures).
"""

from __future__ import annotations

import importlib
import inspect

import pytest

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
