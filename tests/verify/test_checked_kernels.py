"""Sizes that a kernel of torch does not check are checked before it runs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from op_registry.samples import SAMPLES, Sample, replace_tensors

from nnscaler.runtime.communication.communicator import ProgramError
from tests.sampling import every
from verify.evidence.oracle.size_checked_kernels import CheckedKernels, runs_checked

aten = torch.ops.aten
Attention = Callable[..., Tensor]
CALLS: dict[str, Attention] = {
    "packet": lambda q, k, v: aten.scaled_dot_product_attention(q, k, v, scale=0.5),
    "overload": aten.scaled_dot_product_attention.default,
    "keywords": lambda q, k, v: torch.nn.functional.scaled_dot_product_attention(query=q, key=k, value=v),
    "kernel": lambda q, k, v: aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)[0],
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize(("keys", "values"), [(4, 7), (7, 4)])
def test_attention_of_more_or_fewer_values_than_keys(call: Attention, keys: int, values: int) -> None:
    whole = torch.randn(2, 3, 7, 8)  # the rows that a slice lacks are where the kernel would look for them
    with CheckedKernels(), pytest.raises(ProgramError, match=f"{keys} keys and {values} values"):
        call(whole, whole[:, :, :keys], whole[:, :, :values])


@pytest.mark.parametrize("call", every(4, CALLS.values()), ids=CALLS)
def test_attention_in_a_graph_of_torch_compile(call: Attention) -> None:
    """Where nothing is wrong the checks end no graph, or `verify-plan --compile` would verify another program."""
    whole = torch.randn(2, 3, 7, 8)
    compiled = torch.compile(lambda q, k, v: 2 * call(q, k, v), backend="eager", fullgraph=True)
    with CheckedKernels():
        assert torch.equal(compiled(whole, whole, whole), 2 * call(whole, whole, whole))
        with pytest.raises(ProgramError, match="4 keys and 7 values"):
            torch.compile(lambda q, k, v: 2 * call(q, k, v), backend="eager")(whole, whole[:, :, :4], whole)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_attention_that_is_right(call: Attention) -> None:
    query, key, value = torch.randn(2, 3, 5, 8), torch.randn(2, 3, 7, 8), torch.randn(2, 3, 7, 8)
    with CheckedKernels():
        found = call(query, key, value)
    assert torch.equal(found, call(query, key, value))


CHECKED = ("scaled_dot_product_attention", "_weight_norm", "native_batch_norm", "_native_batch_norm")
SAMPLES_OF_THEM = [s for s in SAMPLES if s.operator.removeprefix("aten.").startswith(CHECKED)]


@pytest.mark.parametrize("sample", SAMPLES_OF_THEM, ids=str)
def test_every_right_call_runs(sample: Sample) -> None:
    name, _, overload = sample.operator.removeprefix("aten.").partition(".")
    call = getattr(getattr(aten, name), overload)
    generator = torch.Generator().manual_seed(0)
    args, named = replace_tensors((list(sample.args), dict(sample.kwargs)), lambda t: t.make(generator))
    with CheckedKernels():
        assert call(*args, **named) is not None


SHORT = torch.rand(3)
FULL = torch.rand(6)
WRONG: dict[str, Callable[[], object]] = {
    "_weight_norm of": lambda: aten._weight_norm(torch.randn(6, 4), torch.randn(3, 1), 0),
    "_weight_norm_interface": lambda: aten._weight_norm_interface.default(torch.randn(6, 4), torch.randn(3, 1), 0),
    "native_batch_norm": lambda: aten.native_batch_norm(torch.randn(4, 6), FULL, FULL, SHORT, FULL, True, 0.1, 1e-5),
    "_native_batch_norm_legit_no_training": lambda: aten._native_batch_norm_legit_no_training(
        torch.randn(4, 6), FULL, FULL, FULL, SHORT, 0.1, 1e-5
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_tensors_that_are_too_short(name: str) -> None:
    with CheckedKernels(), pytest.raises(ProgramError, match=rf"{name}.*does not check this on CPUs"):
        WRONG[name]()


def test_a_kernel_whose_error_is_caught_has_run() -> None:
    """It may check its sizes this time, and read past its tensors the next."""
    a, x = torch.randn(3, 3), torch.randn(3, 4)

    def refused() -> object:
        with contextlib.suppress(RuntimeError):
            return aten._linalg_solve_ex(a, x[:2])
        return x.sum()

    assert not runs_checked(refused)
    assert runs_checked(x.sum)
