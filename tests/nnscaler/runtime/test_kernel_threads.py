"""Kernels of small models run on one thread; what a process has set comes back."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from nnscaler.runtime.kernel_threads import kernel_threads
from nnscaler.tracing import trace

LARGE = 1 << 24


@pytest.fixture(autouse=True)
def _three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def held(*sizes: int) -> nn.Module:
    """A module with buffers of these sizes."""
    module = nn.Module()
    for number, size in enumerate(sizes):
        module.register_buffer(str(number), torch.empty(size, device="meta"))
    return module


def test_those_of_a_large_model_have_the_threads_of_the_process() -> None:
    with kernel_threads(held(LARGE - 1)):
        assert torch.get_num_threads() == 1
        with pytest.raises(ValueError, match="inside"), kernel_threads(held(LARGE - 1, 1)):
            assert torch.get_num_threads() == 3
            raise ValueError("inside")
        assert torch.get_num_threads() == 1
    with kernel_threads(nn.LazyLinear(2)):  # of no size yet
        assert torch.get_num_threads() == 1
    with kernel_threads(held(LARGE)):
        assert torch.get_num_threads() == 3
        with kernel_threads():
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 3
    assert torch.get_num_threads() == 3


def test_a_small_model_is_traced_and_checked_on_one() -> None:
    class Model(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(torch.get_num_threads())
            return super().forward(x).sum()

    seen: list[int] = []
    trace(Model(3, 2), (torch.ones(4, 3),))
    assert len(seen) > 1 and {*seen} == {1} and torch.get_num_threads() == 3
