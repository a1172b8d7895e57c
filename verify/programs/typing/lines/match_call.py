"""Check that a line calls exactly one shard's call: the operator, every argument, and the key of its random numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from op_registry.bind_and_localise_call import Shape
from op_registry.call import AxisArgument, Call, DType, TensorArgument, instances_in
from op_registry.rank_expression import Expression
from op_registry.registry import facts_of

from nnscaler.codegen.python_text_of_calls import needs_device
from nnscaler.ir.conversion_table_and_paths import explain_illegal
from nnscaler.ir.graph import Operation
from nnscaler.layout import Layout, Sharded, State
from verify.programs.typing.lines.canonical_calls import NoCall, arguments_of, parameters_of, with_sizes, wrapped
from verify.programs.typing.program_files.rank_program_syntax import Assignment, Mark, Variable
from verify.programs.typing.typed_value import Axes, Mistake


def with_axes(line: Assignment, names: Sequence[str]) -> Assignment:
    """Return a line with its axes told from its tensors: `self.cp` is one of `names`, which no stored tensor has."""

    def read(value: Any) -> Any:
        of_axis = isinstance(value, Variable) and value.stored and value.name in names
        return AxisArgument(value.name) if of_axis else value

    return replace(line, kwargs={name: read(value) for name, value in line.kwargs.items()})


def difference(
    expected: Call, line: Assignment, order: Sequence[int], shapes: Sequence[Shape | None], sizes: Mapping[str, int]
) -> str:
    """Explain how the arguments differ from those of one shard's call; empty where they do not.

    `line` is in canonical form. Tensors are compared by `order`, the numbers of those that the line reads. `shapes`: of
    the outputs. `sizes`: of the axes, over which numbers have to be equal on every rank.
    """
    found = without_place(line)
    try:
        wanted = arguments_of(expected.operator, expected.args, expected.kwargs)
    except NoCall as error:
        return f"one shard's call cannot be made: {error}"
    if (found.pop("device", None) is Mark.DEVICE) != needs_device(expected.operator) or "device" in wanted:
        return "`device=self.device` is for operators that make tensors from nothing, and for all of them"
    first = next(instances_in(wanted, TensorArgument), None)
    dims = 0 if first is None else first.ndim
    if shapes and shapes[0] is not None:
        wanted, found = (with_sizes(expected.operator, a, shapes[0]) for a in (wanted, found))
    wanted, found = (wrapped(expected.operator, a, dims) for a in (wanted, found))
    numbers = iter(order)
    for name in dict.fromkeys((*wanted, *found)):
        if name not in found:
            return f"`{name}` is {_default(expected.operator, name)}, and one shard's is {_text(wanted[name])}"
        if name not in wanted:
            return f"`{name}` is {_text(found[name])}, and one shard's is {_default(expected.operator, name)}"
        if not _same(wanted[name], found[name], numbers, sizes):
            return f"`{name}` is {_text(found[name])}, and one shard's is {_text(wanted[name])}"
    return ""


def _default(operator: str, name: str) -> str:
    parameter = next((p for p in parameters_of(operator) or () if p.name == name), None)
    return "not given" if parameter is None else _text(parameter.default)


def _same(wanted: Any, found: Any, order: Iterator[int], sizes: Mapping[str, int]) -> bool:
    if isinstance(wanted, TensorArgument):
        return isinstance(found, Variable) and wanted.index == next(order)
    if isinstance(wanted, list | tuple):
        same = isinstance(found, list | tuple) and len(found) == len(wanted)
        return same and all(_same(w, f, order, sizes) for w, f in zip(wanted, found, strict=True))
    if isinstance(wanted, Expression) or isinstance(found, Expression):
        return same_number(wanted, found, sizes)
    if isinstance(wanted, float | complex) and type(wanted) is type(found):
        return repr(wanted) == repr(found)  # -0.0 is not 0.0, and nan is nan
    return type(wanted) is type(found) and bool(wanted == found)


def same_number(wanted: Any, found: Any, sizes: Mapping[str, int]) -> bool:
    """Return whether two whole numbers, or expressions of a rank's place, are equal on every rank."""
    if type(wanted) is int and type(found) is int:
        return wanted == found
    values = [
        value.over(sizes) if isinstance(value, Expression) else (value, {}) if type(value) is int else None
        for value in (wanted, found)
    ]
    return values[0] is not None and values[0] == values[1]


