"""Numbers in code: where a function, or the methods of a class, may do something else."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from op_registry.numbers_in_user_code import deciding_numbers_in, numbers_in, numbers_of, signed_numbers_in

LIMIT = 40
TABLE = {"small": 3, "large": 7.5}


def helper(x: Tensor) -> Tensor:
    return x * 11


def function(x: Tensor, most: int = 21, *, least: float = -0.25) -> Tensor:
    if x.shape[0] in (5, 6) or x.shape[0] > LIMIT:
        return helper(x)
    return x * TABLE["large"] * sum(n for n in range(x.dim()) if n < 9) * (True + most + least)


class Both(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return x.clamp(max=100)

    @staticmethod
    def backward(_ctx: Any, g: Tensor) -> Tensor:
        return g * 2.5


class Derived(torch.optim.AdamW):
    def step(self, closure: Any = None) -> Any:
        return super().step() if self.first(12) else None

    @staticmethod
    def first(n: int) -> bool:
        return n < 33


def test_numbers_of_a_function_and_of_what_it_calls() -> None:
    assert set(numbers_in(function)) >= {0.25, 3, 5, 6, 7.5, 9, 11, 21, 40}
    assert all(type(n) in (int, float) for n in numbers_in(function))


def test_signs_are_kept_for_those_who_ask() -> None:
    assert -0.25 in signed_numbers_in(function) and 0.25 not in signed_numbers_in(function)
    assert {abs(n) for n in signed_numbers_in(function)} == set(numbers_in(function))


def polynomial(x: Tensor, most: int = 100, *, taken: int = 77) -> Tensor:
    capacity = max(64, x.shape[1])
    y = x * (2 + x * (3 + x * 17)) / 19
    place = torch.arange(x.shape[0]) % 48
    return (y * (place < capacity)[:, None]).clamp(max=most)[:33] * (x.dim() > LIMIT) + y.topk(taken).values.sum()


def test_numbers_by_which_it_may_decide() -> None:
    found = deciding_numbers_in(polynomial)
    assert found >= {100, 77, 64, 48, 33, LIMIT} and found.isdisjoint({2, 3, 17, 19})
    assert deciding_numbers_in(Both) >= {100} and 2.5 not in deciding_numbers_in(Both)
    assert found <= {*numbers_in(polynomial)}


def test_numbers_of_both_passes() -> None:
    assert set(numbers_in(Both)) == set(numbers_in(Both.apply)) >= {2.5, 100}

    def calls_it(x: Any) -> Any:
        return Both.apply(x)

    assert set(numbers_in(calls_it)) >= {2.5, 100}


def test_numbers_of_a_class_are_its_own_not_torchs() -> None:
    assert set(numbers_in(Derived)) == {12, 33}
    assert numbers_in(torch.optim.AdamW) == ()


def test_numbers_within_values() -> None:
    assert numbers_of([(0.9, -2), {"a": [5]}, True, None, "7", float("inf"), float("nan")]) == (0.9, 2, 5)
