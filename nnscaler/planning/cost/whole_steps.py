"""What whole steps teach beside the times of single operators: the costs of running a program, and of sharing cores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from nnscaler.planning.cost.model import Overheads


@dataclass(frozen=True, slots=True)
class WholeStep:
    """A step of a program on one rank that computes alone: how many statements it runs, and how many of them `again` in
    recomputation; seconds of its operators one by one, and those that it `took`."""

    statements: int
    again: int
    operators: float
    took: float


def overheads_of(steps: Sequence[WholeStep], crowded: Mapping[int, float], ranks: int) -> Overheads:
    """`crowded`: seconds of the first step while so many ranks run it at once; `ranks`: up to how many there may be.

    Operators one by one may be slower than in a step, when something else disturbed them: the crowding makes up for it.
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
    """Seconds of a statement and of a step, neither negative, from (statements, seconds beside operators) of steps. One
    number of statements does not tell the two apart: all is the statements' then."""
    (few, less), (many, more) = min(runs), max(runs)
    if few == many:
        return max(0.0, less / few), 0.0
    statement = (more - less) / (many - few)
    step = less - few * statement
    if statement < 0:
        return 0.0, max(0.0, (less + more) / 2)
    return (statement, step) if step >= 0 else (max(0.0, more / many), 0.0)
