"""Type a line that computes: find its operation, the choices that fit its operands, and its results' layouts.

A line is identified by what it reads: the model has an operation on the same logical tensors whose call, rewritten
for the shards at hand, is the line's. Names are only used to say what a line that is none was probably meant to be.
Repeated layers are typed once: a typing depends on the call, on the operands' layouts and on the line's arguments.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from op_registry.bind_and_localise_call import Shape, localise
from op_registry.call import Call, TensorArgument, instances_in, map_leaves
from op_registry.registry import facts_of
from op_registry.spec import Refusal

from nnscaler.codegen.python_text_of_calls import layout_text, returns_sequence
from nnscaler.ir.conversion_table_and_paths import shape_of_rank
from nnscaler.ir.derive_operand_layouts import explain_illegal_choices, input_states, output_states, shards_of
from nnscaler.ir.graph import Graph, Operation
from nnscaler.ir.operation_annotations import Signature
from nnscaler.ir.operation_placement import Choice, RunInvariant, Split
from nnscaler.layout import Axis, Invariant, Layout, Partial, Replicated, Sharded, State
from verify.programs.typing.explain_layout_mismatch import disagreement, reads_other, region_differs, rounding
from verify.programs.typing.lines.canonical_calls import NoCall, arguments_of, forms, operator_of
from verify.programs.typing.lines.choices_fitting_operands import (
    as_told,
    every_split,
    legal_choices,
    matches,
    outers_above,
    told_by,
    whole_choices,
)
from verify.programs.typing.lines.match_call import (
    difference,
    draws_numbers,
    explain_draw,
    other_draws,
    place_of_draw,
    without_place,
)
from verify.programs.typing.lines.uniform_value_dims import NO_DIMS, Dims
from verify.programs.typing.program_files.rank_program_syntax import Assignment, Mark, Variable
from verify.programs.typing.typed_value import Axes, Held, Mistake, normal

_MANY = 256  # combinations of choices over the axes that are looked through


@dataclass(frozen=True, slots=True)
class Typing:
    """Choices, one per axis, and results' normal layouts: None for no tensor, or one never used."""

    choices: tuple[Choice, ...]
    outputs: tuple[Layout | None, ...]


@dataclass(frozen=True)
class Typed:
    """A line with its operation and its typing. `sequence`: it returns a list or a tuple."""

    operation: Operation
    signature: Signature
    typing: Typing
    sequence: bool = False


Key = tuple[object, ...]


