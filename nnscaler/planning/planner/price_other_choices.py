"""Explain why an operation is run as it is: what every other choice would cost, all others adapting to it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from nnscaler.ir.graph import Operation
from nnscaler.planning.planner.find_plan import Found
from nnscaler.planning.sharding.build_problem import pose
from nnscaler.planning.solver.fold_equal_layers import min_marginal


@dataclass(frozen=True, slots=True)
class Alternative:
    """One choice of an operation.

    choice   on tp, in words
    slower   seconds a step by which the best plan of this configuration with this choice is slower
    bytes    that the operation itself then holds on a rank, with its parameters
    chosen   whether the plan makes this choice
    """

    choice: str
    slower: float
    bytes: float
    chosen: bool


def alternatives(found: Found, op: Operation) -> tuple[Alternative, ...]:
    """Return every choice of an operation, the fastest first.

    The figures are reduced costs, exact for the problem of the chosen configuration (min-marginals of the elimination),
    at the price of memory of the operation's stage, and with all layers recomputed or not as its own is.
    """
    best, subject = found.best, found.subject
    item = subject.items[op.name]
    number = next(i for i, stage in enumerate(best.stages) if stage.items[0] <= item < stage.items[1])
    live = best.configuration.live(best.configuration.stage_devices[number])
    again = subject.groups.get(op.name, -1) in best.again
    problem = pose(best.tables, replace(best.weights, live=live, recompute=again))
    index = next(i for i, other in enumerate(subject.graph.operations) if other.name == op.name)
    marginal = min_marginal(problem, index, best.stages[number].price)
    strategies = best.tables.strategies[op.name]
    memory = problem.nodes[index].memory
    assert memory is not None
    result = [
        Alternative(
            " ".join(map(str, s.choices)) or "whole",
            float(value),
            float(held),
            k == best.choices[index],
        )
        for k, (s, value, held) in enumerate(zip(strategies, marginal - np.min(marginal), memory, strict=True))
    ]
    return tuple(sorted(result, key=lambda a: (not a.chosen, a.slower)))
