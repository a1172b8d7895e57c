"""`as_strided` becomes views that mean the same wherever a tensor lies in memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from nnscaler.errors import NnscalerError
from nnscaler.tracing import trace
from nnscaler.tracing.strided_views import find_window
from tests.random_plans import Mesh, random_plans


class Strided(nn.Module):
    """Windows over the rows of something that does not lie in memory as it is indexed."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.randn(6, 10))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x @ self.weight).square().mean()


def chunks(x: Tensor) -> Tensor:
    """Windows of 4 rows, every 2 rows: (heads, batch, 5, 4, 5) of (batch, 12, heads, 5)."""
    b, s, _ = x.shape
    heads = x.view(b, s, 2, 5).permute(2, 0, 1, 3).reshape(2, b, s // 4, 4, 5)
    size, stride = list(heads.shape), list(heads.stride())
    size[2], stride[2] = 2 * size[2] - 1, stride[2] // 2
    return heads.as_strided(size, stride) * torch.arange(1, 5).view(1, 1, 1, 4, 1)


def fewer(x: Tensor) -> Tensor:
    """Not as many windows as there are."""
    return x.contiguous().as_strided((4, 3, 3, 10), (120, 20, 10, 1))


SAMPLE = {"x": torch.randn(4, 12, 6)}


@pytest.mark.parametrize("function", [chunks, fewer])
def test_windows_are_right_under_random_plans(function: Callable[[Tensor], Tensor]) -> None:
    graph = trace(Strided(function), SAMPLE).graph
    operators = [op.operator for op in graph.operations]
    assert "aten.unfold.default" in operators and not any("as_strided" in name for name in operators)
    told = list(random_plans(lambda: Strided(function), SAMPLE, range(4), (Mesh((("a", 2), ("b", 2))),)))
    assert len(told) == 4 and all(t.verdict.passes for t in told), told


def test_the_same_view_is_no_operation() -> None:
    graph = trace(Strided(lambda x: x.as_strided(x.size(), x.stride())), SAMPLE).graph
    assert len(graph.operations) == len(trace(Strided(lambda x: x), SAMPLE).graph.operations)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.contiguous().as_strided((3, 4), (7, 3)),  # elements here and there
        lambda x: x.contiguous().as_strided((4, 10, 12), (120, 1, 10), 0).flip(0).as_strided((2, 5), (7, 2)),
        lambda x: x.contiguous()[:, 1:].as_strided((4, 11, 10), (120, 10, 1), 0),  # another offset
    ],
)
def test_other_uses_of_memory_are_refused(function: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(NnscalerError, match="depends on how the tensor lies") as caught:
        trace(Strided(function), SAMPLE)
    assert caught.value.code == "trace_failed" and caught.value.help


def test_a_window_that_reaches_beyond_the_dim_is_none() -> None:
    given = ((3, 8), (4, 2), (2, 1))
    assert find_window(given, ((5, 4), (4, 2), (2, 1))) == (0, 2, 4, 2)
    assert find_window(given, ((6, 4), (4, 2), (2, 1))) is None
    assert find_window(given, ((5, 3), (4, 2), (2, 1))) is None
