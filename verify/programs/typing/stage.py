"""Type one stage: stored tensors, inputs and messages in, results out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from nnscaler.ir.conversion_table_and_paths import explain_illegal
from nnscaler.ir.graph import Graph, LogicalTensor
from nnscaler.layout import IN_STEP, INVARIANT, REPLICATED, Layout, Partial, Replicated, Sharded
from verify.programs.typing.lines.type_lines_in_order import Reading, Scope, Walk
from verify.programs.typing.lines.type_operation_lines import Typer
from verify.programs.typing.program_files.parse_stage_body import shadowing
from verify.programs.typing.program_files.rank_program_syntax import Body, InputText, StageText, StoredText, Variable
from verify.programs.typing.typed_value import Axes, Held, Mistake, axes_of, normal


def read_stage(
    stage: StageText,
    graph: Graph,
    stored: Mapping[str, LogicalTensor],
    received: Mapping[str, Held | None],
    typer: Typer,
) -> Reading:
    """Interpret `prepare` and `forward`. `stored`: fqn -> tensor; `received`: what arrives, by variable."""
    reading = Reading(stage, axes_of(stage))
    for number, name in shadowing(stage):
        message = f"`{name}` is assigned, and means something else in a rank program"
        reading.note(number, Mistake("program_unreadable", message))
    base = _stored_scope(reading, stored)
    prepared: dict[str, Held | None] = {}
    if stage.prepare is not None:
        scope = base | _fed(reading, stage.prepare_inputs, graph, in_time=False)
        scope = _arguments(reading, stage.prepare, scope)
        whole = replace(reading, axes=axes_of(stage, 1))  # `prepare` sees all micro-batches as one
        walk = Walk(whole, graph, typer, scope)
        walk.statements(stage.prepare.statements)
        prepared = {n: _prepared(walk, stage.prepare.number, v) for n, v in stage.prepare.returned.items()}
        reading.computed, reading.converted = whole.computed, whole.converted
    scope = base | _fed(reading, stage.inputs, graph, in_time=True)
    scope |= {Variable(name): held for name, held in received.items()}
    scope |= {Variable(name): held for name, held in prepared.items() if name not in stage.updates}
    scope = _arguments(reading, stage.forward, scope)
    walk = Walk(reading, graph, typer, scope)
    walk.statements(stage.forward.statements)
    _check_names(reading, stage)
    reading.returned = {n: h for n, h in prepared.items() if n in stage.updates}
    for name, variable in stage.forward.returned.items():
        reading.returned[name] = walk.read(stage.forward.number, variable)
    return reading


def _prepared(walk: Walk, number: int, variable: Variable) -> Held | None:
    """Return the type of a result of `prepare`, which records no gradients."""
    held = walk.read(number, variable)
    if held is not None and walk.graph.tensors[held.tensor].needs_grad:
        message = f"`{held.tensor}` is computed in `prepare`, which records no gradients, and needs one"
        mistake = Mistake("layouts_disagree", message, "the gradient is cut off there", held.tensor)
        walk.reading.note(number, mistake)
    return held


def leaf_layout(stored: StoredText, axes: Axes, tensor: LogicalTensor) -> Layout:
    """Return the layout of the autograd leaf: at rest, and `Replicated` where its gradient is summed
    at the step's end."""
    states = list(axes.layout(stored.states))
    if stored.kind == "parameter":
        for axis, name in enumerate(axes.names):
            if (name in stored.reduce or name in IN_STEP) and states[axis] == INVARIANT:
                states[axis] = REPLICATED
    return normal(states, axes.sizes, tensor.needs_grad)


def _stored_scope(reading: Reading, known: Mapping[str, LogicalTensor]) -> Scope:
    scope: Scope = {}
    for stored in reading.stage.stored:
        variable = Variable(stored.variable, stored=True)
        tensor = known.get(stored.fqn)
        scope[variable] = None
        try:
            if tensor is None:
                message = f"the model has no `{stored.fqn}`, which stage {reading.stage.index} holds"
                raise Mistake("not_covered", message)
            layout = leaf_layout(stored, reading.axes, tensor)
            at_rest = reading.axes.layout(stored.states)
            wrong = explain_illegal(at_rest, reading.axes.sizes, tensor.shape)
            if any(isinstance(s, Partial | Replicated) for s in at_rest):
                wrong = "a stored tensor is whole or sharded at rest"
            if not {*IN_STEP}.isdisjoint(stored.states):
                wrong = "it is cut once, and not for each micro-batch"
            if wrong:
                raise Mistake("not_covered", f"`{stored.fqn}` cannot lie so: {wrong}", tensor=tensor.name)
            scope[variable] = Held(tensor.name, layout)
        except Mistake as mistake:
            reading.note(stored.number, mistake)
    return scope


def _fed(reading: Reading, inputs: Sequence[InputText], graph: Graph, in_time: bool) -> Scope:
    """Return the pieces of the model's inputs; only `forward` sees micro-batches."""
    scope: Scope = {}
    for declared in inputs:
        scope[Variable(declared.variable)] = None
        try:
            tensor = graph.tensors.get(declared.name)
            if tensor is None or tensor.role != "input":
                raise Mistake("not_covered", f"the model has no input `{declared.name}`")
            layout = reading.axes.layout(declared.states)
            problem = explain_illegal(layout, reading.axes.sizes, tensor.shape)
            if any(not isinstance(s, Sharded) and s != INVARIANT for s in layout):
                problem = "an input is cut or whole"
            if not in_time and not {*IN_STEP}.isdisjoint(declared.states):
                problem = "`prepare` sees the whole step, not a micro-batch"
            if problem:
                raise Mistake("not_covered", f"input `{declared.name}` cannot be cut so: {problem}", tensor=tensor.name)
            held = Held(tensor.name, normal(layout, reading.axes.sizes, tensor.needs_grad))
            scope[Variable(declared.variable)] = held
        except Mistake as mistake:
            reading.note(declared.number, mistake)
    return scope


def _arguments(reading: Reading, body: Body, scope: Scope) -> Scope:
    """Return the scope of a method: only what it is given by name, and the stage's attributes."""
    visible: Scope = {v: held for v, held in scope.items() if v.stored}
    for name in body.arguments:
        if Variable(name) not in scope:
            message = f"`{name}` is an argument, and nothing gives it: no input, message or result of `prepare`"
            reading.note(body.number, Mistake("program_unreadable", message))
        visible[Variable(name)] = scope.get(Variable(name))
    given = [v.name for v in scope if not v.stored]
    for name in given:
        if name not in body.arguments:
            message = f"`{name}` is given to the stage, and its function does not take it"
            reading.note(body.number, Mistake("program_unreadable", message))
    return visible


def _check_names(reading: Reading, stage: StageText) -> None:
    """Check that nothing is given to `forward` twice, and that no new value of a buffer is returned twice."""
    prepared = {} if stage.prepare is None else stage.prepare.returned
    shared = [name for name in prepared if name not in stage.updates]
    names = [*(i.variable for i in stage.inputs), *(r.variable for r in stage.receives), *shared]
    for name in {n for n in names if names.count(n) > 1}:
        reading.note(stage.number, Mistake("program_unreadable", f"`{name}` is given to `forward` twice"))
    for name in set(prepared).intersection(stage.forward.returned):
        message = f"`{name}` is returned by `prepare` and by `forward`"
        reading.note(stage.forward.number, Mistake("program_unreadable", message))
