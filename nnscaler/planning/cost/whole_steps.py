"""Overheads from measured steps: the costs of running a program, and of sharing cores, beside those of single
operators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from nnscaler.planning.cost.model import Overheads


@dataclass(frozen=True, slots=True)
class WholeStep:
    """A step of a program on one rank that computes alone.

    statements   how many the program runs
    again        how many of them run again in recomputation
    operators    seconds of its operators, measured one by one
    took         seconds of the step
    """

    statements: int
    again: int
    operators: float
    took: float


def overheads_of(steps: Sequence[WholeStep], crowded: Mapping[int, float], ranks: int) -> Overheads:
    """Return the overheads that explain these steps.

    `crowded` has the seconds of the first step while so many ranks run it at once, up to `ranks`. Operators one by one
    may be slower than in a step, when something else disturbed them: the crowding makes up for it.
    """
    plain = [s for s in steps if not s.again]
    part = min(1.0, *(s.took / s.operators for s in plain))
    statement, step = statement_and_step([(s.statements, s.took - part * s.operators) for s in plain])
    repeated = [
        (s.took - part * s.operators - (s.statements + s.again) * statement - step) / s.again for s in steps if s.again
    ]
    again = max(0.0, float(np.mean(repeated))) if repeated else 0.0
    counts = sorted(crowded)
    slower = np.maximum.accumulate([crowded[n] / plain[0].took for n in counts])
    times = [float(v) for v in np.interp(range(1, ranks + 1), counts, slower)]
    last = times[-1]
    return Overheads(statement * last, again * last, step * last, tuple(part * v for v in times))


def statement_and_step(runs: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Return the seconds of a statement and of a step, neither negative.

    `runs` are (statements, seconds beside operators) of steps. One number of statements does not tell the two apart:
    all is the statements' then.
    """
    (few, less), (many, more) = min(runs), max(runs)
    if few == many:
        return max(0.0, less / few), 0.0
    statement = (more - less) / (many - few)
    step = less - few * statement
    if statement < 0:
        return 0.0, max(0.0, (less + more) / 2)
    return (statement, step) if step >= 0 else (max(0.0, more / many), 0.0)
