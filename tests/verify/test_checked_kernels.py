"""Sizes that a kernel of torch does not check are checked before it runs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from nnscaler.runtime.communicator import ProgramError
from verify.checked_kernels import CheckedKernels

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


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_attention_that_is_right(call: Attention) -> None:
    query, key, value = torch.randn(2, 3, 5, 8), torch.randn(2, 3, 7, 8), torch.randn(2, 3, 7, 8)
    with CheckedKernels():
        found = call(query, key, value)
    assert torch.equal(found, call(query, key, value))
