"""What a constraint is, and how several are one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from nnscaler.ir.operation import Operation
from nnscaler.ir.placement import Choice
from nnscaler.planning.planner.configurations import Configuration


@dataclass(frozen=True)
class Constraint:
    """
    text      as the user would say it
    permits   which sizes of axes, micro-batches and recomputation
    allows    which choices of operations on tp
    parts     the constraints that it is made of; empty for one that stands for itself
    """

    text: str
    permits: Callable[[Configuration], bool] = lambda _: True
    allows: Callable[[Operation, Choice], bool] = lambda _op, _choice: True
    parts: tuple[Constraint, ...] = ()

    @property
    def each(self) -> tuple[Constraint, ...]:
        """The constraints that stand for themselves."""
        return tuple(one for part in self.parts for one in part.each) or (self,)


def all_of(constraints: Iterable[Constraint]) -> Constraint:
    """What all of them permit and allow."""
    every = tuple(constraints)
    return Constraint(
        "; ".join(c.text for c in every),
        lambda configuration: all(c.permits(configuration) for c in every),
        lambda op, choice: all(c.allows(op, choice) for c in every),
        every,
    )