@dataclass
class Typer:
    """Types the lines of all roles of one program. `classes`: distinct typings -> how many lines have it."""

    graph: Graph
    signatures: Mapping[str, Signature]
    uniform: Mapping[str, Dims]
    user: Mapping[str, str] = field(default_factory=dict)
    classes: dict[Key, tuple[Typed, Axes, int]] = field(default_factory=dict)
    _memo: dict[Key, Typing | None] = field(default_factory=dict)
    _by_inputs: dict[tuple[str, ...], list[Operation]] = field(default_factory=dict)
    _orders: dict[int, tuple[int, ...]] = field(default_factory=dict)  # by signature

    def __post_init__(self) -> None:
        for op in self.graph.operations:
            self._by_inputs.setdefault(tuple(op.inputs[i] for i in self._order(op)), []).append(op)

    def _order(self, op: Operation) -> tuple[int, ...]:
        """Return the operation's tensors, by their numbers, in the order of the canonical form."""
        signature = self.signatures[op.name]
        if id(signature) not in self._orders:
            call, order = signature.call, tuple(range(signature.inputs))
            with suppress(NoCall):
                arguments = arguments_of(call.operator, call.args, call.kwargs)
                order = tuple(t.index for t in instances_in(arguments, TensorArgument))
            self._orders[id(signature)] = order
        return self._orders[id(signature)]

    def type_line(self, line: Assignment, held: Mapping[Variable, Held], axes: Axes) -> Typed:
        """Type a line in canonical form. Raises Mistake when it is no operation of the model on these shards."""
        wrong: list[tuple[Assignment, list[Held], list[Operation]]] = []
        for form in forms(line):
            operands = [held[v] for v in form.variables]
            names = tuple(h.tensor for h in operands)
            candidates = sorted(self._by_inputs.get(names, ()), key=lambda op: not _named(op, line))
            for op in candidates:
                typing = self._typing(op, form, _by_number(operands, self._order(op)), axes)
                if typing is not None:
                    return self._counted(op, typing, axes)
            wrong.append((form, operands, candidates))
        form, operands, candidates = max(wrong, key=lambda w: any(_named(op, line) for op in w[2]))
        raise self._explain(form, operands, candidates, axes)

    def _counted(self, op: Operation, typing: Typing, axes: Axes) -> Typed:
        signature = self.signatures[op.name]
        sequence = returns_sequence(signature.call.operator, len(op.outputs))
        typed = Typed(op, signature, typing, sequence)
        key: Key = (id(signature), typing.choices, axes.pairs)
        first, _, count = self.classes.get(key, (typed, axes, 0))
        self.classes[key] = (first, axes, count + 1)
        return typed

    def _typing(self, op: Operation, line: Assignment, layouts: tuple[Layout, ...], axes: Axes) -> Typing | None:
        if line.region != op.region or not _random_fits(op, line):
            return None
        signature = self.signatures[op.name]
        grads = tuple(self.graph.tensors[name].needs_grad for name in op.inputs)
        made = tuple(None if name is None else self.graph.tensors[name].needs_grad for name in op.outputs)
        uniform = tuple(self.uniform.get(name, NO_DIMS) for name in op.inputs)
        drawn = place_of_draw(line) if draws_numbers(line.function) else ()
        called = repr((_plain_arguments(line), drawn, line.sequence, len(line.targets)))
        known = (id(signature), layouts, grads, made, uniform, axes.pairs)
        key: Key = (*known, line.function, called, line.hint)
        if key not in self._memo:
            self._memo[key] = next(self._typings(op, line, layouts, axes), None)
        typing = self._memo[key]
        return None if typing is None or not _taken_apart(line, op) else typing

    def _typings(self, op: Operation, line: Assignment, layouts: Sequence[Layout], axes: Axes) -> Iterator[Typing]:
        """Yield legal typings, the one that the line's comment tells first."""
        found = list(self._all_typings(op, line, layouts, axes))
        if len(found) > 1:
            mesh = tuple(Axis(n, s) for n, s in axes.pairs)
            shapes = [None if n is None else self.graph.tensors[n].shape for n in op.outputs]
            found.sort(key=lambda typing: _told(typing, shapes, mesh) != line.hint)
        yield from found

    def _all_typings(self, op: Operation, line: Assignment, layouts: Sequence[Layout], axes: Axes) -> Iterator[Typing]:
        per_axis = [self._fitting(op, line, layouts, axes, axis) for axis in range(len(axes.names))]
        for number, choices in enumerate(product(*per_axis)):
            if number >= _MANY:
                return
            try:
                yield self.check_choices(op, line, choices, axes)
            except Mistake:
                continue

    def _fitting(
        self, op: Operation, line: Assignment, layouts: Sequence[Layout], axes: Axes, axis: int
    ) -> list[Choice]:
        """Return the choices for one axis under which every operand is as it has to be."""
        parts, signature = axes.sizes[axis], self.signatures[op.name]
        if parts == 1:
            return [RunInvariant()]
        states = [layout[axis] for layout in layouts]
        name = axes.names[axis]
        fitting = [
            choice
            for choice in legal_choices(signature, states, parts, told_by(line, name, outers_above(axes, axis)))
            if all(map(self._may_stand, op.inputs, input_states(signature, choice), states))
        ]
        made = {choice: output_states(signature, choice, len(op.outputs)) for choice in fitting}
        return sorted(fitting, key=lambda choice: not as_told(made[choice], name, line.hint))

    def _may_stand(self, name: str, need: State, have: State) -> bool:
        return matches(need, have, self.graph.tensors[name].needs_grad, self.uniform.get(name, NO_DIMS))

    def check_choices(self, op: Operation, line: Assignment, choices: tuple[Choice, ...], axes: Axes) -> Typing:
        """Return the typing with these choices. Raises Mistake when they do not fit each other or the line's call."""
        signature = self.signatures[op.name]
        reason = explain_illegal_choices(self.graph, op, signature, choices, axes.pairs)
        if reason:
            raise Mistake("layouts_disagree", f"`{op.operator}` cannot run so: {reason}")
        states = [output_states(signature, choice, len(op.outputs)) for choice in choices]
        outputs = [
            None if name is None else normal([s[i] for s in states], axes.sizes, self.graph.tensors[name].needs_grad)
            for i, name in enumerate(op.outputs)
        ]
        shapes = [
            None if n is None or y is None else shape_of_rank(y, axes.pairs, self.graph.tensors[n].shape)
            for n, y in zip(op.outputs, outputs, strict=True)
        ]
        expected = self._expected(op, choices, shapes, axes)
        if operator_of(line.function, self.user) != expected.operator:
            message = f"`{line.function}` is called where one shard's call is `{expected.operator}`"
            raise Mistake("operation_differs", message, tensor=op.outputs[0])
        told = _unpacked(expected, line) or difference(expected, line, self._order(op), shapes, dict(axes.pairs))
        if told:
            raise Mistake("operation_differs", told, tensor=op.outputs[0])
        if draws_numbers(line.function):
            first = outputs[0]
            assert first is not None and op.outputs[0] is not None
            told = explain_draw(line, op, first, axes, self.graph.tensors[op.outputs[0]].shape)
            if told:
                cause = "ranks draw the same numbers for different elements, or different ones for the same element"
                raise Mistake("random_numbers_differ", told, cause, op.outputs[0])
        return Typing(choices, tuple(outputs))

    def _expected(self, op: Operation, choices: Sequence[Choice], shapes: Sequence[Shape | None], axes: Axes) -> Call:
        """Return the call that one shard makes, whose outputs have these shapes."""
        signature = self.signatures[op.name]
        if signature.spec is None or signature.bound is None:
            return signature.call
        try:
            return localise(signature.spec, signature.call, shards_of(signature, choices, axes.pairs), shapes)
        except Refusal as error:
            raise Mistake("layouts_disagree", f"`{op.operator}` cannot run so: {error}") from error

    # -- what is wrong with a line that is no operation on these shards -----------------------------------------------

    def _explain(
        self, line: Assignment, operands: Sequence[Held], candidates: Sequence[Operation], axes: Axes
    ) -> Mistake:
        lost = rounding(line, self.graph.tensors[operands[0].tensor]) if operands else None
        if lost is not None and not any(facts_of(op.operator).moves == "cast" for op in candidates):
            return lost
        for op in candidates:
            if line.region != op.region:
                return region_differs(line, op, self.graph)
            if not _random_fits(op, line):
                return other_draws(line, op)
            if not _taken_apart(line, op):
                continue
            found = self._best(op, line, _by_number(operands, self._order(op)), axes)
            if found.code != "operation_differs" or _named(op, line) or len(candidates) == 1:
                return found
        if lost is not None:
            return lost
        meant = next((op for op in self.graph.operations if _named(op, line)), None)
        if meant is None:
            return Mistake("operation_differs", f"`{line.text}` computes what no line of the model computes")
        return reads_other(line, operands, meant)

    def _best(self, op: Operation, line: Assignment, layouts: Sequence[Layout], axes: Axes) -> Mistake:
        """Return the mistake under the choices that fit most operands, and then the line's comment, best."""
        chosen: list[Choice] = []
        wrong: list[tuple[int, int, State, State]] = []
        for axis, parts in enumerate(axes.sizes):
            fitting = self._fitting(op, line, layouts, axes, axis)
            if fitting or parts == 1:
                chosen.append((fitting or [RunInvariant()])[0])
                continue
            choice, bad = self._nearest(op, line, layouts, axes, axis)
            chosen.append(choice)
            wrong += [(axis, slot, have, need) for slot, have, need in bad]
        if not wrong:
            return self._combined(op, line, layouts, axes)
        axis, slot, have, need = wrong[0]
        name = axes.names[axis]
        return Mistake(
            "layouts_disagree",
            f"`{op.operator}` that makes `{op.outputs[0]}` needs `{op.inputs[slot]}` {need} over {name} "
            f"({chosen[axis]}), and it is {have} there",
            disagreement(have, need, axes, axis),
            op.inputs[slot],
        )

    def _combined(self, op: Operation, line: Assignment, layouts: Sequence[Layout], axes: Axes) -> Mistake:
        """Return the mistake where each axis fits by itself: of all choices together, or of the arguments."""
        problems: list[Mistake] = []
        per_axis = [self._fitting(op, line, layouts, axes, axis) for axis in range(len(axes.names))]
        for choices in product(*per_axis):
            try:
                self.check_choices(op, line, choices, axes)
            except Mistake as mistake:
                problems.append(mistake)
            if len(problems) >= _MANY:
                break
        problems.sort(key=lambda m: ("random_numbers_differ", "operation_differs").count(m.code) == 0)
        first = problems[0] if problems else Mistake("operation_differs", "it cannot be typed")
        message = f"`{line.text}` is not the model's `{op.operator}` on these shards: {first.message}"
        return Mistake(first.code, message, first.cause or _argument_cause(first.message), first.tensor)

    def _nearest(
        self, op: Operation, line: Assignment, layouts: Sequence[Layout], axes: Axes, axis: int
    ) -> tuple[Choice, list[tuple[int, State, State]]]:
        signature, parts = self.signatures[op.name], axes.sizes[axis]
        states = [layout[axis] for layout in layouts]
        outers = outers_above(axes, axis)
        legal = legal_choices(signature, states, parts, told_by(line, axes.names[axis], outers))
        options = dict.fromkeys((*legal, *whole_choices(signature), *every_split(signature, outers)))
        name = axes.names[axis]
        ranked: list[tuple[tuple[bool, int, bool, bool], int, Choice, list[tuple[int, State, State]]]] = []
        for number, choice in enumerate(options):
            needs = input_states(signature, choice)
            bad = [
                (slot, have, need)
                for slot, (have, need) in enumerate(zip(states, needs, strict=True))
                if not self._may_stand(op.inputs[slot], need, have)
            ]
            made = output_states(signature, choice, len(op.outputs))
            told = self._hints(op, made, name, line.hint)
            rank = (not told, len(bad), choice not in legal, not isinstance(choice, Split))
            ranked.append((rank, number, choice, bad))
        _, _, choice, bad = min(ranked, key=lambda entry: entry[:2])
        return choice, bad

    def _hints(self, op: Operation, made: Sequence[State], axis: str, hint: str) -> bool:
        """Return whether the line's comment says that the results have these states over the axis."""
        for state, name in zip(made, op.outputs, strict=True):
            if name is None or (isinstance(state, Replicated) and not self.graph.tensors[name].needs_grad):
                continue
            cut = f"/{axis}" in hint or f"*{axis}" in hint
            before, _, deferred = hint.partition("gradient: ")
            summed = f" {axis}" in before.partition(" over")[2]
            right = {
                Sharded: cut,
                Partial: summed and not cut,
                Replicated: f" {axis}" in deferred and not cut and not summed,
                Invariant: not cut and not summed and f" {axis}" not in deferred,
            }
            return right[type(state)]
        return False


