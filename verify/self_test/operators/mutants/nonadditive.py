"""Functions whose shards do not sum up (or have no common maximum), although their annotation says so."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from verify.self_test.operators.mutants.mutant import SHARDS, Family, Function, OperatorMutant
from verify.self_test.operators.right_operators import attend, largest, linear_attention, residual, squared_error

_FAMILY = Family("reduction")
IGNORED = -100

# name, wrong; the twin is the sum over the last dim
_SUMS: tuple[tuple[str, Function], ...] = (
    ("mean for sum", lambda x: x.mean(1)),
    ("max for sum", lambda x: x.amax(1)),
    ("min for sum", lambda x: x.amin(1)),
    ("median for sum", lambda x: x.median(1).values),
    ("product for sum", lambda x: x.prod(1)),
    ("norm for sum", lambda x: x.norm(dim=1)),
    ("variance for sum", lambda x: x.var(1)),
    ("logsumexp for sum", lambda x: x.logsumexp(1)),
    ("sum of squares, then the root", lambda x: (x * x).sum(1).sqrt()),
    ("square after the sum", lambda x: x.sum(1).pow(2)),
    ("relu after the sum", lambda x: x.sum(1).relu()),
    ("tanh after the sum", lambda x: x.sum(1).tanh()),
    ("gelu after the sum", lambda x: F.gelu(x.sum(1))),
    ("absolute value after the sum", lambda x: x.sum(1).abs()),
    ("clamp after the sum", lambda x: x.sum(1).clamp(-2, 2)),
    ("rounded after the sum", lambda x: (x * 0.3).sum(1).round()),
    ("small number added", lambda x: x.sum(1) + 1e-6),
    ("one added", lambda x: x.sum(1) + 1),
    ("divided by its own columns", lambda x: x.sum(1) / x.shape[1]),
    ("divided by the root of its columns", lambda x: x.sum(1) * x.shape[1] ** -0.5),
    ("divided by its own count", lambda x: x.sum(1) / (x != 0).sum(1).clamp(min=1)),
    ("normalised before the sum", lambda x: (x / (x * x).sum()).sum(1)),
    ("weighted by its own softmax", lambda x: (x * x.softmax(1)).sum(1)),
    ("weighted by its own positions", lambda x: (x * torch.arange(x.shape[1])).sum(1)),
    ("first element only", lambda x: x[:, 0] * 1.0),
    ("every second element", lambda x: x[:, ::2].sum(1)),
    ("all but the last", lambda x: x[:, :-1].sum(1)),
    ("sum of differences", lambda x: x.diff(dim=1).abs().sum(1)),
    ("bounded by its own maximum", lambda x: x.sum(1) - x.amax(1)),
)

# name, wrong; the twin is the maximum over the last dim
_MAXIMA: tuple[tuple[str, Function], ...] = (
    ("sum for max", lambda x: x.sum(1)),
    ("min for max", lambda x: x.amin(1)),
    ("mean for max", lambda x: x.mean(1)),
    ("logsumexp for max", lambda x: x.logsumexp(1)),
    ("max less the mean", lambda x: x.amax(1) - x.mean(1)),
    ("max by its own columns", lambda x: x.amax(1) * x.shape[1]),
    ("spread for max", lambda x: x.amax(1) - x.amin(1)),
    ("negative max", lambda x: -x.amax(1)),
)

# name, wrong; the twin is x @ w + b, or x @ w
_PRODUCTS: tuple[tuple[str, Function], ...] = (
    ("relu after the product", lambda x, w, b: (x @ w + b).relu()),
    ("silu after the product", lambda x, w, b: F.silu(x @ w + b)),
    ("bias squared", lambda x, w, b: x @ w + b * b),
    ("bias through relu", lambda x, w, b: x @ w + b.relu()),
    ("one added to the bias", lambda x, w, b: x @ w + (b + 1)),
    ("bias times the product", lambda x, w, b: (x @ w) * b),
    ("product scaled by its own columns", lambda x, w, b: (x @ w) * x.shape[1] ** -0.5 + b),
    ("bias scaled by its own columns", lambda x, w, b: x @ w + b / x.shape[1]),
    ("bias left out for few columns", lambda x, w, b: x @ w + (b if x.shape[1] > 7 else b * 0)),
    ("softmax after the product", lambda x, w, b: (x @ w + b).softmax(-1)),
    ("normalised after the product", lambda x, w, b: F.layer_norm(x @ w + b, (w.shape[1],))),
    ("x normalised before the product", lambda x, w, b: F.layer_norm(x, (x.shape[1],)) @ w + b),
)


def _tokens() -> dict[str, object]:
    labels = torch.randint(0, 5, (12,))
    labels[[0, 1, 4, 7, 10]] = IGNORED
    return {"x": torch.randn(12, 5), "labels": labels}


def _cross_entropy(reduction: str) -> Function:
    def operator(x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(x, labels, ignore_index=IGNORED, reduction=reduction)

    return operator


def _over_own_count(x: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(x, labels, ignore_index=IGNORED, reduction="sum") / (labels != IGNORED).sum()


def _over_own_rows(x: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(x, labels, ignore_index=IGNORED, reduction="sum") / labels.shape[0]


def _kernel_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    p = (q @ k.T).exp()
    return (p / p.sum(-1, keepdim=True)) @ v


def _others() -> Iterator[OperatorMutant]:
    make = _FAMILY.mutant
    loss = "t+ c^, t+ -> ()"
    for name, wrong in (
        ("mean loss for sum", _cross_entropy("mean")),
        ("loss over its own count of labels", _over_own_count),
        ("loss over its own rows", _over_own_rows),
        ("perplexity", lambda x, labels: F.cross_entropy(x, labels, ignore_index=IGNORED, reduction="sum").exp()),
    ):
        yield make(name, loss, wrong, _cross_entropy("sum"), SHARDS, _tokens)
    both = "a+ b+, a+ b+ -> ()"
    yield make("mean square for sum", both, F.mse_loss, squared_error)
    yield make("root of the sum of squares", both, lambda x, t: (x - t).norm(), squared_error)
    yield make("cosine for product", both, lambda x, t: F.cosine_similarity(x.flatten(), t.flatten(), 0), squared_error)
    yield make("logistic of the product", both, lambda x, t: (x * t).sum().sigmoid(), squared_error)
    yield make("huber of the sum", both, lambda x, t: F.smooth_l1_loss(x.sum(), t.sum()), squared_error)
    attention = "q d^, k+ d^, k+ v -> q v"
    yield make("softmax over split keys", attention, attend, linear_attention)
    yield make("kernel normalised over split keys", attention, _kernel_attention, linear_attention)
    yield make("weights of its own sum", "a b+, a b+ -> a", _own_mean, lambda x, w: (x * w).sum(1))
    yield make("variance by moments", "a b+ -> a", lambda x: (x * x).sum(1) - x.sum(1).pow(2), lambda x: (x * x).sum(1))
    yield make("count of negatives, if any", "a b+ -> a", lambda x: (x < 0).any(1).to(x.dtype), _negatives)
    yield make("histogram as long as its largest id", "t+ -> c^", _short_histogram, _histogram, SHARDS, _rare_ids)
    yield make("one-hot as wide as its largest id", "t -> t c^", _short_one_hot, _one_hot, SHARDS, _rare_ids)
    yield make("distinct values counted", "t+ -> c^", _distinct, _histogram, SHARDS, _ids)
    yield make("normalised histogram", "t+ -> c^", lambda ids: _histogram(ids) / ids.shape[0], _histogram, SHARDS, _ids)
    yield make("two outputs, one of them a mean", "a b+ -> a, a", _sum_and_mean, lambda x: (x.sum(1), (x * x).sum(1)))
    yield make("residual counted on every shard", "t d, t f+, f+ d -> t d", residual, _product, SHARDS)


def _own_mean(x: Tensor, w: Tensor) -> Tensor:
    return (x * w).sum(1) / w.sum(1)


def _product(x: Tensor, h: Tensor, w: Tensor) -> Tensor:
    return x * (h @ w)


def _sum(x: Tensor) -> Tensor:
    return x.sum(1)


def _linear(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return x @ w + b


def _negatives(x: Tensor) -> Tensor:
    return (x < 0).sum(1).to(x.dtype)


def _ids() -> tuple[Tensor, ...]:
    return (torch.randint(0, 7, (24,)),)


def _rare_ids() -> tuple[Tensor, ...]:
    """The largest id occurs once."""
    return (torch.tensor([2, 5, 1, 0, 3, 4, 4, 2, 6, 5, 1, 0, 3, 2, 5, 1, 0, 4, 3, 3, 2, 5, 1, 4]),)


def _short_histogram(ids: Tensor) -> Tensor:
    return torch.bincount(ids).double()


def _short_one_hot(ids: Tensor) -> Tensor:
    return torch.nn.functional.one_hot(ids).double()


def _one_hot(ids: Tensor) -> Tensor:
    return torch.nn.functional.one_hot(ids, 7).double()


def _histogram(ids: Tensor) -> Tensor:
    return torch.bincount(ids, minlength=7).double()


def _distinct(ids: Tensor) -> Tensor:
    return (torch.bincount(ids, minlength=7) > 0).double()


def _sum_and_mean(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.sum(1), (x * x).mean(1)


def mutants() -> tuple[OperatorMutant, ...]:
    """Every function that is no reduction."""
    make = _FAMILY.mutant
    sums = [make(name, "a b+ -> a", wrong, _sum) for name, wrong in _SUMS]
    maxima = [make(name, "a b+max -> a", wrong, largest) for name, wrong in _MAXIMA]
    products = [make(name, "m k+, k+ n^, +n^ -> m n^", wrong, _linear) for name, wrong in _PRODUCTS]
    return (*sums, *maxima, *products, *_others())
