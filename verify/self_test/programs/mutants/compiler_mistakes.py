"""Mistakes of the compiler, after which the text is generated as ever.

Wrong conversions, layouts, messages and calls in the communicated graph, placements that an operator's annotation
forbids, and placements that a mutant of its annotation allows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from op_registry.annotation.splits import splittable
from op_registry.bind_and_localise_call import bind_call
from op_registry.errors import NnscalerError

from nnscaler.communication.communicated_graph import (
    Compute,
    Convert,
    Feed,
    StageMessage,
    StageProgram,
    Statement,
    Stored,
    Version,
    reads,
    writes,
)
from nnscaler.ir.conversion_table_and_paths import ROWS, ConversionStep
from nnscaler.ir.derive_operand_layouts import input_states, output_states
from nnscaler.ir.graph import Operation
from nnscaler.ir.operation_annotations import Signature
from nnscaler.ir.operation_placement import RunPartial, Split
from nnscaler.layout import INVARIANT, PARTIAL, REPLICATED, Partial, Sharded, State, with_state
from verify.self_test.operators.annotation_mutants import annotation_mutants
from verify.self_test.programs.compile_in_steps import Generation, Sources, Text

FindGraph = Callable[[Generation], Iterator[Text]]
Change = Callable[[StageProgram], StageProgram]


def _changed(made: Generation, stage: int, change: Change) -> Text:
    def text() -> Sources | None:
        stages = list(made.communicated.stages)
        stages[stage] = change(stages[stage])
        return made.text(replace(made.communicated, stages=tuple(stages)))

    return text


def _statements(made: Generation, kind: type[Statement]) -> Iterator[tuple[int, int, Statement]]:
    for number, program in enumerate(made.communicated.stages):
        for at, statement in enumerate(program.forward):
            if isinstance(statement, kind):
                yield number, at, statement


def _put(at: int, value: object, section: str = "forward") -> Change:
    """Put something in the place of a statement, or of an entry of another section."""

    def change(program: StageProgram) -> StageProgram:
        entries = getattr(program, section)
        more: dict[str, Any] = {section: (*entries[:at], value, *entries[at + 1 :])}
        return replace(program, **more)

    return change


def _needs_grad(made: Generation, version: Version) -> bool:
    return made.communicated.partitioned.graph.tensors[version.tensor].needs_grad


def _no_conversion(made: Generation) -> Iterator[Text]:
    """Every consumer reads the layout that the producer made."""
    for stage, at, found in _statements(made, Convert):
        assert isinstance(found, Convert)
        if found.move.row.function == "replicate" and not _needs_grad(made, found.source):
            continue

        def change(program: StageProgram, at: int = at, gone: Convert = found) -> StageProgram:
            renamed = tuple(_rename(s, gone.target.variable, gone.source) for s in program.forward)
            kept = (*renamed[:at], *renamed[at + 1 :])
            loss = gone.source if program.loss == gone.target else program.loss
            sends = tuple(replace(m, source=gone.source) if m.source == gone.target else m for m in program.sends)
            return replace(program, forward=kept, loss=loss, sends=sends)

        yield _changed(made, stage, change)


def _rename(statement: Statement, old: str, new: Version) -> Statement:
    if isinstance(statement, Convert):
        return replace(statement, source=new) if statement.source.variable == old else statement
    read = tuple(new if v.variable == old else v for v in reads(statement))
    return replace(statement, inputs=read) if isinstance(statement, Compute) else replace(statement, sources=read)


def _other_state(made: Generation) -> Iterator[Text]:
    """A conversion ends in another state than its consumers need."""
    for stage, at, found in _statements(made, Convert):
        assert isinstance(found, Convert)
        move = found.move
        before, after = move.source[move.axis], move.target[move.axis]
        options: tuple[State, ...] = (INVARIANT, REPLICATED, PARTIAL)
        for state in options:
            grad_only = {type(state), type(after)} == {type(INVARIANT), type(REPLICATED)}
            same = type(state) in (type(after), type(before)) or (type(before), type(state)) not in ROWS
            maximum = isinstance(before, Partial) and before.reduction == "max"
            if not same and not maximum and (not grad_only or _needs_grad(made, found.source)):
                other = ConversionStep(move.axis, move.source, with_state(move.target, move.axis, state))
                yield _changed(made, stage, _put(at, replace(found, move=other)))


def _other_axis(made: Generation) -> Iterator[Text]:
    for stage, at, found in _statements(made, Convert):
        assert isinstance(found, Convert)
        move, sizes = found.move, made.communicated.stages[stage].stage.mesh.axes
        if move.row.function == "replicate" and not _needs_grad(made, found.source):
            continue
        for axis in range(len(sizes)):
            if axis != move.axis:
                source, target = (with_state(x, axis, x[move.axis]) for x in (move.source, move.target))
                yield _changed(made, stage, _put(at, replace(found, move=ConversionStep(axis, source, target))))


def _other_version(made: Generation) -> Iterator[Text]:
    """An operation reads a tensor in a layout that it does not fit."""
    for stage, at, found in _statements(made, Compute):
        assert isinstance(found, Compute)
        earlier = _versions(made.communicated.stages[stage], at)
        for slot, version in enumerate(found.inputs):
            for other in earlier:
                if other.tensor == version.tensor and other.layout != version.layout and _needs_grad(made, version):
                    inputs = (*found.inputs[:slot], other, *found.inputs[slot + 1 :])
                    yield _changed(made, stage, _put(at, replace(found, inputs=inputs)))


def _versions(program: StageProgram, before: int) -> list[Version]:
    known = [f.version for f in program.feeds]
    for statement in program.forward[:before]:
        known += writes(statement)
    return known


def _call_of_the_whole(made: Generation) -> Iterator[Text]:
    """The arguments of the whole operation, on a shard."""
    for stage, at, found in _statements(made, Compute):
        assert isinstance(found, Compute)
        whole = made.known[found.operation.name].call
        if (whole.args, whole.kwargs) != (found.call.args, found.call.kwargs):
            yield _changed(made, stage, _put(at, replace(found, call=whole)))


def _stored(made: Generation, change: Callable[[Stored], Iterator[Stored]]) -> Iterator[Text]:
    graph = made.communicated.partitioned.graph
    for number, program in enumerate(made.communicated.stages):
        for at, stored in enumerate(program.stored):
            if not graph.tensors[stored.tensor].needs_grad or not graph.consumers[stored.tensor]:
                continue
            for other in change(stored):
                yield _changed(made, number, _put(at, other, "stored"))


def _reduce(made: Generation) -> Iterator[Text]:
    """A gradient is summed over one axis less."""
    return _stored(made, lambda s: (replace(s, reduce=tuple(a for a in s.reduce if a != axis)) for axis in s.reduce))


def _at_rest(made: Generation) -> Iterator[Text]:
    """A parameter rests otherwise than the program uses it."""

    def change(stored: Stored) -> Iterator[Stored]:
        for axis, state in enumerate(stored.at_rest):
            if isinstance(state, Sharded):
                yield replace(stored, at_rest=with_state(stored.at_rest, axis, INVARIANT))
                if not state.sections:
                    outer = replace(state, outer=1 if state.outer > 1 else 2)
                    yield replace(stored, at_rest=with_state(stored.at_rest, axis, outer))

    return _stored(made, change)


def _feed(made: Generation) -> Iterator[Text]:
    """A rank is fed another piece of the batch."""
    several = sum(len(program.feeds) for program in made.communicated.stages) > 1
    for number, program in enumerate(made.communicated.stages):
        for at, feed in enumerate(program.feeds):
            for axis, state in enumerate(feed.version.layout):
                if isinstance(state, Sharded):
                    for other in (INVARIANT, replace(state, outer=2 * state.outer)):
                        if other is INVARIANT or several:
                            wrong = Feed(replace(feed.version, layout=with_state(feed.version.layout, axis, other)))
                            yield _changed(made, number, _put(at, wrong, "feeds"))


def _message(made: Generation) -> Iterator[Text]:
    """The gradient of a message is not asked for: by both sides, or by the receiver."""
    for number, program in enumerate(made.communicated.stages):
        for at, message in enumerate(program.receives):
            if message.needs_grad:
                yield _quiet(made, message)
                yield _changed(made, number, _put(at, replace(message, needs_grad=False), "receives"))


def _quiet(made: Generation, gone: StageMessage) -> Text:
    def of(messages: tuple[StageMessage, ...]) -> tuple[StageMessage, ...]:
        return tuple(replace(m, needs_grad=False) if m == gone else m for m in messages)

    def text() -> Sources | None:
        stages = made.communicated.stages
        changed = tuple(replace(p, receives=of(p.receives), sends=of(p.sends)) for p in stages)
        return made.text(replace(made.communicated, stages=changed))

    return text


def _loss(made: Generation) -> Iterator[Text]:
    for number, program in enumerate(made.communicated.stages):
        if program.loss is None:
            continue
        for axis, state in enumerate(program.loss.layout):
            other: State = INVARIANT if isinstance(state, Partial) else PARTIAL
            if program.stage.sizes[axis] > 1:
                loss = replace(program.loss, layout=with_state(program.loss.layout, axis, other))
                yield _changed(made, number, partial(replace, loss=loss))


# -- placements -------------------------------------------------------------------------------------------------------


def _axes(made: Generation, name: str) -> Iterator[tuple[int, int]]:
    """(stage, position of an axis of ranks) of an operation."""
    for stage in made.partitioned.placements[name].stages:
        for axis in range(len(made.partitioned.stages[stage].mesh.axes)):
            yield stage, axis


def _frozen(made: Generation) -> Iterator[Text]:
    """An identifier is split that the annotation freezes."""
    for op in made.partitioned.graph.operations:
        bound = made.known[op.name].bound
        if bound is None or not made.partitioned.graph.tensors[op.outputs[0] or op.inputs[0]].needs_grad:
            continue
        for identifier, mark in bound.marks.items():
            for stage, axis in _axes(made, op.name):
                parts = made.partitioned.stages[stage].sizes[axis]
                if mark == "^" and bound.sizes[identifier] % parts == 0 and bound.sizes[identifier] > 1:
                    yield made.placed(op.name, (stage, axis), Split(identifier))


def _not_linear(made: Generation) -> Iterator[Text]:
    """An operation that is not linear runs on partial sums."""
    graph = made.partitioned.graph
    for op in graph.operations:
        signature = made.known[op.name]
        result = op.outputs[0]
        if result is None or not graph.tensors[result].needs_grad:
            continue
        for slot, name in enumerate(op.inputs):
            if graph.tensors[name].needs_grad and frozenset({slot}) not in signature.linear:
                if any(slot in s for s in signature.linear):
                    continue
                for stage, axis in _axes(made, op.name):
                    yield made.placed(op.name, (stage, axis), RunPartial(frozenset({slot})))


# -- annotations -------------------------------------------------------------------------------------------------------


def wrong_annotations(made: Generation) -> dict[str, list[Text]]:
    """By kind of mutant, every way in which one operation of the program can be split wrongly.

    The text is consistent in itself; only who knows the right annotation, or runs it, finds the mistake.
    """
    found: dict[str, list[Text]] = {}
    asked: set[str] = set()
    for op in made.partitioned.graph.operations:
        signature = made.known[op.name]
        result = op.outputs[0]
        if signature.bound is None or result is None or not made.partitioned.graph.tensors[result].needs_grad:
            continue
        if signature.bound.text in asked:
            continue  # repeated layers call the same operators
        asked.add(signature.bound.text)
        for kind, wrong in _of_operation(made, op, signature):
            found.setdefault(f"annotation: {kind}", []).append(wrong)
    return found


def _of_operation(made: Generation, op: Operation, right: Signature) -> Iterator[tuple[str, Text]]:
    assert right.bound is not None and right.spec is not None
    for mutant in annotation_mutants(right.bound.text):
        try:
            spec = replace(right.spec, annotation=mutant.text)
            wrong = Signature(right.call, spec, bind_call(spec, right.call), right.linear)
        except (NnscalerError, ValueError, KeyError):
            continue  # refused at registration, or it does not fit the call
        for stage in made.partitioned.placements[op.name].stages[:1]:
            for axis, described in enumerate(made.partitioned.stages[stage].mesh.axes):
                for identifier in wrong.identifiers:
                    split = Split(identifier)
                    assert wrong.bound is not None
                    if splittable(wrong.bound, identifier, described.size) is None and _differ(op, right, wrong, split):
                        yield mutant.kind, made.placed(op.name, (stage, axis), split, wrong)


def _differ(op: Operation, right: Signature, wrong: Signature, split: Split) -> bool:
    """Return whether the two annotations disagree about the operands' states under this split."""
    assert right.bound is not None
    if split.identifier not in right.bound.sizes or right.bound.marks.get(split.identifier) == "^":
        return True
    count = len(op.outputs)
    return (input_states(right, split), output_states(right, split, count)) != (
        input_states(wrong, split),
        output_states(wrong, split, count),
    )


GRAPH: tuple[tuple[str, str, FindGraph], ...] = (
    ("communicated graph", "conversion left out", _no_conversion),
    ("communicated graph", "conversion to another state", _other_state),
    ("communicated graph", "conversion on another axis", _other_axis),
    ("communicated graph", "reads another version", _other_version),
    ("communicated graph", "call of the whole", _call_of_the_whole),
    ("communicated graph", "stored: sum left out", _reduce),
    ("communicated graph", "stored: other layout", _at_rest),
    ("communicated graph", "fed another piece", _feed),
    ("communicated graph", "message without gradient", _message),
    ("communicated graph", "loss in another state", _loss),
    ("partitioned graph", "splits a frozen identifier", _frozen),
    ("partitioned graph", "partial sums through what is not linear", _not_linear),
)


def generated_mutants(made: Generation) -> Iterator[tuple[str, str, list[Text]]]:
    """Yield (family, kind, every place): each place gives the text of a mutant."""
    for family, kind, find in GRAPH:
        yield family, kind, list(find(made))
    for kind, places in wrong_annotations(made).items():
        yield "annotation", kind, places
