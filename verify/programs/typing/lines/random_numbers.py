"""Random numbers: a draw is keyed by its operation and by the place of the element in the logical tensor, so the line
has to state the layout that its result really has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from op_registry.registry import facts_of

from nnscaler.ir.layout import Layout, Sharded, State, explain_illegal
from nnscaler.ir.mesh import MICRO
from nnscaler.ir.operation import Operation
from verify.programs.typing.roles.text import Assignment, Mark
from verify.programs.typing.typed_value import Axes, Mistake

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
    if name not in (op.name, f"{op.name}_of_step"):
        return f"`{line.text}` draws the numbers of `{name}`, and is `{op.name}`"
    if not all(isinstance(state, State) for state in states.values()):
        return f"`{line.text}` does not say in which layout its numbers lie"
    if tuple(told) != tuple(shape):
        return f"`{line.text}` draws for a tensor of shape {tuple(told)}, and the whole has {tuple(shape)}"
    for axis, parts, state in zip(axes.names, axes.sizes, layout, strict=True):
        given = states.get(axis)
        drawn = given if isinstance(given, Sharded) else None
        right = state if isinstance(state, Sharded) else None
        if drawn != right and (parts > 1 or axis == MICRO):
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
