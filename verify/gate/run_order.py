"""Order the items: first those most likely to be wrong, then quick ones, so that a budget shows most.

What failed last time goes first. Then the texts of all programs are read, which takes seconds and catches most errors.
Then everything runs: what was refuted by its text first, then by the time that it is expected to take.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from verify.gate.items import Item, OpItem, PlanItem
from verify.gate.state import State

Phase = Literal["static", "all"]
EXPECTED_OP, EXPECTED_PLAN = 5.0, 30.0  # seconds of an item that never ran


@dataclass(frozen=True)
class Unit:
    """An item, or the reading of its program's text alone."""

    item: Item
    phase: Phase = "all"


def first_units(items: Sequence[Item], state: State) -> list[Unit]:
    """Return the units to run first: items that failed last time, quickest first, then static checks of other plans.

    A single item needs no separate static check: it begins with one anyway.
    """
    failed = sorted((item for item in items if state.failed(item.name)), key=lambda item: expected(item, state))
    names = {item.name for item in failed}
    texts = [item for item in items if isinstance(item, PlanItem) and item.name not in names]
    return [*map(Unit, failed), *(Unit(item, "static") for item in texts if len(items) > 1)]


def other_units(items: Sequence[Item], state: State, refuted: Collection[str], done: Collection[str]) -> list[Unit]:
    """Return the remaining units.

    `refuted`: names of items whose text was refuted, which run first. `done`: names of items that need not run again.
    """
    left = [item for item in items if item.name not in done]
    return [Unit(item) for item in sorted(left, key=lambda i: (i.name not in refuted, expected(i, state)))]


def expected(item: Item, state: State) -> float:
    """Return the seconds that the item took last time, or those of its kind."""
    known = state.seconds(item.name)
    return known if known is not None else EXPECTED_OP if isinstance(item, OpItem) else EXPECTED_PLAN


def batches(units: Sequence[Unit], workers: int) -> Iterator[list[Unit]]:
    """Yield the units that run side by side: operators with one time limit.

    A plan has processes of its own, and runs alone.
    """
    batch: list[Unit] = []
    for unit in units:
        joins = batch and len(batch) < workers and _side_by_side(batch[0], unit)
        if batch and not joins:
            yield batch
            batch = []
        batch.append(unit)
    if batch:
        yield batch


def _side_by_side(one: Unit, other: Unit) -> bool:
    both = isinstance(one.item, OpItem) and isinstance(other.item, OpItem)
    return both and one.item.timeout == other.item.timeout
