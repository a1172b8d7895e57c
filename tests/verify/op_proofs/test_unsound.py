"""Constructs that dimension types cannot see through, and wrong annotations: never proved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.verify.op_proofs.proving import floats, proofs_of, proved

X = floats(6, 12)


def _through_a_view(x: Tensor) -> Tensor:
    y = x.clone()
    y[:, 0].mul_(7)
    return y


def _into_a_view(x: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    y[:, 0] = x.sum(1)
    return y


def _view_of_a_view(x: Tensor) -> Tensor:
    y = x.clone()
    y.view(-1)[0:1].fill_(7.0)
    return y


def _through_detach(x: Tensor) -> Tensor:
    y = x * 1
    y.detach().mul_(torch.arange(12, dtype=torch.float64))
    return y * 1


def _of_its_input(x: Tensor) -> Tensor:
    with torch.no_grad():
        x.add_(1.0)
    return x * 1


def _into_out(x: Tensor) -> Tensor:
    y = torch.empty(x.shape, dtype=x.dtype)
    with torch.no_grad():
        torch.cumsum(x, 1, out=y)
    return y


class _HalfOfTheGradient(torch.autograd.Function):
    """Right forward; its backward multiplies by the number of columns."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        return gradient * gradient.shape[1]


class _MeanInBackward(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        return gradient - gradient.mean(1, keepdim=True)


def _hooked(x: Tensor) -> Tensor:
    y = x * 2
    y.register_hook(lambda g: g - g.mean(1, keepdim=True))
    return y


def _detached_part(x: Tensor) -> Tensor:
    return x * 2 + (x.sum(1, keepdim=True) - x.sum(1, keepdim=True)).detach() + x.detach().mean(1, keepdim=True) * 0


NOT_OF_DIM_1: dict[str, Callable[[Tensor], Any]] = {
    "mutation through a view": _through_a_view,
    "assignment into a view": _into_a_view,
    "mutation through a view of a view": _view_of_a_view,
    "mutation through detach": _through_detach,
    "mutation of an input": _of_its_input,
    "out=": _into_out,
    "branch on a size": lambda x: x * 2 if x.shape[1] >= 8 else x,
    "branch on a size of one": lambda x: x * 2 if x.shape[1] != 13 else x,
    "a size as a float": lambda x: x * float(x.shape[1]),
    "a size in a tensor": lambda x: x * torch.tensor(x.shape)[1],
    "division by a size": lambda x: x / x.shape[1],
    "a power of a size": lambda x: x * x.shape[1] ** -0.5,
    "numel": lambda x: x / x.numel(),
    "a loop over a size": lambda x: sum((x for _ in range(x.shape[1])), torch.zeros_like(x)),
    "len": lambda x: x * len(x.t()),
    "arange": lambda x: x + torch.arange(x.shape[1], dtype=x.dtype),
    "full of a size": lambda x: x + torch.full((), x.shape[1], dtype=x.dtype),
    "a size through sym_float": lambda x: x * torch.sym_float(x.shape[1]),
    "the specialised size": lambda x: x + torch.ones(12, dtype=x.dtype),
    "random": lambda x: x + torch.rand(x.shape, dtype=x.dtype),
    "dropout": lambda x: torch.nn.functional.dropout(x, 0.5),
    "bernoulli": lambda x: x * torch.bernoulli(torch.full(x.shape, 0.5, dtype=x.dtype)),
    "roll": lambda x: x.roll(1, 1),
    "flip": lambda x: x.flip(1),
    "cumsum": lambda x: x.cumsum(1),
    "sort": lambda x: x.sort(1).values,
    "softmax": lambda x: x.softmax(1),
    "mean taken off": lambda x: x - x.mean(1, keepdim=True),
    "every second": lambda x: x[:, ::2].repeat(1, 2),
    "halves swapped": lambda x: torch.cat([x[:, 6:], x[:, :6]], 1),
    "regrouped": lambda x: x.view(6, 3, 4).transpose(1, 2).reshape(6, 12),
    "numpy": lambda x: torch.from_numpy(x.detach().numpy() * 2),
    "item": lambda x: x * x[0, 0].item(),
    "sum item": lambda x: x * x.sum().item(),
    "tolist": lambda x: x * x[0].tolist()[0],
    "nonzero": lambda x: x * (x > 0).nonzero().shape[0],
    "bool": lambda x: x * 2 if bool((x > 0).any()) else x * 3,
    "data": lambda x: x.data.mul_(2) + x * 0,
    "backward by a size": _HalfOfTheGradient.apply,
    "backward with a mean": _MeanInBackward.apply,
    "a hook": _hooked,
    "a detached mean": _detached_part,
    "tril": lambda x: x.tril(),
    "a mask and a value for the dim": lambda x: x.masked_fill(torch.arange(12) % 2 == 0, 0.0),
    "padding": lambda x: torch.nn.functional.pad(x, (1, -1)),
    "layer norm": lambda x: torch.nn.functional.layer_norm(x, [x.shape[1]]),
    "a captured tensor": lambda x: x * X[0],
}


@pytest.mark.parametrize("name", NOT_OF_DIM_1)
def test_what_depends_on_the_whole_of_a_dim_is_not_proved(name: str) -> None:
    found = proofs_of(NOT_OF_DIM_1[name], "m n -> m n", X, sampled_with=lambda x: x * 2)
    assert not found["n"].proved
    assert found["n"].blocker


def test_the_same_without_it_is_proved() -> None:
    assert proved(lambda x: x * 2, "m n -> m n", X) == {"m", "n"}


def test_a_branch_on_a_size_of_one_is_a_condition() -> None:
    found = proofs_of(lambda x: x.sum(1, keepdim=True) + x if x.shape[1] == 1 else x * 2, "m n -> m n", X)
    assert list(map(str, found["n"].conditions)) == ["no rank holds less than 2 of it"]
    assert list(map(str, found["m"].conditions)) == ["n != 1"]  # what the other branch asks of `m` is not known


def test_all_branches_on_sizes_of_one_are_one_condition() -> None:
    """The second of them says nothing of a column of five."""

    def branching(x: Tensor) -> Tensor:
        if x.shape[1] == 1:
            return x * 3
        return x * 4 if x.shape[0] * x.shape[1] == 1 else x * 2

    (condition,) = proofs_of(branching, "m n -> m n", X)["n"].conditions
    assert condition.holds({"m": 5, "n": 2})
    assert not condition.holds({"m": 5, "n": 1})


def test_two_identifiers_that_have_to_be_equal_are_not_proved() -> None:
    found = proofs_of(lambda x, y: (x * y).sum(1), "m n+, m k+ -> m", X, X.clone())
    assert not found["n"].proved
    assert not found["k"].proved
    assert found["m"].proved
    assert "==" in found["n"].blocker


WRONG: dict[str, tuple[Callable[..., Any], str, tuple[Tensor, ...], set[str]]] = {
    "tanh of a product": (lambda x, w: (x @ w).tanh(), "m k+, k+ n -> m n", (X, floats(12, 18)), {"m", "n"}),
    "bias added by every rank": (
        torch.nn.functional.linear,
        "m k+, n k+, n -> m n",
        (X, floats(18, 12), floats(18)),
        {"m", "n"},
    ),
    "mean": (lambda x: x.mean(1), "m k+ -> m", (X,), {"m"}),
    "max": (lambda x: x.amax(1), "m k+ -> m", (X,), {"m"}),
    "sum called spatial": (lambda x: x.sum(1, keepdim=True) + x, "m k -> m k", (X,), {"m"}),
    "product of sums": (lambda x: x.sum(1) * x.sum(1), "m k+ -> m", (X,), {"m"}),
    "affine": (lambda x: x.sum(1) + 1.0, "m k+ -> m", (X,), {"m"}),
    "heads in the wrong order": (
        lambda x: x.view(x.shape[0], 4, -1).transpose(1, 2),
        "m (d h) -> m d h",
        (X.repeat(1, 1),),
        {"m"},
    ),
    "interleaved for contiguous": (lambda x: torch.cat([x, x], 1), "m n -> m (n 2)", (X,), {"m"}),
    "a gradient with nothing to sum": (lambda x, y: x * y.detach(), "m n, m n -> m n", (X, X.clone()), {"m", "n"}),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_annotation_is_not_proved(name: str) -> None:
    function, annotation, tensors, right = WRONG[name]
    assert proved(function, annotation, *tensors) == right


@pytest.mark.parametrize(
    "function",
    [
        lambda x, m: x.masked_fill(m, -7.0),
        lambda x, m: torch.where(m, x, 1.0),
        lambda x, m: x + 1e-6,
        lambda x, m: x.to(torch.float32).to(torch.float64),
        lambda x, m: x * x,
        lambda x, m: x.abs(),
        lambda x, m: x.clamp(min=0.0),
        lambda x, m: x + torch.ones_like(x),
        lambda x, m: torch.cat([x, torch.ones_like(x)], 1)[:, :12],
        lambda x, m: x / x.detach(),
    ],
)
def test_what_is_not_linear_is_not_proved_of_partial_sums(function: Callable[..., Any]) -> None:
    found = proofs_of(function, "m n, m n -> m n", X, X > 0, linear=(frozenset({0}),))
    assert not found["partial [0]"].proved


def test_what_is_linear_is() -> None:
    found = proofs_of(
        lambda x, m: (x * 2).masked_fill(m, 0.0).t().contiguous().t() / 3,
        "m n, m n -> m n",
        X,
        X > 0,
        linear=(frozenset({0}),),
    )
    assert found["partial [0]"].proved
