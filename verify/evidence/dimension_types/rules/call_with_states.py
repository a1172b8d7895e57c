"""The input of a transfer rule: one call of an ATen operator, with sizes and states in place of tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from op_registry.call import instances_in

from verify.evidence.dimension_types.states import (
    SAME,
    Constant,
    Shard,
    Size,
    State,
    Symbols,
    Unknown,
    Zero,
    checked,
    mentions,
    split_dims,
    symbols_of,
)


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor of the call."""

    sizes: tuple[Size, ...]
    dtype: torch.dtype
    state: State

    @property
    def ndim(self) -> int:
        return len(self.sizes)

    def shard(self, split: Symbols) -> Shard | None:
        """Return how it is sharded; a constant of a size that is split is a shard too, unless its size is no product (k
        + 2 entries of k: what ranks hold is more than the whole). None for others."""
        if isinstance(self.state, Shard):
            return self.state
        dims = split_dims(self.sizes, split)
        if len(dims) != 1 or not isinstance(self.state, Constant | Zero):
            return None
        found = checked(Shard(dims[0], None), self.sizes, split)
        return found if isinstance(found, Shard) else None

    def with_state(self, state: State) -> Operand:
        return replace(self, state=state)


@dataclass(frozen=True, slots=True)
class RuleCall:
    """The input of a transfer rule.

    overload   the ATen operator
    arguments  every argument of the schema by name, defaults filled in; an `Operand` for each tensor, also in lists
    outputs    one per output, lists flattened, None for what is no tensor; their states mean nothing
    split      the symbols that are split
    """

    overload: Any
    arguments: Mapping[str, Any]
    outputs: tuple[Operand | None, ...]
    split: Symbols

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def operand(self, name: str) -> Operand | None:
        """Return the tensor argument of that name; None where it is not given."""
        value = self.arguments.get(name)
        return value if isinstance(value, Operand) else None

    def tensor(self, name: str) -> Operand:
        """Return the tensor argument of that name, which must be given."""
        value = self.operand(name)
        assert value is not None, name
        return value

    def operands(self) -> tuple[Operand, ...]:
        """Return all tensors, in the order of the schema."""
        return tuple(instances_in(self.arguments, Operand))

    @property
    def output(self) -> Operand:
        """The first output, which must be a tensor."""
        (first, *_) = self.outputs
        assert first is not None
        return first

    def is_split(self, value: Any) -> bool:
        """Return whether a size (or any number, or a list) depends on the split."""
        return mentions(value, self.split)

    def split_numbers(self) -> Iterator[str]:
        """Yield the arguments that are numbers, or lists of them, that depend on what is split."""
        for name, value in self.arguments.items():
            if not isinstance(value, Operand) and not self.split.isdisjoint(symbols_of(value)):
                yield name


Rule = Callable[[RuleCall], tuple[State, ...]]


def unknown(call: RuleCall, reason: str) -> tuple[State, ...]:
    """Nothing is known of any output."""
    return (Unknown(f"{call.overload}: {reason}"),) * len(call.outputs)


def everywhere(call: RuleCall, state: State = SAME) -> tuple[State, ...]:
    """Return all outputs in one state."""
    return (state,) * len(call.outputs)
