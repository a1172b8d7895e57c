"""Choices among near-equal values: a router's best experts, the first of a sort, the place of a maximum.

Where two values differ by less than rounding, right programs choose differently, and what follows differs by far more
than rounding. Such a flip is rare by itself: one token among hundreds has two experts so near. A program may meet one
that none of a few runs of the model meets. The mode below makes them frequent: values that a choice compares are moved
by up to a unit in the last place, each relative to itself, and what is chosen keeps its own value. A choice that is
clear stays as it is, and so does one among zeros or infinities.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from verify.programs.low_precision.reassociate import RulesMode

aten = torch.ops.aten
UNITS = 1.0  # in the last place, at most: about what the roundings of the values themselves are


class NearTies(RulesMode):
    """While open, every choice is made among values that are moved."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__(_RULES, self._moved)
        self._generator = generator

    def _moved(self, x: Tensor) -> Tensor:
        """Move values in float64, where a part of a unit counts."""
        share = torch.rand(x.shape, generator=self._generator, dtype=torch.float64).to(x.device) * 2 - 1
        return x.double() * (1 + UNITS * torch.finfo(x.dtype).eps * share)


def _chosen(position: int, moved: Callable[[Tensor], Tensor], func: Any, x: Tensor, *rest: Any, **named: Any) -> Any:
    """`position`: where `dim` stands among the arguments after `x`; the last dim is its default."""
    if not x.dim():
        return func(x, *rest, **named)
    found = func(moved(x), *rest, **named)
    dim = int(rest[position] if len(rest) > position else named.get("dim", -1))
    return found if isinstance(found, Tensor) else _unmoved(x, found[1], dim)


def _unmoved(x: Tensor, indices: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Return the values that `x` itself has at the indices, of which a maximum may have dropped the dim."""
    kept = indices if indices.dim() == x.dim() else indices.unsqueeze(dim)
    return x.gather(dim, kept).view(indices.shape), indices


_RULES: Mapping[Any, Callable[..., Any]] = MappingProxyType(
    {
        aten.topk.default: partial(_chosen, 1),
        aten.sort.default: partial(_chosen, 0),
        aten.sort.stable: partial(_chosen, 1),
        aten.max.dim: partial(_chosen, 0),
        aten.min.dim: partial(_chosen, 0),
        aten.argmax.default: partial(_chosen, 0),
        aten.argmin.default: partial(_chosen, 0),
    }
)
