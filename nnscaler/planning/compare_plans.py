"""Compare two plans of one graph operation by operation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nnscaler.ir.placement import PartitionedGraph, Rest, RunPartial, Split
from nnscaler.layout import MICRO

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
