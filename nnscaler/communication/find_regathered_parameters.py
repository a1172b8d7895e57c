"""Parameters that lie in shards where a stage reads them (ZeRO-3): which statements gather them, and what gathers them
again in backward.

The runtime lets go of a whole after the last statement that reads it, and gathers it once more for what backward reads
of it (`sharded_parameter_gathers`). Of one dim it is kept: what is saved is not worth a call. All are kept where ranks
have unequal parts of a batch, for which autograd need not save the same (`may_gather_again` of a stage).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from op_registry.registry import facts_of

from nnscaler.communication.communicated_graph import (
    Compute,
    Convert,
    StageProgram,
    Version,
    again_in,
    differentiated,
    kept_inputs,
    reads,
    writes,
)
from nnscaler.ir.graph import Graph
from nnscaler.layout import Sharded, is_uneven

_SAME_MEMORY = ("replicate", "invariant")  # rows whose result is a view


def parameter_gathers(graph: Graph, program: StageProgram) -> Mapping[int, Convert]:
    """Return the conversions of `forward` that make a parameter whole before it is read, by position."""
    parameters = {s.variable for s in program.stored if graph.tensors[s.tensor].role == "parameter"}
    found: dict[int, Convert] = {}
    for i, statement in enumerate(program.forward):
        if isinstance(statement, Convert) and statement.source.variable in parameters:
            trained = graph.tensors[statement.source.tensor].needs_grad
            if statement.move.row.function == ("all_gather_replicated" if trained else "all_gather"):
                found[i] = statement
    return found


def let_go(graph: Graph, program: StageProgram) -> Mapping[str, int]:
    """Return, by variable that shows a gathered parameter which is not kept for backward, what gathers it."""
    given = [feed.version.layout for feed in program.feeds] + [m.target.layout for m in program.receives]
    gathers = parameter_gathers(graph, program)
    found: dict[str, int] = {}
    if not gathers or any(map(is_uneven, given)):
        return found
    for i, statement in enumerate(program.forward):
        made = [v.variable for v in writes(statement)]
        if i in gathers:
            if len(graph.tensors[gathers[i].source.tensor].shape) > 1:
                found.update(dict.fromkeys(made, i))
        elif isinstance(statement, Convert):
            if statement.source.variable in found and _is_view(graph, program, statement):
                found.update(dict.fromkeys(made, found[statement.source.variable]))
        elif isinstance(statement, Compute) and facts_of(statement.operation.operator).view:
            shown = found.get(statement.inputs[0].variable)
            found.update(dict.fromkeys(made, shown) if shown is not None else {})
    return found


def _is_view(graph: Graph, program: StageProgram, statement: Convert) -> bool:
    """Return whether a conversion gives the memory that it is given; of a slice in time, where that is in one piece."""
    if statement.move.row.function in _SAME_MEMORY:
        return True
    state = statement.move.target[statement.move.axis]
    if statement.move.axis < program.stage.first_in_time or not isinstance(state, Sharded):
        return False
    before = graph.tensors[statement.source.tensor].shape[: state.dim]
    return state.outer == 1 and not state.sections and all(size == 1 for size in before)


def gathered_again(graph: Graph, program: StageProgram) -> Mapping[int, tuple[int, ...]]:
    """Return, by statement that gathers a parameter, those for which backward gathers it once more: that keep it, or
    are run again with it and stand in another region than the gather. It comes before the last one of them."""
    wholes = let_go(graph, program) if program.gradient else {}
    live = differentiated(graph, program) if wholes else frozenset()
    regions = [again_in(graph, program.forward, i) for i in range(len(program.forward))] if wholes else []
    found: dict[int, list[int]] = {}
    for i, (statement, region) in enumerate(zip(program.forward, regions, strict=False)):
        if live.isdisjoint(v.variable for v in writes(statement)):
            continue
        read: Sequence[Version] = ()
        if region is not None:
            read = reads(statement)
        elif isinstance(statement, Compute):
            read = kept_inputs(graph, statement)
        for gather in {wholes[v.variable] for v in read if v.variable in wholes}:
            if gather != i and (region is None or regions[gather] != region):
                found.setdefault(gather, []).append(i)
    return {gather: tuple(readers) for gather, readers in found.items()}
