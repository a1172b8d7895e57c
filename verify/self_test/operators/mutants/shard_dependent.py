"""Functions whose result depends on the size of the shard, or on where in it an element stands."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from verify.self_test.operators.mutants.mutant import SHARDS, Family, Function, OperatorMutant

_FAMILY = Family("rank and size")
_BOTH = "a b -> a b"
_SMALL = 40


def _rows(x: Tensor) -> Tensor:
    return torch.arange(x.shape[0], dtype=x.dtype)[:, None]


def _first_row_zero(x: Tensor) -> Tensor:
    y = x.clone()
    y[0] = 0
    return y


def _quantised(x: Tensor) -> Tensor:
    step = x.detach().abs().max().clamp(min=1e-3) / 127
    return (x / step).round().detach() * step + (x - x.detach())


def _nearest(x: Tensor) -> Tensor:
    return torch.nn.functional.interpolate(x[None], size=x.shape[1] + 1, mode="nearest")[0][:, :-1]


def _twice(x: Tensor) -> Tensor:
    return x * 2.0


def _same(x: Tensor) -> Tensor:
    return x * 1.0


# name, wrong, right; both dims are claimed
_ELEMENTWISE: tuple[tuple[str, Function, Function], ...] = (
    ("divided by its size", lambda x: x / x.numel(), lambda x: x / 60),
    ("divided by its rows", lambda x: x / x.shape[0], lambda x: x / 12),
    ("scaled by the root of its columns", lambda x: x * x.shape[1] ** -0.5, lambda x: x * 0.25),
    ("less its own mean over rows", lambda x: x - x.mean(0), lambda x: x - 0.25),
    ("divided by its own maximum", lambda x: x / x.abs().max(), lambda x: x / 3),
    ("divided by its own norm", lambda x: x / x.norm(), lambda x: x / 30),
    ("clipped by its own norm", lambda x: x * (1 / x.norm()).clamp(max=1.0), lambda x: x * 0.1),
    ("flipped", lambda x: x.flip(0), _same),
    ("rolled", lambda x: x.roll(1, 0), _same),
    ("running sum", lambda x: x.cumsum(0), _same),
    ("running maximum", lambda x: x.cummax(0).values, _same),
    ("sorted", lambda x: x.sort(0).values, _same),
    ("shifted by a row", lambda x: torch.cat([torch.zeros_like(x[:1]), x[:-1]]), _same),
    ("differences of neighbours", lambda x: x - x.roll(1, 1), _same),
    ("averaged over a window", lambda x: torch.nn.functional.avg_pool1d(x, 3, 1, 1), _same),
    ("resampled", _nearest, _same),
    ("softmax", lambda x: x.softmax(1), torch.sigmoid),
    ("softmax of rows and columns", lambda x: x.flatten().softmax(0).view(x.shape), torch.sigmoid),
    ("upper triangle", torch.triu, _same),
    ("causal mask of its own", lambda x: x.masked_fill(_rows(x) < torch.arange(x.shape[1]), 0.0), _same),
    ("positions without an offset", lambda x: x + _rows(x), lambda x: x + 1),
    ("first row zeroed", _first_row_zero, _same),
    ("last column doubled", lambda x: torch.cat([x[:, :-1], 2 * x[:, -1:]], 1), _same),
    ("every second row negated", lambda x: x * (1 - 2 * (_rows(x) % 2)), _same),
    ("every third row negated", lambda x: x * (1 - 2 * (_rows(x) % 3 == 0).to(x.dtype)), _same),
    ("every fourth row negated", lambda x: x * (1 - 2 * (_rows(x) % 4 == 0).to(x.dtype)), _same),
    ("largest of each column kept", lambda x: x * (x == x.amax(0)), _same),
    ("below its own median zeroed", lambda x: x * (x > x.median()), _same),
    ("quantised by its own maximum", _quantised, lambda x: x * 1.0),
    ("another branch below four rows", lambda x: _twice(x) if x.shape[0] < 4 else x * 1.0, _same),
    ("another branch below eight rows", lambda x: _twice(x) if x.shape[0] < 8 else x * 1.0, _same),
    ("another branch on odd rows", lambda x: _twice(x) if x.shape[0] % 2 else x * 1.0, _same),
    ("another branch on four rows", lambda x: _twice(x) if x.shape[0] == 4 else x * 1.0, _same),
    ("doubled on three rows", lambda x: x * (1 + (_rows(x).amax() == 2).to(x.dtype)), _same),
    ("another branch on one row", lambda x: _twice(x) if x.shape[0] == 1 else x * 1.0, _same),
    ("another branch on small tensors", lambda x: _twice(x) if x.numel() < _SMALL else x * 1.0, _same),
    ("dims of one dropped", lambda x: x.squeeze() * 1.0, _same),
    ("first dim dropped if one", lambda x: x.squeeze(0) * 1.0, _same),
)


def _wide() -> tuple[Tensor, ...]:
    return (torch.randn(12, 18),)


def _heads(x: Tensor) -> Tensor:
    return x.view(x.shape[0], 4, -1).softmax(-1).flatten(1)


def _others() -> Iterator[OperatorMutant]:
    make = _FAMILY.mutant
    pairs = "another branch on small tensors, given"
    yield make(pairs, _BOTH, lambda x: _twice(x) if x.numel() <= _SMALL else x * 1.0, _same, SHARDS, _wide)
    yield make("the first half taken", "(a 2) b -> a b", lambda x: x[: x.shape[0] // 2] * 1.0, lambda x: x[::2] * 1.0)
    yield make("every second taken", "(2 a) b -> a b", lambda x: x[::2] * 1.0, lambda x: x[: x.shape[0] // 2] * 1.0)
    yield make(
        "a number of heads of its own", "a (h d^) -> a (h d^)",
        lambda x, h: _heads(x) + 0.0 * h, lambda x, h: x.view(x.shape[0], h, -1).softmax(-1).flatten(1), SHARDS,
        lambda: {"x": torch.randn(5, 48), "h": 12},
    )  # fmt: skip
    yield make(
        "a number of blocks of its own", "(a 3) b -> a b",
        lambda x: x.view(4, -1, x.shape[1]).amax(1), lambda x: x.view(-1, 3, x.shape[1]).amax(1), SHARDS,
        lambda: (torch.randn(12, 6),),
    )  # fmt: skip
    yield make("gradient of its own size", _BOTH, lambda x: x.detach() + (x - x.detach()) / x.shape[0], _same)
    yield make("gradient averaged over its own rows", _BOTH, _averaged_gradient, _same)
    yield make("gradient from the neighbouring row", _BOTH, _rolled_gradient, _same)
    yield make("broadcast from a row of its own", "a b, b -> a b", lambda x, w: x + w * x[:1], lambda x, w: x + w)
    yield make("first of a batch for all", "b m k+, b k+ n -> b m n", lambda x, w: x @ w[:1], torch.bmm)
    yield make(
        "normalised over the batch", "b c^ -> b c^",
        lambda x: (x - x.mean(0)) / (x.var(0) + 1e-5).sqrt(),
        lambda x: (x - x.mean(1, keepdim=True)) / (x.var(1, keepdim=True) + 1e-5).sqrt(),
    )  # fmt: skip
    yield make(
        "attention over the batch", "b q^ d^ -> b q^ d^",
        lambda x: torch.softmax(torch.einsum("bqd,cqd->qbc", x, x), -1).transpose(0, 1)[:, :, :1] * x,
        lambda x: torch.softmax(x @ x.transpose(1, 2), -1) @ x,
    )  # fmt: skip


def _averaged_gradient(x: Tensor) -> Tensor:
    """The gradient is right where its cotangent is the same everywhere."""
    mean = x.mean(0).expand(x.shape)
    return x.detach() + (mean - mean.detach())


def _rolled_gradient(x: Tensor) -> Tensor:
    """As above."""
    other = x.roll(1, 0)
    return x.detach() + (other - other.detach())


def mutants() -> tuple[OperatorMutant, ...]:
    """Every function that depends on its shard's size."""
    elementwise = (_FAMILY.mutant(name, _BOTH, wrong, right) for name, wrong, right in _ELEMENTWISE)
    return (*elementwise, *_others())
