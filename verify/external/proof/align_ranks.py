"""Several ranks' graphs side by side: they are to be one text, in which some numbers follow the rank's coordinates.

A rank's graph has the rank's own numbers in it: the piece that it takes of a tensor, the first row of its vocabulary.
Read alone, `split(x)[0]` of rank 0 may be its shard or the first of the model's three projections. Beside the graph
of a rank with another coordinate it cannot be both: a number that differs is the coordinate's. One rank more per axis
shows whose.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verify.external.proof.rank_graph import CallOutput, RankGraph, RecordedCall


@dataclass(frozen=True, slots=True)
class Follows:
    """A number that is `start + step * (coordinate on axis)`."""

    axis: str
    start: int
    step: int


@dataclass(frozen=True)
class Aligned:
    """
    graph    the first rank's graph
    varies   call -> argument (with its place in lists) -> what it is; a `CallOutput` stands for the number of its
             output. None: it follows no coordinate
    ranks    whose graphs these are
    differs  why the graphs are not one text; None if they are
    """

    graph: RankGraph
    varies: Mapping[int, Mapping[tuple[Any, ...], Follows | None]]
    ranks: tuple[int, ...]
    differs: str | None = None


def align(graphs: Sequence[RankGraph]) -> Aligned:
    """Compare the graphs call by call with the first."""
    first, ranks = graphs[0], tuple(g.rank for g in graphs)
    varies: dict[int, dict[tuple[Any, ...], Follows | None]] = {}
    for other in graphs[1:]:
        if len(other.calls) != len(first.calls):
            return Aligned(first, {}, ranks, f"ranks {first.rank} and {other.rank} make different numbers of calls")
    for number, call in enumerate(first.calls):
        others = [g.calls[number] for g in graphs[1:]]
        for graph, its in zip(graphs[1:], others, strict=True):
            if (call.name, call.outputs, call.arguments.keys()) != (its.name, its.outputs, its.arguments.keys()):
                where = f" ({call.where})" if call.where else ""
                text = f"rank {first.rank} calls `{call.name}` where rank {graph.rank} calls `{its.name}`{where}"
                return Aligned(first, {}, ranks, text)
        if call.arguments and any(call.arguments != its.arguments for its in others):
            found = _different(graphs, [call, *others])
            if isinstance(found, str):
                return Aligned(first, {}, ranks, found)
            if found:
                varies[number] = found
    ends = [(g.loss and g.loss.ref, {n: h.ref for n, h in g.gradients.items()}) for g in graphs]
    if any(end != ends[0] for end in ends):
        return Aligned(first, {}, ranks, "the ranks' losses or gradients come from different calls")
    return Aligned(first, varies, ranks)


def _different(
    graphs: Sequence[RankGraph], calls: Sequence[RecordedCall]
) -> dict[tuple[Any, ...], Follows | None] | str:
    found: dict[tuple[Any, ...], Follows | None] = {}
    problem: list[str] = []

    def walk(values: Sequence[Any], path: tuple[Any, ...]) -> None:
        head = values[0]
        if all(v == head for v in values):
            return
        if isinstance(head, list | tuple) and all(isinstance(v, list | tuple) and len(v) == len(head) for v in values):
            for i in range(len(head)):
                walk([v[i] for v in values], (*path, i))
        elif isinstance(head, CallOutput) and all(isinstance(v, CallOutput) and v.call == head.call for v in values):
            found[path] = _follows(graphs, [v.output for v in values])
        elif all(type(v) is int for v in values):
            found[path] = _follows(graphs, values)
        elif isinstance(head, str) and path == ("group_name",):
            if len({g.groups.get(v) for g, v in zip(graphs, values, strict=True)}) > 1:
                problem.append(f"ranks call `{calls[0].name}` over different axes")
        else:
            problem.append(f"ranks call `{calls[0].name}` with different arguments {path[0]}")

    for name in calls[0].arguments:
        walk([c.arguments[name] for c in calls], (name,))
    return problem[0] if problem else found


def _follows(graphs: Sequence[RankGraph], values: Sequence[int]) -> Follows | None:
    """Return the only coordinate that the numbers follow; None if there is none, or several may be it."""
    fits: list[Follows] = []
    for axis in graphs[0].coordinates:
        places = [g.coordinates[axis] for g in graphs]
        other = next((i for i, p in enumerate(places) if p != places[0]), None)
        if other is None:
            continue
        step, rest = divmod(values[other] - values[0], places[other] - places[0])
        start = values[0] - step * places[0]
        if not rest and all(v == start + step * p for v, p in zip(values, places, strict=True)):
            fits.append(Follows(axis, start, step))
    return fits[0] if len(fits) == 1 else None
