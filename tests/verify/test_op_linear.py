"""Linear sets are found by running operators on terms of sums; what is declared of built-in operators is among them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from op_registry.bind_and_localise_call import linear_sets
from op_registry.registry import default_registry
from op_registry.samples import SAMPLES, Sample

from verify.evidence.inputs.concrete_call import function_of, make_call, outputs_of, with_outputs, with_tensors
from verify.evidence.inputs.draw_calls import builtin_call
from verify.operators.suggest.find_linear_sets import derive_linear, is_linear


def _real(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


class _Doubled(torch.autograd.Function):
    """The identity, with a gradient that depends on the value."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * ctx.saved_tensors[0]


X, Y = _real(4, 6), _real(4, 6)
MASK = torch.tensor([True, False, True, True, False, True])
CASES: list[tuple[Callable[..., Any], tuple[Any, ...], list[set[int]]]] = [
    (torch.neg, (X,), [{0}]),
    (torch.add, (X, Y), [{0, 1}]),
    (torch.add, (X, 1e-6), []),  # affine: the constant is added on every rank
    (torch.mul, (X, Y), [{0}, {1}]),
    (torch.where, (MASK, X, Y), [{1, 2}]),
    (F.linear, (X, _real(5, 6), _real(5)), [{0, 2}, {1, 2}]),
    (F.linear, (X, _real(5, 6)), [{0}, {1}]),
    (F.scaled_dot_product_attention, (_real(1, 2, 4, 6), _real(1, 2, 5, 6), _real(1, 2, 5, 3)), [{2}]),
    (lambda *xs: torch.cat(xs), (X, Y, X), [{0, 1, 2}]),
    (torch.relu, (X,), []),
    (torch.floor, (X,), []),  # adds up where the terms are integers
    (lambda x: x.float(), (X,), []),  # linear up to rounding
    (lambda x: x.to(torch.float64), (X,), [{0}]),
    (lambda x: (x * 2, x.relu()), (X,), []),  # every output counts
    (lambda x: (x.sum(), x * 3), (X,), [{0}]),
    (_Doubled.apply, (X,), []),  # the gradient counts too
    (lambda x, y: x * y.detach().abs(), (X, Y), [{0}]),
    (torch.argmax, (X,), []),
    (torch.isnan, (X,), []),  # all False, which "sums" to False
    (lambda x, i: x[i], (X, torch.tensor([0, 2, 2])), [{0}]),
]


@pytest.mark.parametrize(("function", "arguments", "expected"), CASES)
def test_sets_are_found(function: Callable[..., Any], arguments: tuple[Any, ...], expected: list[set[int]]) -> None:
    found = derive_linear(function, make_call("f", arguments, {}))
    assert [set(s) for s in found] == expected


def _builtin(row: Sample) -> tuple[Callable[..., Any], Any, list[frozenset[int]]]:
    spec = default_registry().lookup(row.operator)
    assert spec is not None
    function = function_of(row.operator, spec)
    concrete = builtin_call(row, "normal", torch.Generator().manual_seed(0))
    args, kwargs = with_tensors(concrete.call, concrete.tensors, {})
    call = with_outputs(concrete.call, outputs_of(function(*args, **kwargs)))
    return function, concrete, [frozenset(s) for s in linear_sets(spec, call) if s]


FIRST = list({row.operator: row for row in reversed(SAMPLES)}.values())


@pytest.mark.long
@pytest.mark.parametrize("rows", [FIRST, pytest.param(SAMPLES, marks=pytest.mark.long)], ids=["one each", "all"])
def test_declared_sets_of_built_in_operators_hold(rows: Sequence[Sample]) -> None:
    checked = 0
    for row in rows:
        spec = default_registry().lookup(row.operator)
        if spec is None or spec.random or not row.compare or not spec.linear:
            continue
        function, concrete, declared = _builtin(row)
        for slots in declared:
            checked += 1
            assert is_linear(function, concrete, slots), f"{row} is not linear in {sorted(slots)}"
    assert checked > 200


def test_a_false_declaration_is_seen() -> None:
    call = make_call("f", (X, Y), {})
    assert is_linear(torch.add, call, frozenset({0, 1}))
    assert not is_linear(torch.add, call, frozenset({0}))
    assert not is_linear(torch.mul, call, frozenset({0, 1}))
