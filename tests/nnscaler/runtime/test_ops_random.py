"""Random numbers of the runtime: pieces of one logical draw, and the statistics of each dropout."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from nnscaler.layout import Sharded
from nnscaler.runtime import ops
from nnscaler.runtime.stage_base_class import RunContext

SHAPE = (12, 8, 50)
STATES = {"dp": Sharded(0), "tp": Sharded(1, outer=2)}


def stage(dp: int, tp: int, *, dropout: bool = True) -> Any:
    """As much of a stage as drawing needs."""
    return SimpleNamespace(
        context=RunContext(3, dropout),
        device=torch.device("cpu"),
        sizes=lambda: {"dp": 3, "tp": 2},
        coordinates=lambda: {"dp": dp, "tp": tp},
    )


def piece(whole: Tensor, dp: int, tp: int) -> Tensor:
    return whole[dp * 4 : dp * 4 + 4].reshape(4, 2, 2, 2, 50)[:, :, tp].reshape(4, 4, 50)


def dropped(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def draw(size: tuple[int, ...], dtype: torch.dtype, *place: Any) -> Tensor:
        return function(torch.ones(size, dtype=dtype), 0.3, *place)

    return draw


DRAWS = {
    "random_uniform": ops.random_uniform,
    "random_normal": ops.random_normal,
    **{
        f.__name__: dropped(f) for f in (ops.dropout, ops.feature_dropout, ops.alpha_dropout, ops.feature_alpha_dropout)
    },
}


@pytest.mark.parametrize("name", DRAWS)
def test_a_shard_draws_its_piece_of_the_whole(name: str) -> None:
    draw = DRAWS[name]
    whole = draw(SHAPE, torch.float32, stage(0, 0), "op", {}, SHAPE)
    for dp in range(3):
        for tp in range(2):
            mine = draw((4, 4, 50), torch.float32, stage(dp, tp), "op", STATES, SHAPE)
            assert torch.equal(mine, piece(whole, dp, tp)), (dp, tp)
    assert not torch.equal(whole, draw(SHAPE, torch.float32, stage(0, 0), "other", {}, SHAPE))


def test_a_graph_is_given_the_shape_of_its_draw() -> None:
    """Ranks with parts of unequal sizes may find each other's graphs, by what nodes are given."""
    arguments = ([0], "op", "tp Sharded(0, sizes=(4, 3))", [7])
    with FakeTensorMode():
        for size in (4, 3):
            assert torch.ops.nnscaler.noise(*arguments, [size], torch.device("cpu")).shape == (size,)


@pytest.mark.parametrize("name", ["dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout"])
def test_dropouts_are_torch_s(name: str) -> None:
    shape = (200, 100, 4)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    expected = getattr(torch, name)(x, 0.3, True)
    found = getattr(ops, name)(x, 0.3, stage(0, 0), "op", {}, shape)
    assert abs(found.mean() - expected.mean()) < 0.03 and abs(found.std() - expected.std()) < 0.03
    assert torch.equal(getattr(ops, name)(x, 0.3, stage(0, 0, dropout=False), "op", {}, shape), x)
    constant = (found == found[..., :1]).all(-1).double().mean()  # channels that are dropped whole
    assert (0.2 < constant < 0.4) if "feature" in name else constant < 0.02


def test_a_compared_run_draws_by_place_alone() -> None:
    here = ops.random_normal(SHAPE, torch.float64, stage(0, 0, dropout=False), "a", {}, SHAPE)
    assert torch.equal(here, ops.random_normal(SHAPE, torch.float64))
    assert torch.equal(here, ops.random_normal(SHAPE, torch.float64, stage(0, 0, dropout=False), "b", {}, SHAPE))
    assert torch.isfinite(here).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_grouped_product(dtype: torch.dtype) -> None:
    a = torch.randn(7, 5, dtype=dtype, requires_grad=True)
    b = torch.randn(3, 5, 4, dtype=dtype, requires_grad=True)
    out = ops.grouped_mm(a, b, torch.tensor([2, 2, 6], dtype=torch.int32))
    expected = torch.cat([a[:2] @ b[0], a[2:6] @ b[2], torch.zeros(1, 4, dtype=dtype)])
    torch.testing.assert_close(out, expected)
    (gradient,) = torch.autograd.grad(out.sum(), b)
    assert gradient[0].any() and not gradient[1].any()
