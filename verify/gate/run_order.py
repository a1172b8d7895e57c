"""Order what a gate runs by the state of its last run: what is likely to be wrong runs first.

What failed last time goes first. Then the texts of all programs are read, which takes seconds and catches most errors.
Then everything runs: what was refuted by its text first, then by the time that it is expected to take.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Literal

from nnscaler.atomic_writes import replace_text
from nnscaler.pyproject_settings import cache_folder
from verify.gate.items import Item, OpItem, PlanItem
from verify.operators.run.cache import make_folder

# The state of the last gate run: which items failed, so that they start first, and how long each took.
# It decides the order alone, never a verdict. A file that cannot be read is no state.


@dataclass(frozen=True)
class Last:
    """`passed`: whether nothing new was found. `seconds`: of its whole run."""

    passed: bool
    seconds: float


@dataclass(frozen=True)
class State:
    """The last results, by the items' names."""

    items: Mapping[str, Last] = field(default_factory=dict)

    def failed(self, name: str) -> bool:
        """Return whether the item is known to have failed."""
        last = self.items.get(name)
        return last is not None and not last.passed

    def seconds(self, name: str) -> float | None:
        """Return how long the item took; None where that is not known."""
        last = self.items.get(name)
        return None if last is None else last.seconds


def state_file(folder: Path) -> Path | None:
    """Return the file of a project, which is in `folder`; None where there is no cache to keep it in."""
    root = cache_folder(folder)
    project = folder.resolve()
    name = f"{project.name}-{sha256(str(project).encode()).hexdigest()[:12]}.json"  # the cache is for all projects
    return None if root is None else root / "gate" / name


def read_state(file: Path | None) -> State:
    """Read the state; empty where there is none, or none that can be read."""
    if file is None:
        return State()
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
        items = {str(name): Last(entry["passed"] is True, float(entry["seconds"])) for name, entry in document.items()}
        return State(items)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return State()


def write_state(file: Path | None, before: State, now: Mapping[str, Last]) -> None:
    """Replace the file; items that did not run keep what they had. A folder that cannot be written is not an error."""
    if file is None:
        return
    items = {**before.items, **now}
    text = json.dumps(
        {name: {"passed": last.passed, "seconds": round(last.seconds, 3)} for name, last in items.items()}
    )
    with suppress(OSError):
        make_folder(file.parent)
        replace_text(file, text)


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
