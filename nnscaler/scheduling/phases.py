"""Orders that are written as phases: how often a pattern of passes is repeated, and which one comes then."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from typing import cast

from nnscaler.instructions import Instruction, Kind

Phase = tuple[int, str]  # how often; the passes, such as "F0 I1 W"


def in_phases(stages: Sequence[int], phases: Iterable[Phase], micro_batches: int) -> tuple[Instruction, ...]:
    """Return the order of a device that runs these phases.

    stages         of the device; the number in a word says which one of them
    phases         in the words `F0`, `B0` and `I0`, each of which takes the next micro-batch of its kind (B and I
                   count together), and `W`, which takes the oldest micro-batch of all whose I ran and whose W did not
    micro_batches  those after them are left out

    A schedule whose phases are for a full pipeline is filled up with micro-batches that do not exist: since no pass
    depends on another micro-batch, an order without deadlock has none either after they are left out.
    """
    counts: Counter[tuple[str, int]] = Counter()
    halves: deque[Instruction] = deque()
    order: list[Instruction] = []
    for times, pattern in phases:
        for word in pattern.split() * times:
            if word == "W":
                order.append(halves.popleft().of("W"))
                continue
            kind, stage = cast(Kind, word[0]), stages[int(word[1:])]
            key = ("F" if kind == "F" else "B", stage)
            order.append(Instruction(kind, stage, (counts[key],)))
            counts[key] += 1
            if kind == "I":
                halves.append(order[-1])
    return tuple(i for i in order if i.micro < micro_batches)
