"""Programs whose backwards run in two halves, made of programs whose backwards run whole."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import pytest

from nnscaler.scheduling import registry
from nnscaler.scheduling.schedule import Schedule, parse_order

NAME = "halves"  # of the schedule that `registered` adds
Order = list[str]
Place = Callable[[Order], Order]  # an order with B -> the same with I and W


def adjacent(order: Order) -> Order:
    """Each W right after its I."""
    return [half for word in order for half in ((f"I{word[1:]}", f"W{word[1:]}") if word[0] == "B" else (word,))]


def late(order: Order) -> Order:
    """All W at the end, the last one first."""
    inputs = [f"I{word[1:]}" if word[0] == "B" else word for word in order]
    return [*inputs, *(f"W{word[1:]}" for word in reversed(order) if word[0] == "B")]


def zero_bubble(order: Order) -> Order:
    """W one I later than its own, as ZB-H1 has it in the steady state."""
    made: Order = []
    waiting: Order = []
    for word in order:
        if word[0] == "B":
            made.append(f"I{word[1:]}")
            waiting.append(f"W{word[1:]}")
            if len(waiting) > 1:
                made.append(waiting.pop(0))
        else:
            made.append(word)
    return made + waiting


def drawn(draw: Callable[[int], int]) -> Place:
    """Each W anywhere after its I. `draw(n)`: a number below n."""

    def place(order: Order) -> Order:
        made = [f"I{word[1:]}" if word[0] == "B" else word for word in order]
        for word in order:
            if word[0] == "B":
                first = made.index(f"I{word[1:]}") + 1
                made.insert(first + draw(len(made) - first + 1), f"W{word[1:]}")
        return made

    return place


def some(place: Place, stages: Sequence[int]) -> Place:
    """Halves in some stages only."""

    def chosen(order: Order) -> Order:
        marked = [word if word[0] == "F" or int(word[1:].split(".")[0]) in stages else f"#{word}" for word in order]
        return [word.removeprefix("#") for word in place(marked)]

    return chosen


def odd(place: Place) -> Place:
    """Halves in every other micro-batch only."""

    def chosen(order: Order) -> Order:
        marked = [word if word[0] == "F" or int(word.split(".")[1]) % 2 else f"#{word}" for word in order]
        return [word.removeprefix("#") for word in place(marked)]

    return chosen


_SCHEDULE = re.compile(r'^SCHEDULE = (?:"""\n|"(?!""))([^"]+?)(?=\n?")', re.M)


def rewritten(text: str, place: Place) -> str:
    """Return the text of a role with another order."""
    found = _SCHEDULE.search(text)
    assert found is not None, "the role has no order"
    return text[: found.start(1)] + " ".join(place(found[1].split())) + text[found.end(1) :]


def in_halves(folder: Path, place: Place) -> Path:
    """Rewrite the roles of a saved program, in place."""
    for file in sorted(folder.glob("role_*.py")):
        file.write_text(rewritten(file.read_text(encoding="utf-8"), place), encoding="utf-8")
    return folder


def schedule_in_halves(schedule: Schedule, place: Place) -> Schedule:
    """Return the schedule with the orders that `place` makes of its own."""
    orders = tuple(parse_order(" ".join(place([str(i) for i in order]))) for order in schedule.orders)
    return replace(schedule, name=NAME, orders=orders)


def registered(monkeypatch: pytest.MonkeyPatch, place: Place, kind: str = "1f1b") -> str:
    """Add a schedule to those that have a name, for one test; return its name."""
    whole = registry.SCHEDULES[kind]

    def orders(devices: int, chunks: int, micro_batches: int) -> Schedule:
        return schedule_in_halves(whole(devices, chunks, micro_batches), place)

    made = replace(whole, name=NAME, title="in halves", orders=orders)
    monkeypatch.setattr(registry, "SCHEDULES", MappingProxyType({**registry.SCHEDULES, NAME: made}))
    return NAME
