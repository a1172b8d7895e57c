"""A trace runs an operator on tensors without values, and what it keeps of them is put back."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nnscaler import register_op

_table: dict[int, Tensor] = {}
_rows: list[Tensor] = []
_names: set[int] = set()
_largest: Tensor | None = None


class Held:
    table: Tensor | None = None


held = Held()


@register_op("a b^ -> a b^", name="kept_in_mapping")
def in_mapping(x: Tensor) -> Tensor:
    if x.shape[1] not in _table:
        _table[x.shape[1]] = torch.arange(x.shape[1], dtype=x.dtype)
    return x + _table[x.shape[1]]


@register_op("a b^ -> a b^", name="kept_in_list")
def in_list(x: Tensor) -> Tensor:
    if not _rows:
        _rows.append(torch.ones(x.shape[1], dtype=x.dtype))
        _names.add(x.shape[1])
    return x + _rows[0]


@register_op("a b^ -> a b^", name="kept_in_variable")
def in_variable(x: Tensor) -> Tensor:
    global _largest  # noqa: PLW0603 - this is what people write
    if _largest is None:
        _largest = torch.ones(x.shape[1], dtype=x.dtype)
    return x + _largest


@lru_cache
def _ramp(size: int) -> Tensor:
    return torch.arange(size, dtype=torch.float32)


@register_op("a b^ -> a b^", name="kept_in_cache")
def in_cache(x: Tensor) -> Tensor:
    return x + _ramp(x.shape[1])


@register_op("a b^ -> a b^", name="kept_in_class")
def in_class(x: Tensor) -> Tensor:
    if Held.table is None:
        Held.table = torch.ones(x.shape[1], dtype=x.dtype)
    return x + Held.table


@register_op("a b^ -> a b^", name="kept_in_object")
def in_object(x: Tensor) -> Tensor:
    if "own" not in vars(held):
        held.own = torch.ones(x.shape[1], dtype=x.dtype)  # type: ignore[attr-defined]
    return x + vars(held)["own"]


def _in_closure() -> Callable[[Tensor], Tensor]:
    kept: Tensor | None = None

    @register_op("a b^ -> a b^", name="kept_in_closure")
    def in_closure(x: Tensor) -> Tensor:
        nonlocal kept
        if kept is None:
            kept = torch.ones(x.shape[1], dtype=x.dtype)
        return x + kept

    return in_closure


class Uses(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


@pytest.mark.parametrize(
    "function", [in_mapping, in_list, in_variable, in_cache, in_class, in_object, pytest.param(None, id="in_closure")]
)
def test_an_operator_gives_values_after_a_trace(function: Any) -> None:
    function = function or _in_closure()
    x = torch.randn(3, 4)
    torch.export.export(Uses(function), (x,), strict=False)
    found = function(x)
    assert type(found) is Tensor
    assert torch.equal(found - x, function(x) - x)
    assert float(found.sum()) > float(x.sum())
