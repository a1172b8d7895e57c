"""Operators of users that keep something between calls: on ranks, their first call is of a shard."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

_first: list[float] = []
_means: dict[tuple[int, ...], Tensor] = {}
_weights: dict[int, Tensor] = {}
_triangles: dict[tuple[int, torch.dtype], Tensor] = {}
_table: Tensor | None = None
_calls = [0]


class Size:
    rows: int | None = None


def by_first_values(x: Tensor) -> Tensor:
    if not _first:
        _first.append(float(x.detach().abs().max()))
    return x / _first[0]


def by_first_rows(x: Tensor) -> Tensor:
    if Size.rows is None:
        Size.rows = x.shape[0]
    return x / Size.rows


def by_first_of_width(x: Tensor) -> Tensor:
    """Keyed by one size, and made from the other."""
    rows, columns = x.shape
    if columns not in _weights or len(_weights[columns]) < rows:
        _weights[columns] = torch.arange(rows, dtype=torch.float64) / rows
    return x * _weights[columns][:rows, None].to(x.dtype)


def by_first_mean(x: Tensor) -> Tensor:
    if x.shape not in _means:
        _means[x.shape] = x.detach().double().mean(0, keepdim=True)
    return x - _means[x.shape].to(x.dtype)


class ByFirstGradient(torch.autograd.Function):
    """Its backward is what keeps something."""

    kept: int | None = None

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x * 2.0

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        if ByFirstGradient.kept is None:
            ByFirstGradient.kept = len(gradient)
        return gradient * 2.0 * (len(gradient) / ByFirstGradient.kept)


WRONG = (by_first_values, by_first_rows, by_first_of_width, by_first_mean, ByFirstGradient.apply)


def kept_by_all_it_depends_on(x: Tensor) -> Tensor:
    key = x.shape[1], x.dtype
    if key not in _triangles:
        _triangles[key] = torch.tril(torch.ones(key[0], key[0], dtype=key[1]))
    return x @ _triangles[key]


def kept_and_grown(x: Tensor) -> Tensor:
    global _table  # noqa: PLW0603 - this is what people write
    if _table is None or len(_table) < x.shape[1]:
        _table = torch.arange(x.shape[1], dtype=torch.float64)
    return x + _table[: x.shape[1]].to(x.dtype)


@lru_cache
def _frequencies(size: int) -> Tensor:
    return 1.0 / 10.0 ** (torch.arange(size, dtype=torch.float64) / size)


def kept_by_size(x: Tensor) -> Tensor:
    return x * _frequencies(x.shape[1]).to(x.dtype)


def counted(x: Tensor) -> Tensor:
    _calls[0] += 1
    return x * 2.0


RIGHT = (kept_by_all_it_depends_on, kept_and_grown, kept_by_size, counted)
