"""Why an operation is run as it is: what every other choice would cost, all others adapting to it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nnscaler.ir.operation import Operation
from nnscaler.planning.planner.plan import Found
from nnscaler.planning.sharding.pose import pose
from nnscaler.planning.solver.fold import min_marginal


@dataclass(frozen=True, slots=True)
class Alternative:
    """`choice` on tp, and by how many seconds a step the best plan of this configuration with it is slower. `bytes`:
    what the operation itself then holds on a rank, with its parameters."""

    choice: str
    slower: float
    bytes: float
    chosen: bool


def alternatives(found: Found, op: Operation) -> tuple[Alternative, ...]:
    """Every choice of an operation, the fastest first: reduced costs, exact for the problem of the chosen
    configuration (min-marginals of the elimination), at its price of memory."""
    best = found.best
    problem = pose(best.tables, best.weights)
    index = next(i for i, other in enumerate(found.subject.graph.operations) if other.name == op.name)
    marginal = min_marginal(problem, index, best.solution.multiplier)
    strategies = best.tables.strategies[op.name]
    memory = problem.nodes[index].memory
    assert memory is not None
    result = [
        Alternative(
            " ".join(map(str, s.choices)) or "whole",
            float(value),
            float(held),
            k == best.solution.choices[index],
        )
        for k, (s, value, held) in enumerate(zip(strategies, marginal - np.min(marginal), memory, strict=True))
    ]
    return tuple(sorted(result, key=lambda a: (not a.chosen, a.slower)))
