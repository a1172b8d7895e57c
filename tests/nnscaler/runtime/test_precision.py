"""`dtypes` under the precision of a run."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nnscaler.runtime import ProgramError, Simulator, dtypes
from nnscaler.runtime.training.autocast_on_any_device import dtype_named, in_precision, precision_of_run


def test_dtypes_are_torchs_own_unless_the_run_has_a_precision() -> None:
    assert dtypes.bfloat16 is torch.bfloat16
    with precision_of_run("float64"):
        assert dtypes.bfloat16 is dtypes.float32 is torch.float64
        assert dtypes.complex64 is torch.complex128 and dtypes.int32 is torch.int32
    assert dtypes.float32 is torch.float32


def test_an_exact_run_gives_code_the_dtypes_that_it_asks_for() -> None:
    """Also in a backward that is written by hand."""

    class Halved(torch.autograd.Function):
        @staticmethod
        def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
            return x.float().half()

        @staticmethod
        def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient.to(torch.float32)

    x = torch.full((2,), 1 / 3, dtype=torch.float64, requires_grad=True)
    for precision, asked, exact in (("float64", True, True), ("float64", False, False), ("float32", True, False)):
        with precision_of_run(precision, asked):
            result = Halved.apply(x)
            (gradient,) = torch.autograd.grad(result, x, torch.full_like(result, 1 / 3))
        assert (result.dtype == torch.float64) is torch.equal(result, x) is torch.equal(gradient, x) is exact


def test_each_thread_has_its_own_precision() -> None:
    def run(communicator) -> torch.dtype:
        with precision_of_run((None, "float64")[communicator.rank]):
            communicator.barrier((0, 1))
            return dtypes.float32

    assert Simulator(2).run(run) == [torch.float32, torch.float64]


def test_names_that_are_no_dtype() -> None:
    with pytest.raises(AttributeError, match="no dtype is called 'float33'"):
        dtypes.float33  # noqa: B018
    with pytest.raises(ProgramError, match="'nn'"):
        dtype_named("nn")
    assert in_precision(torch.bool, "float64") is torch.bool
