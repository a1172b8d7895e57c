"""One rule by itself, on real tensors: what tests hold against torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from verify.evidence.dimension_types.functional_trace import Functionalised, recorder
from verify.evidence.dimension_types.interpret import rule_call
from verify.evidence.dimension_types.make_call_with_symbolic_sizes import World
from verify.evidence.dimension_types.rules import conclude
from verify.evidence.dimension_types.states import Shard, State, quotient


@dataclass(frozen=True)
class Sized:
    """An argument that follows the size that is split: `Sized(lambda k: [4, 3 * k])`."""

    of: Callable[[Any], Any]


def conclude_on(
    overload: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    states: Sequence[State],
    size: int,
    dims: Mapping[int, tuple[int, int]] | None = None,
) -> tuple[State, ...]:
    """Return the states of the outputs of `overload(*args, **kwargs)`.

    Tensors stand among the arguments, also in lists; `states` has one for each, left to right. `size`: what is split.
    `dims`: (dim, outer) of tensors that have a dim that is split and are no shards, by number. Raises what the
    operator raises, and ValueError where a dim does not divide.
    """
    world = World()
    symbol = world.symbol("k", size)
    recording, found = recorder(), Functionalised(frozenset())
    given: list[State] = []

    def convert(value: Any) -> Any:
        if isinstance(value, Tensor):
            number = len(given)
            given.append(states[number])
            made = world.tensor(
                _sizes(value, states[number], (dims or {}).get(number), size, symbol), value.dtype, False
            )
            found.seen(recording.use(made), True)
            return made
        if isinstance(value, Sized):
            return value.of(symbol)
        if isinstance(value, list | tuple):
            return type(value)(convert(item) for item in value)
        return value

    new_args, new_kwargs = [convert(a) for a in args], {key: convert(value) for key, value in kwargs.items()}
    with world.mode, recording:
        overload(*new_args, **new_kwargs)
    found.add_all(recording.calls)
    (step,) = found.trace.steps
    known = dict(enumerate(given))
    return conclude(rule_call(found.trace, step, known, frozenset({world.symbols["k"]})))


def _sizes(tensor: Tensor, state: State, place: tuple[int, int] | None, size: int, symbol: Any) -> list[Any]:
    sizes: list[Any] = list(tensor.shape)
    if isinstance(state, Shard):
        place = (state.dim, 1 if state.outer is None else state.outer)
    if place is not None:
        dim, outer = place
        inner = quotient(sizes[dim], outer * size)
        if inner is None:
            raise ValueError(f"dim {dim} of size {sizes[dim]} is not {outer} x {size} x anything")
        sizes[dim] = outer * symbol * inner
    return sizes
