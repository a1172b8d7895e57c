"""Compare two plans of one graph operation by operation, and the choice of an operation with its alternatives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from nnscaler.ir.graph import Operation
from nnscaler.ir.operation_placement import PartitionedGraph, Rest, RunPartial, Split
from nnscaler.layout import MICRO
from nnscaler.planning.planner.find_plan import Found
from nnscaler.planning.sharding.build_problem import pose
from nnscaler.planning.solver.fold_equal_layers import min_marginal

_WHEN = {1: " between steps", 2: " between steps, and its gradient", 3: ""}  # by stage of ZeRO


@dataclass(frozen=True, slots=True)
class PlanDifference:
    """One thing that two plans do otherwise.

    kind        "split", "stage" or "recomputed" of an operation; "at rest" of a parameter
    operation   its name, or that of the parameter
    before      how it was
    now         how it is
    """

    kind: str
    operation: str
    before: str
    now: str


def differences(before: PartitionedGraph, now: PartitionedGraph) -> tuple[PlanDifference, ...]:
    """Return the differences in the order of the graph, for operations that both run.

    Sizes of axes do not count, nor does a choice that splits nothing.
    """
    found = []
    for op in now.graph.operations:
        if op.name not in before.placements:  # what micro-batches share is an operation of its own
            continue
        for kind, describe in (("split", splits_of), ("stage", stages_of), ("recomputed", recomputed)):
            old, new = describe(before, op.name), describe(now, op.name)
            if old != new:
                found.append(PlanDifference(kind, op.name, old, new))
    for tensor in now.graph.with_role("parameter"):
        old, new = (at_rest(graph.at_rest.get(tensor.name, {})) for graph in (before, now))
        if old != new:
            found.append(PlanDifference("at rest", tensor.fqns[0], old, new))
    return tuple(found)


def at_rest(axes: Mapping[str, Rest]) -> str:
    """Return how a parameter rests, by the stage of ZeRO on each axis: `in shards over dp`."""
    return (
        " and ".join(
            f"{'on its owner' if rest.owned else 'in shards'} over {axis}{_WHEN[rest.zero]}"
            for axis, rest in axes.items()
        )
        or "as it is read"
    )


def splits_of(graph: PartitionedGraph, operation: str) -> str:
    """Return the identifiers that every axis splits: `dp b, tp n`; `whole` where none does."""
    placement = graph.placements[operation]
    first = placement.stages[0]
    shown = []
    for axis, choice in zip(graph.stages[first].axes, placement.choices[first], strict=True):
        if axis.name != MICRO and axis.size > 1 and isinstance(choice, Split | RunPartial):
            shown.append(f"{axis.name} {str(choice).removeprefix('split ')}")
    return ", ".join(shown) or "whole"


def stages_of(graph: PartitionedGraph, operation: str) -> str:
    """Return the stages of an operation: `0`, or `0, 1` where it is repeated."""
    return ", ".join(map(str, graph.placements[operation].stages))


def recomputed(graph: PartitionedGraph, operation: str) -> str:
    """Return `yes` where backward computes the operation again, else `no`."""
    placement = graph.placements[operation]
    return "yes" if placement.recompute or (placement.chunk and placement.chunk.recompute) else "no"


# Explain why an operation is run as it is: what every other choice would cost, all others adapting to it.


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
    again = subject.groups.get(op.name, -1) in best.again.layers
    problem = pose(best.tables, replace(best.weights, live=live, recompute=again))
    index = next(i for i, other in enumerate(subject.graph.operations) if other.name == op.name)
    marginal = min_marginal(problem, index, best.stages[number].price)
    strategies = best.tables.strategies[op.name]
    memory = problem.nodes[index].memory
    assert memory is not None
    if not any(op.name in one.operations for one in best.again.outputs):
        memory = memory + live * best.tables.columns[index].cheap
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
