"""The graph of one rank's step, forward and backward: calls of ATen operators and collectives.

A graph is a list of calls in the order in which they ran. Nothing is mutated in it: a call that writes to a tensor
makes a new value (`graph_recorder.py`). Tensors have shapes and dtypes, and no values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from op_registry.call import instances_in
from op_registry.source_location import SourceLocation


@dataclass(frozen=True, slots=True)
class CallOutput:
    """The tensor that a call makes: its position in the graph's list, and which output of it."""

    call: int
    output: int


@dataclass(frozen=True, slots=True)
class Form:
    """Shape and dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """One call, or one tensor that the step was given.

    overload   the operator (torch._ops.OpOverload); None for a tensor that was there before the step
    name       of the tensor that was there; of an operator, as torch prints it
    arguments  by the schema's names, defaults filled in, with a `CallOutput` for each tensor
    outputs    one per result, lists flattened; None for what is no tensor
    where      the line of the user's code that called it; in the backward pass, the line whose gradient this is
    backward   it ran in the backward pass
    """

    overload: Any
    name: str
    arguments: Mapping[str, Any]
    outputs: tuple[Form | None, ...]
    where: SourceLocation | None
    backward: bool = False


@dataclass(frozen=True, slots=True)
class HeldInGraph:
    """A tensor at the end of the step, or a parameter at its start.

    ref         where it comes from
    placements  of a DTensor: one per axis of its mesh, as torch has them; None for a plain tensor
    axes        for each of them, the program's mesh axes that it is, outermost first; none for one rank
    shape       of the whole tensor
    doubt       why it is not known to begin with the model's values; empty: it does, as far as that can be seen
    """

    ref: CallOutput
    placements: tuple[Any, ...] | None
    axes: tuple[tuple[str, ...] | None, ...]
    shape: tuple[int, ...]
    doubt: str = ""


@dataclass(frozen=True)
class RankGraph:
    """
    rank          whose graph it is
    coordinates   mesh axis -> the rank's coordinate
    calls         in the order in which they ran
    stored        parameters and buffers by name (a tied one under each of its names)
    inputs        tensors of the batch by their path in it ("ids", "0", "1.mask")
    loss          what the step returned; None where it returned none
    gradients     parameter -> its gradient when the step is over
    changed     parameters and buffers that the step wrote to, as they are when it is over
    groups        name of a process group -> the mesh axes that it spans; None where it spans no axes
    """

    rank: int
    coordinates: Mapping[str, int]
    calls: tuple[RecordedCall, ...]
    stored: Mapping[str, HeldInGraph]
    inputs: Mapping[str, CallOutput]
    loss: HeldInGraph | None
    gradients: Mapping[str, HeldInGraph]
    changed: Mapping[str, HeldInGraph]
    groups: Mapping[str, tuple[str, ...] | None]


def pruned(graph: RankGraph) -> RankGraph:
    """Return the graph without calls that nothing depends on which is there when the step is over.

    DTensor tries operators on the whole's shapes to find out what comes of them, where it does not know it yet: two
    ranks differ in that.
    """
    held = [h for h in (graph.loss, *graph.gradients.values(), *graph.changed.values()) if h is not None]
    open_ = [h.ref.call for h in (*held, *graph.stored.values())] + [ref.call for ref in graph.inputs.values()]
    live: set[int] = set()
    while open_:
        number = open_.pop()
        if number not in live:
            live.add(number)
            open_ += [ref.call for ref in instances_in(graph.calls[number].arguments, CallOutput)]
    place = {old: new for new, old in enumerate(sorted(live))}

    def moved(value: Any) -> Any:
        if isinstance(value, CallOutput):
            return CallOutput(place[value.call], value.output)
        if isinstance(value, HeldInGraph):
            return replace(value, ref=moved(value.ref))
        if isinstance(value, Mapping):
            return {name: moved(item) for name, item in value.items()}
        return tuple(map(moved, value)) if isinstance(value, list | tuple) else value

    calls = tuple(
        replace(c, arguments={n: moved(v) for n, v in c.arguments.items()})
        for c in (graph.calls[n] for n in sorted(live))
    )
    return replace(
        graph,
        calls=calls,
        stored=moved(graph.stored),
        inputs=moved(graph.inputs),
        loss=None if graph.loss is None else moved(graph.loss),
        gradients=moved(graph.gradients),
        changed=moved(graph.changed),
    )


# Several ranks' graphs side by side: they are to be one text, in which some numbers follow the rank's coordinates.
#
# A rank's graph has the rank's own numbers in it: the piece that it takes of a tensor, the first row of its vocabulary.
# Read alone, `split(x)[0]` of rank 0 may be its shard or the first of the model's three projections. Beside the graph
# of a rank with another coordinate it cannot be both: a number that differs is the coordinate's. One rank more per axis
# shows whose.


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
