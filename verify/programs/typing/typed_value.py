"""The type of a variable in a rank program: a logical tensor, in a layout; and mistakes about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from nnscaler.ir.layout import INVARIANT, Layout, Replicated, State
from nnscaler.ir.mesh import MICRO


@dataclass(frozen=True)
class Axes:
    """The axes of a stage, `micro` last."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]

    @cached_property
    def pairs(self) -> tuple[tuple[str, int], ...]:
        return tuple(zip(self.names, self.sizes, strict=True))

    def layout(self, states: Mapping[str, State]) -> Layout:
        """Make a layout from states by name. Raises Mistake for an axis that the stage does not have."""
        for name in states:
            if name not in self.names:
                raise Mistake("layouts_disagree", f"a layout names axis {name!r}; the stage has {list(self.names)}")
        return tuple(states.get(name, INVARIANT) for name in self.names)


def axes_of(sizes: Mapping[str, int], micro_batches: int) -> Axes:
    return Axes((*sizes, MICRO), (*sizes.values(), micro_batches))


@dataclass(frozen=True, slots=True)
class Held:
    """A logical tensor in a layout, in normal form (`normal`)."""

    tensor: str
    layout: Layout


def normal(layout: Sequence[State], sizes: Sequence[int], needs_grad: bool) -> Layout:
    """Normalise a layout.

    On an axis of one rank all states are one, and without gradient `Replicated` and `Invariant` are.
    """
    return tuple(
        INVARIANT if parts == 1 or (not needs_grad and isinstance(state, Replicated)) else state
        for state, parts in zip(layout, sizes, strict=True)
    )


class Mistake(Exception):
    """A type error in one line. `tensor`: the logical tensor that it concerns; `cause`: the reason, in words."""

    def __init__(self, code: str, message: str, cause: str | None = None, tensor: str | None = None) -> None:
        super().__init__(message)
        self.code, self.message, self.cause, self.tensor = code, message, cause, tensor
