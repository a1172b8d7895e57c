"""Constraints: predicates over configurations and choices, and their conjunction."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from nnscaler.ir.graph import Operation
from nnscaler.ir.placement import Choice
from nnscaler.planning.configurations import Configuration


@dataclass(frozen=True)
class Constraint:
    """
    text      as the user would say it
    permits   which sizes of axes, micro-batches and recomputation
    allows    which choices of operations on tp
    also      choices that are considered for operations besides those that are searched
    together  groups of operations that take the same choice, and run on one pipeline device
    at        (operation, pipeline device): where it runs; -1 is the last one
    parts     the constraints that it is made of; empty for one that stands for itself
    """

    text: str
    permits: Callable[[Configuration], bool] = lambda _: True
    allows: Callable[[Operation, Choice], bool] = lambda _op, _choice: True
    also: Mapping[str, Choice] = field(default_factory=dict)
    together: tuple[tuple[str, ...], ...] = ()
    at: tuple[tuple[str, int], ...] = ()
    parts: tuple[Constraint, ...] = ()

    @property
    def each(self) -> tuple[Constraint, ...]:
        """The constraints that stand for themselves."""
        return tuple(one for part in self.parts for one in part.each) or (self,)


def all_of(constraints: Iterable[Constraint]) -> Constraint:
    """Return the conjunction of constraints."""
    every = tuple(constraints)
    return Constraint(
        "; ".join(c.text for c in every),
        lambda configuration: all(c.permits(configuration) for c in every),
        lambda op, choice: all(c.allows(op, choice) for c in every),
        dict(item for c in every for item in c.also.items()),
        tuple(group for c in every for group in c.together),
        tuple(place for c in every for place in c.at),
        every,
    )