def _unpacked(expected: Call, line: Assignment) -> str:
    """Explain that the line unpacks a single tensor; empty where it does not."""
    if line.sequence and not returns_sequence(expected.operator, len(line.targets)):
        return "its result is a tensor, and the left side takes it apart"
    return ""


def _taken_apart(line: Assignment, op: Operation) -> bool:
    """Return whether the line has a target for every result, or one for all of them."""
    return len(line.targets) == (len(op.outputs) if line.sequence else 1)


def _by_number(operands: Sequence[Held], order: Sequence[int]) -> tuple[Layout, ...]:
    """Return the layouts of operands that stand in this order, by their numbers."""
    return tuple(held.layout for _, held in sorted(zip(order, operands, strict=True), key=lambda entry: entry[0]))


def _plain_arguments(line: Assignment) -> dict[str, Any]:
    """Replace tensors among the arguments by their numbers, so that repeated layers have one key.

    A number among the arguments is not a tensor's.
    """
    numbers = {v: i for i, v in reversed(list(enumerate(line.variables)))}

    def plain(value: Any) -> Any:
        return ("tensor", numbers[value]) if isinstance(value, Variable) else repr(value)

    return {name: map_leaves(value, plain, list) for name, value in without_place(line).items()}


def _named(op: Operation, line: Assignment) -> bool:
    return any(name is not None and name in (t.removesuffix("_of_step") for t in line.targets) for name in op.outputs)


def _random_fits(op: Operation, line: Assignment) -> bool:
    if not draws_numbers(line.function):
        return True
    stage, name, *_ = place_of_draw(line)
    return stage is Mark.STAGE and name == op.name


def _told(typing: Typing, shapes: Sequence[tuple[int, ...] | None], axes: Sequence[Axis]) -> str:
    texts = [
        layout_text(shape, layout, axes)
        for shape, layout in zip(shapes, typing.outputs, strict=True)
        if shape is not None and layout is not None
    ]
    return " | ".join(dict.fromkeys(texts))


def _argument_cause(message: str) -> str | None:
    return "a constant, or a size or offset of the shard, is wrong" if "one shard's is" in message else None
