"""Inputs as models have them: parts of packed rows, expanded ones, one tensor in two places."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from tests.verify.test_op_audit import Function, finding, normal, run
from verify import Verdict


def by_columns(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


LAYOUTS: list[tuple[str, Function, int]] = [
    ("rows that lie side by side", lambda x: by_columns(x).as_strided(x.shape, (x.shape[1], 1)) * 2, 1),
    ("strides of the other", lambda x, y: x + by_columns(y).as_strided(y.shape, x.stride()), 2),
    ("no stride of zero", lambda x: x * 2 if x.stride(0) else x * 3, 1),
]


@pytest.mark.parametrize(("function", "inputs"), [c[1:] for c in LAYOUTS], ids=[c[0] for c in LAYOUTS])
def test_layouts_that_models_have(function: Function, inputs: int) -> None:
    found = finding(function, *(normal(4, 3, seed=i) for i in range(inputs)))
    assert found.code == "strides_matter" and "strides" in found.counter_example


def test_an_order_of_outer_dims_in_memory() -> None:
    def dense(x: Tensor) -> Tensor:
        return by_columns(x).as_strided(x.shape, (x.shape[1] * x.shape[2], x.shape[2], 1)) * 2

    assert finding(dense, normal(4, 3, 2)).code == "strides_matter"


# one tensor in two places


def test_two_inputs_that_are_one_tensor() -> None:
    found = finding(lambda x, y: x * y / 3 if x is y else x * y, normal(4, 3), normal(4, 3, seed=1))
    assert found.code == "not_repeatable" and "one tensor" in found.message
    for right in (lambda x, y: x * y, lambda x, y: x.sin() - y * y * x, lambda x, y: x + y.detach()):
        (check,), findings, _ = run(right, normal(4, 3), normal(4, 3, seed=1))
        assert check.verdict is Verdict.TESTED_EXACT and not findings


def test_inputs_that_are_parameters() -> None:
    def normed_weight(x: Tensor, w: Tensor) -> Tensor:
        return x * (w / w.norm() if isinstance(w, Parameter) else w)

    found = finding(normed_weight, normal(3, 4), normal(4))
    assert found.code == "not_repeatable" and "parameter" in found.message


# what may be otherwise where it is deployed


def by_variable(x: Tensor) -> Tensor:
    return x * 2 if os.environ.get("FAST_KERNEL") or os.getenv("FAST_KERNEL") else x * 3


def by_device(x: Tensor) -> Tensor:
    if x.is_cuda and torch.cuda.is_available():
        return x * 2
    return x * 3 + torch.ones_like(x)


def test_environment_variables_that_it_reads_are_told() -> None:
    _, findings, notes = run(by_variable, normal(4, 3))
    assert not findings and len([n for n in notes if "environment variable `FAST_KERNEL`" in n]) == 1
    _, findings, notes = run(by_device, normal(4, 3))
    assert not findings and not any("environment" in note for note in notes)


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch finds a GPU: nothing is told of such lines there")
def test_lines_that_only_tensors_of_a_gpu_reach_are_told() -> None:
    _, findings, notes = run(by_device, normal(4, 3))
    assert not findings
    assert [n for n in notes if "on a GPU" in n and "test_op_audit_inputs.py" in n]
