"""The graph of one rank's step, forward and backward: calls of ATen operators and collectives.

A graph is a list of calls in the order in which they ran. Nothing is mutated in it: a call that writes to a tensor
makes a new value (`graph_recorder.py`). Tensors have shapes and dtypes, and no values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from op_registry.call import instances_in
from op_registry.spec import SourceLocation


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