def same_shape(wanted: Sequence[Any], found: Sequence[Any], axes: Axes) -> bool:
    """Return whether two local shapes are equal on every rank."""
    sizes = dict(axes.pairs)
    return len(wanted) == len(found) and all(same_number(w, f, sizes) for w, f in zip(wanted, found, strict=True))


def shape_text(shape: Sequence[Any]) -> str:
    """`(3, 4)`."""
    return f"({', '.join(map(str, shape))})"


def _text(value: Any) -> str:
    match value:
        case Variable(name=name):
            return f"`{name}`"
        case TensorArgument():
            return "a tensor"
        case DType(name=name):
            return name
        case AxisArgument(name=name):
            return f"self.{name}"
        case Expression():
            return str(value)
        case list() | tuple():
            return "[" + ", ".join(_text(v) for v in value) + "]"
    return repr(value)


# Random numbers: a draw is keyed by its operation and by the place of the element in the logical tensor, so the
# line has to state the layout that its result really has.

_PLACE = ("stage", "name", "states", "logical_shape")


def draws_numbers(function: str) -> bool:
    """Return whether the text calls an operator of the runtime that draws numbers.

    A user's own operator has no place to draw for.
    """
    return function.startswith("ops.") and facts_of(f"nnscaler.{function.removeprefix('ops.')}").random


def place_of_draw(line: Assignment) -> tuple[Any, ...]:
    """Return stage, name, layout and shape of the whole, as a line in canonical form gives them; None
    for absent ones."""
    return tuple(line.kwargs.get(name) for name in _PLACE)


def without_place(line: Assignment) -> dict[str, Any]:
    """Return the arguments that say what is computed, not where its random numbers lie."""
    left_out = _PLACE if draws_numbers(line.function) else ()
    return {name: value for name, value in line.kwargs.items() if name not in left_out}


def explain_draw(line: Assignment, op: Operation, layout: Layout, axes: Axes, shape: Sequence[int]) -> str:
    """Explain why the line's draws are not those of its elements; empty where they are."""
    stage, name, states, told = place_of_draw(line)
    if stage is not Mark.STAGE or not isinstance(states, dict) or not isinstance(told, list | tuple):
        return f"`{line.text}` does not say where its numbers lie"
    if name != op.name:
        return f"`{line.text}` draws the numbers of `{name}`, and is `{op.name}`"
    if not all(isinstance(state, State) for state in states.values()):
        return f"`{line.text}` does not say in which layout its numbers lie"
    if tuple(told) != tuple(shape):
        return f"`{line.text}` draws for a tensor of shape {tuple(told)}, and the whole has {tuple(shape)}"
    for number, (axis, parts, state) in enumerate(zip(axes.names, axes.sizes, layout, strict=True)):
        given = states.get(axis)
        drawn = given if isinstance(given, Sharded) else None
        right = state if isinstance(state, Sharded) else None
        if drawn != right and (parts > 1 or number >= axes.first_in_time):
            return (
                f"`{line.text}` draws over {axis} as if its result were {given or 'whole'}, and it is "
                f"{right or 'whole'} there"
            )
    try:
        reason = explain_illegal(axes.layout(states), axes.sizes, shape)  # on axes of one rank as well: it is cut there
    except Mistake as mistake:
        reason = mistake.message
    return f"`{line.text}` cannot draw so: {reason}" if reason else ""


def other_draws(line: Assignment, op: Operation) -> Mistake:
    """Return the mistake of a line that draws under another key than the operation's."""
    _, name, *_ = place_of_draw(line)
    message = f"`{line.text}` draws its numbers under the key {name!r}, and the model's operation is {op.name!r}"
    cause = "draws are keyed by the operation's name: under another key they are other numbers than the model's"
    return Mistake("random_numbers_differ", message, cause, op.outputs[0])
