"""The four states of a layout, on two ranks, and the table of conversions between them.

Numbers are cut and summed here as the states say; the pairing of a value with its gradient is computed from what the
ranks hold, and must come out as that of the whole tensors. The table is that of
`nnscaler.ir.conversion_table_and_paths`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from docs.pictures.svg import Picture, line, paragraph, rect, words
from nnscaler.ir.conversion_table_and_paths import ROWS
from nnscaler.layout import Invariant, Partial, Replicated, Sharded
from nnscaler.runtime.cut_tensors import pieces_of

RANKS = 2
VALUE, GRADIENT = torch.tensor([3, 1, 4, 2]), torch.tensor([2, 5, 1, 4])
CELL = 24
STATES = (Invariant, Replicated, Sharded, Partial)


def _full(whole: torch.Tensor) -> list[torch.Tensor]:
    return [whole] * RANKS


def _terms(whole: torch.Tensor) -> list[torch.Tensor]:
    first = torch.tensor([1, 3, 2, -1])
    return [first, whole - first]


def _shards(whole: torch.Tensor) -> list[torch.Tensor]:
    return pieces_of(whole, Sharded(0), RANKS)


@dataclass(frozen=True, slots=True)
class Held:
    """A state: what each rank holds of a value and of a gradient, and how the pairing adds up."""

    value: Callable[[torch.Tensor], list[torch.Tensor]]
    gradient: Callable[[torch.Tensor], list[torch.Tensor]]
    pairing: str
    of: Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], torch.Tensor]
    told: str


HELD = {
    Invariant: Held(_full, _full, "v · g on one rank", lambda v, g: v[0] @ g[0], "all is replicated"),
    Replicated: Held(_full, _terms, "v · (g₀ + g₁)", lambda v, g: v[0] @ sum(g), "operand of a split operation"),
    Sharded: Held(_shards, _shards, "v₀ · g₀ + v₁ · g₁", lambda v, g: v[0] @ g[0] + v[1] @ g[1], "a piece for each"),
    Partial: Held(_terms, _full, "(v₀ + v₁) · g", lambda v, g: sum(v) @ g[0], "a sum that is still to be made"),
}


def draw_states() -> Picture:
    """Return the picture of the four states: value and gradient on each rank."""
    wide, left, top = 222, 24, 66
    paired = int(VALUE @ GRADIENT)
    whole = f"the whole: v = {VALUE.tolist()}, g = {GRADIENT.tolist()}, v · g = {paired}"
    pieces = [
        words(left, 34, "A layout says how a value and its gradient lie on the ranks of an axis", "bold", size=16)
    ]
    pieces.append(words(left, 54, whole, "mono faint", size=12))
    for number, state in enumerate(STATES):
        pieces += _state(left + number * (wide + 14), top, wide, state, paired)
    return Picture(2 * left + 4 * wide + 3 * 14, 364, "The four states of a layout", tuple(pieces))


def _state(x: float, y: float, wide: float, state: type, paired: int) -> list[str]:
    held = HELD[state]
    values, gradients = held.value(VALUE), held.gradient(GRADIENT)
    assert int(held.of(values, gradients)) == paired, state
    pieces = [
        rect(x, y, wide, 280, "card", radius=8),
        words(x + 14, y + 26, state.__name__, "bold", size=15),
        words(x + 14, y + 44, held.told, "faint", size=12),
    ]
    for number, (name, held_by) in enumerate((("value", values), ("gradient", gradients))):
        top = y + 70 + number * 86
        pieces.append(words(x + 14, top, name, "faint", size=11.5))
        for rank, piece in enumerate(held_by):
            start = 0 if len(piece) == len(VALUE) else rank * len(piece)
            pieces += _cells(x + 62, top + 8 + rank * (CELL + 4), piece.tolist(), start, rank)
    pieces.append(line(x + 14, y + 242, x + wide - 14, y + 242))
    pieces.append(words(x + 14, y + 264, f"{held.pairing} = {paired}", "mono good", size=12.5))
    return pieces


def _cells(x: float, y: float, numbers: Sequence[int], start: int, rank: int) -> list[str]:
    """Return the cells that a rank holds, each at its place in the whole."""
    pieces = [words(x - 8, y + 16, f"rank {rank}", "faint", size=10.5, anchor="end")]
    pieces += [rect(x + place * (CELL + 3), y, CELL, CELL, "code", radius=3) for place in range(len(VALUE))]
    for number, value in enumerate(numbers):
        at = x + (start + number) * (CELL + 3)
        pieces.append(rect(at, y, CELL, CELL, "pale", radius=3))
        pieces.append(words(at + CELL / 2, y + 16.5, value, "mono", size=12.5, anchor="middle"))
    return pieces


def draw_conversions() -> Picture:
    """Return the table: which collective leads from one state to another, and what its gradient does."""
    names, wide, tall, left, top = 100, 204, 74, 24, 96
    pieces = [
        words(left, 34, "Conversions on one axis: what runs forward, and what its gradient runs", "bold", size=16),
        *paragraph(left, 55, ["from a row's state to a column's; the name is the function in the generated program"]),
    ]
    for number, state in enumerate(STATES):
        pieces.append(words(left + names + number * (wide + 6) + 12, top - 10, state.__name__, "bold"))
        pieces.append(words(left, top + number * (tall + 6) + 32, state.__name__, "bold"))
    for row, before in enumerate(STATES):
        for column, after in enumerate(STATES):
            x, y = left + names + column * (wide + 6), top + row * (tall + 6)
            pieces += _conversion(x, y, wide, tall, before, after)
    width, height = left * 2 + names + 4 * wide + 18, top + 4 * (tall + 6) + 14
    return Picture(width, height, "The conversion table of nnscaler.ir.conversion_table_and_paths", tuple(pieces))


def _conversion(x: float, y: float, wide: float, tall: float, before: type, after: type) -> list[str]:
    row = ROWS.get((before, after))
    if row is None:
        told = "nothing to do" if before is after else "by way of another state"
        return [
            rect(x, y, wide, tall, "card", radius=6),
            words(x + wide / 2, y + tall / 2 + 4, told, "faint", size=12, anchor="middle"),
        ]
    talks = bool(row.forward or row.backward)
    pieces = [rect(x, y, wide, tall, "unsureback" if talks else "card", radius=6)]
    pieces.append(words(x + 12, y + 22, row.function, "mono bold", size=12))
    for number, (name, collective) in enumerate((("forward", row.forward), ("gradient", row.backward))):
        at = y + 43 + number * 18
        pieces.append(words(x + 12, at, name, "faint", size=11.5))
        shown = collective or "on its own rank"
        pieces.append(words(x + 72, at, shown, "mono unsure" if collective else "faint", size=11.5))
    return pieces
