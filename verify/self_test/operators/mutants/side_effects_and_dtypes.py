"""Functions with side effects, hidden inputs, or bugs that only some values, dtypes, strides or gradients show."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verify.self_test.operators.mutants.mutant import (
    DERIVATIVE,
    DTYPE,
    EITHER,
    FIT,
    MUTATED,
    RANDOM,
    SHARDS,
    STRIDES,
    Family,
    Function,
    OperatorMutant,
)
from verify.self_test.operators.mutants.right_backwards_and_mistakes import Gradients, raw, with_backward

_FAMILY = Family("state and dtype")
_BOTH = "a b -> a b"


def _same(x: Tensor) -> Tensor:
    return x * 1.0


def _then(change: Callable[[Tensor], Any]) -> Function:
    """Change its input, and return twice what it was."""

    def operator(x: Tensor) -> Tensor:
        y = x * 2.0
        change(x)
        return y

    return operator


def _numpy_write(x: Tensor) -> None:
    x.detach().numpy()[0] = 7.0


def _no_grad(x: Tensor) -> None:
    with torch.no_grad():
        x.clamp_(-1, 1)


_MUTATIONS: tuple[tuple[str, Function], ...] = (
    ("adds one through data", _then(lambda x: x.data.add_(1.0))),
    ("scales through detach", _then(lambda x: x.detach().mul_(0.5))),
    ("clamps without gradient", _then(_no_grad)),
    ("writes through numpy", _then(_numpy_write)),
    ("adds zero through detach", _then(lambda x: x.detach().add_(0.0))),
    ("writes as an output argument", _then(lambda x: torch.neg(x.detach(), out=x.detach()))),
    ("sorts in place", _then(lambda x: x.data.copy_(x.detach().sort(1).values))),
    ("zeroes its first row", _then(lambda x: x.data[0].zero_())),
)


def _updates_statistics(x: Tensor, mean: Tensor) -> Tensor:
    mean.data.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
    return x * 2.0


def _shifts_ids(weight: Tensor, ids: Tensor) -> Tensor:
    found = weight[ids]
    ids.clamp_(min=1)
    return found


def _table() -> tuple[Tensor, Tensor]:
    return torch.randn(9, 5), torch.tensor([0, 8, 3, 3, 5, 1, 8, 0, 2, 3, 7, 0])


def _reseeding(x: Tensor) -> Tensor:
    torch.manual_seed(1)
    return x * 1.0


def _restoring(x: Tensor) -> Tensor:
    state = torch.get_rng_state()
    noise = torch.randn_like(x)
    torch.set_rng_state(state)
    return x + noise


def _private_generator() -> Function:
    generator = torch.Generator().manual_seed(3)
    return lambda x: x + torch.randn(x.shape, generator=generator, dtype=x.dtype)


_RANDOM: tuple[tuple[str, Function], ...] = (
    ("dropout", lambda x: torch.dropout(x, 0.5, True)),
    ("noise added", lambda x: x + torch.randn_like(x)),
    ("noise added, very small", lambda x: x + 1e-9 * torch.randn_like(x)),
    ("noise in the gradient only", with_backward(lambda x: x * 1.0, lambda g, y, x: (g + torch.randn_like(g),))),
    ("noise drawn and not used", lambda x: x + 0.0 * torch.randn_like(x)),
    ("seeds the generator", _reseeding),
    ("draws, and restores the generator", _restoring),
    ("numpy's generator", lambda x: x + float(np.random.default_rng().normal())),
    ("numpy's global generator", lambda x: x + float(np.random.normal())),
    ("Python's generator", lambda x: x + random.random()),
    ("permutes rows", lambda x: x[torch.randperm(x.shape[0])]),
    ("samples from rows", lambda x: torch.where(torch.rand_like(x) < x.sigmoid(), x, 0.0)),
)


def _counting() -> Function:
    calls = [0]

    def operator(x: Tensor) -> Tensor:
        calls[0] += 1
        return x * calls[0]

    return operator


def _remembering_shape() -> Function:
    kept: dict[tuple[int, ...], Tensor] = {}

    def operator(x: Tensor) -> Tensor:
        return x + kept.setdefault(tuple(x.shape), x.detach().clone())

    return operator


def _remembering_size() -> Function:
    kept: list[int] = []

    def operator(x: Tensor) -> Tensor:
        if not kept:
            kept.append(x.shape[0])
        return x * (1.0 if x.shape[0] >= kept[0] else 0.5)

    return operator


def _running() -> Function:
    total = torch.zeros((), dtype=torch.float64)

    def operator(x: Tensor) -> Tensor:
        y = x - total.to(x.dtype)
        total.add_(0.1 * x.detach().double().mean())
        return y

    return operator


def _toggling() -> Function:
    state = [1.0]

    def operator(x: Tensor) -> Tensor:
        state[0] = -state[0]
        return x * state[0]

    return operator


def _cached_table() -> Function:
    """Keep a table for each length, as rotary embeddings do. This operator is right."""
    kept: dict[tuple[int, torch.dtype], Tensor] = {}

    def operator(x: Tensor) -> Tensor:
        key = (x.shape[1], x.dtype)
        if key not in kept:
            kept[key] = torch.full(key[:1], 0.5, dtype=x.dtype, device=x.device)
        return x * kept[key]

    return operator


_STATE: tuple[tuple[str, Callable[[], Function]], ...] = (
    ("counts its calls", _counting),
    ("remembers the first tensor of a shape", _remembering_shape),
    ("remembers its first size", _remembering_size),
    ("running mean of its own", _running),
    ("changes sign from call to call", _toggling),
    ("private generator", _private_generator),
)


def _wide_when_small(x: Tensor) -> Tensor:
    return x.float() if x.dtype == torch.bfloat16 and x.shape[0] < 8 else x * 1.0


_DTYPES: tuple[tuple[str, Function], ...] = (
    ("returns float64", lambda x: x.double()),
    ("returns the default dtype", lambda x: x.to(torch.get_default_dtype())),
    ("adds ones of the default dtype", lambda x: x + torch.ones(x.shape[1])),
    ("adds numpy's dtype", lambda x: x + torch.from_numpy(np.ones(x.shape[1]))),
    ("float32 for few rows of bfloat16", _wide_when_small),
    ("float32 where there are few rows", lambda x: x.float() if x.shape[0] < 8 else x * 1.0),
)


def _in(dtype: torch.dtype) -> Function:
    """Wrong in one dtype only."""
    return lambda x: x / x.shape[0] if x.dtype == dtype else x * 1.0


def _gradient_in(dtype: torch.dtype, share: bool) -> Function:
    """A backward that is wrong in one dtype only: scaled by its own rows, or by 2."""

    def backward(g: Tensor, _y: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        if g.dtype != dtype:
            return (2 * g * x,)
        return (2 * g * x / x.shape[0] if share else g * x,)

    return with_backward(lambda x: x * x, backward)


def _mixed(x: Tensor) -> Tensor:
    """Return which rows have some zeros."""
    zeros = x == 0
    return zeros.any(1, True) & ~zeros.all(1, True)


_VALUES: tuple[tuple[str, Function], ...] = (
    ("wrong for negative numbers", lambda x: torch.where(x < 0, x / x.shape[0], x)),
    ("wrong for positive numbers", lambda x: torch.where(x > 0, x / x.shape[0], x)),
    ("wrong for zeros", lambda x: torch.where(x == 0, float(x.shape[0]), x)),
    ("wrong for zeros beside others", lambda x: torch.where(_mixed(x), x / x.shape[0], x)),
    ("wrong gradient for zeros", lambda x: torch.where(x == 0, x * x.shape[0], x)),
    ("wrong for numbers above 2.5", lambda x: torch.where(x > 2.5, x / x.shape[0], x)),
    ("wrong for whole numbers", lambda x: torch.where(x == x.round(), x / x.shape[0], x)),
    ("wrong for fractions", lambda x: torch.where(x != x.round(), x / x.shape[0], x)),
    ("wrong where a row has no zero", lambda x: torch.where((x != 0).all(1, True), x / x.shape[0], x)),
    ("wrong by the number of its non-zeros", lambda x: x / (x != 0).sum().clamp(min=1) * 12),
    ("wrong where its sum is negative", lambda x: x * (1 + (x.sum() < 0))),
    ("wrong in float32", _in(torch.float32)),
    ("wrong in bfloat16", _in(torch.bfloat16)),
    ("wrong in float64", _in(torch.float64)),
    ("wrong on odd rows above three", lambda x: x * (1 + (x.shape[0] > 3 and x.shape[0] % 2))),
)


def _product(gradients: Callable[[Tensor, Tensor, Tensor, tuple[bool, ...]], Gradients]) -> Function:
    """`x * w` with gradients that depend on which of them are wanted: of (cotangent, x, w, wanted)."""

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
            ctx.save_for_backward(x, w)
            return x * w

        @staticmethod
        def backward(ctx: Any, g: Any) -> Any:
            x, w = ctx.saved_tensors
            return tuple(gradients(g, x, w, ctx.needs_input_grad))

    apply: Function = Product.apply
    return apply


def _only_with_the_first(g: Tensor, x: Tensor, w: Tensor, wanted: tuple[bool, ...]) -> Gradients:
    return (g * w, (g * x).sum(0)) if wanted[0] else (None, None)


def _compacted(g: Tensor, x: Tensor, w: Tensor, wanted: tuple[bool, ...]) -> Gradients:
    found = [d for d, one in zip((g * w, (g * x).sum(0)), wanted, strict=True) if one]
    return (*found, *[None] * (2 - len(found)))


def _doubled_alone(g: Tensor, x: Tensor, w: Tensor, wanted: tuple[bool, ...]) -> Gradients:
    return g * w * (1 if wanted[1] else 2), (g * x).sum(0)


def _rows_alone(g: Tensor, x: Tensor, w: Tensor, wanted: tuple[bool, ...]) -> Gradients:
    return g * w, (g * x).sum(0) / (1 if wanted[0] else x.shape[0])


_SUBSETS: tuple[tuple[str, Function, frozenset[str]], ...] = (
    ("no gradient of w unless x wants one", _product(_only_with_the_first), DERIVATIVE),
    ("gradient of x doubled unless w wants one", _product(_doubled_alone), DERIVATIVE),
    ("gradients move up where one is not wanted", _product(_compacted), EITHER | FIT),
    ("mean over its own rows unless x wants a gradient", _product(_rows_alone), EITHER),
    ("another result unless x wants a gradient", lambda x, w: x * w if x.requires_grad else x * w / x.shape[0], SHARDS),
)


def _branching(x: Tensor, w: Tensor) -> Tensor:
    return x * w if x.is_contiguous() else x * w * 2


def _row_stride(x: Tensor, w: Tensor) -> Tensor:
    return x * w * (x.stride(0) / max(x.shape[1], 1)) if x.shape[0] > 1 else x * w


_STRIDES: tuple[tuple[str, str, Function, Function], ...] = (
    ("reads its memory as if contiguous", "a b, b -> a b", lambda x, w: raw(x) * w, lambda x, w: x * w),
    ("reads a matrix as if contiguous", "m k+, k+ n -> m n", lambda x, w: x @ raw(w), torch.matmul),
    ("another branch on strided memory", "a b, b -> a b", _branching, lambda x, w: x * w),
    ("scaled by its stride", "a b, b -> a b", _row_stride, lambda x, w: x * w),
)


def _grouped() -> Iterator[OperatorMutant]:
    make = _FAMILY.mutant
    for name, wrong in _MUTATIONS:
        yield make(f"input: {name}", _BOTH, wrong, lambda x: x * 2.0, MUTATED)
    yield make("input: in place", _BOTH, lambda x: x.mul_(2.0), lambda x: x * 2.0, MUTATED | FIT)
    yield make("input: statistics", "a b, b -> a b", _updates_statistics, lambda x, mean: x * 2.0 + mean, MUTATED)
    yield make("input: ids clamped in place", "v^ d, t -> t d", _shifts_ids, lambda w, i: w[i], MUTATED, _table)
    for name, wrong in _RANDOM:
        yield make(f"random: {name}", _BOTH, wrong, _same, RANDOM)
    codes = RANDOM | SHARDS
    for name, build in _STATE:
        yield make(
            f"state: {name}", _BOTH, build(), _same if build is not _remembering_shape else _cached_table(), codes
        )
    for name, wrong in _DTYPES:
        yield make(f"dtype: {name}", _BOTH, wrong, _same, DTYPE | SHARDS)


def mutants() -> tuple[OperatorMutant, ...]:
    """Every function with hidden inputs or outputs. Made anew on each call: some keep state."""
    make = _FAMILY.mutant
    squared = with_backward(lambda x: x * x, lambda g, y, x: (2 * g * x,))
    values = [make(f"values: {name}", _BOTH, wrong, _same) for name, wrong in _VALUES]
    weighted = [make(f"wanted: {n}", "a b, b -> a b", wrong, lambda x, w: x * w, c) for n, wrong, c in _SUBSETS]
    strides = [make(f"strides: {n}", text, wrong, right, STRIDES | SHARDS) for n, text, wrong, right in _STRIDES]
    gradients = [
        make(f"dtype: backward of its own rows in {d}", _BOTH, _gradient_in(d, True), squared, EITHER)
        for d in (torch.float32, torch.bfloat16)
    ]
    halves = [
        make(f"dtype: half the gradient in {d}", _BOTH, _gradient_in(d, False), squared, DERIVATIVE | EITHER)
        for d in (torch.float32, torch.bfloat16)
    ]
    return (*_grouped(), *values, *weighted, *strides, *gradients, *halves)
