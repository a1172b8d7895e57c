"""A share of a large table in the default run, and the whole table with `-m long`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def every(n: int, rows: Iterable[Any]) -> list[Any]:
    """Mark `long` all rows of a table but each n-th one. A row of several arguments is a tuple."""
    return [row if i % n == 0 else _long(row) for i, row in enumerate(rows)]


def only(numbers: Iterable[int], rows: Iterable[Any]) -> list[Any]:
    """Mark `long` all rows of a table but those of these numbers, where each n-th would leave out what matters."""
    chosen = set(numbers)
    return [row if i in chosen else _long(row) for i, row in enumerate(rows)]


def _long(row: Any) -> Any:
    if hasattr(row, "marks"):
        return pytest.param(*row.values, marks=[*row.marks, pytest.mark.long], id=row.id)
    several = isinstance(row, tuple) and not hasattr(row, "_fields")
    return pytest.param(*(row if several else (row,)), marks=pytest.mark.long)
