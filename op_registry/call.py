"""One call of an operator, as annotation functions and `localize` hooks see it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TensorArgument:
    """A tensor in a call: no values, only its shape in elements and its dtype by torch's name without the prefix.

    `index` numbers the tensors of a call, in the order in which its arguments name them.
    """

    index: int
    shape: tuple[int, ...]
    dtype: str  # "float32", "int64", "bool", ...

    @property
    def ndim(self) -> int:
        """How many dims it has."""
        return len(self.shape)


@dataclass(frozen=True, slots=True)
class Call:
    """An operator's arguments, with a `TensorArgument` where a tensor stands (also inside lists and tuples).

    Other leaves are numbers, strings, booleans, None, or, in what `localize` returns, `Expression`s of mesh
    coordinates and axes (`AxisArgument`). A dtype is `DType("float32")`; devices and memory formats are dropped by
    tracing.
    """

    operator: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    outputs: tuple[TensorArgument | None, ...] = ()  # one per output; None for an output that is not a tensor

    def get(self, position: int, name: str, default: Any = None) -> Any:
        """Return the argument at `position`, or given by keyword `name`, or `default`."""
        if position < len(self.args):
            return self.args[position]
        return self.kwargs.get(name, default)

    def replace(self, position: int, name: str, value: Any) -> Call:
        """Return the same call with one argument changed (appended by keyword when it was not given)."""
        if position < len(self.args):
            args = (*self.args[:position], value, *self.args[position + 1 :])
            return Call(self.operator, args, self.kwargs, self.outputs)
        return Call(self.operator, self.args, {**self.kwargs, name: value}, self.outputs)

    def tensors(self) -> tuple[TensorArgument, ...]:
        """Return the tensors of the call by index."""
        return tuple(sorted(instances_in((self.args, self.kwargs), TensorArgument), key=lambda t: t.index))


def dtype_name(dtype: object) -> str:
    """Return torch's name of a dtype without the prefix: `float32`."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True, slots=True)
class DType:
    """A dtype as an argument, by torch's name for it without the prefix."""

    name: str


@dataclass(frozen=True, slots=True)
class AxisArgument:
    """The ranks of a mesh axis as an argument, of an operator that communicates among them."""

    name: str


@dataclass(frozen=True, slots=True)
class AxisShard:
    """How one mesh axis splits an identifier of size n, viewed as (outer, n / outer).

    axis       of the mesh
    parts      equal pieces of each block
    outer      how many blocks there are
    sizes      of unequal pieces of each block; empty: they are equal
    sections   sizes of concatenated parts, each of which is cut into `parts` equal pieces
    circulates whether the ranks of the axis pass their pieces around, inside of the operator
    prefix     whether the pieces are slices in time, each with all that is before it
    """

    axis: str
    parts: int
    outer: int = 1
    sizes: tuple[int, ...] = ()
    sections: tuple[int, ...] = ()
    circulates: bool = False
    prefix: bool = False

    @property
    def contiguous(self) -> bool:
        """Return whether each shard is one block."""
        return self.parts == 1 or (self.outer == 1 and not self.sections)


def instances_in(value: Any, kind: type[T]) -> Iterator[T]:
    """Yield every instance of `kind` in nested lists, tuples and mappings, left to right."""
    if isinstance(value, kind):
        yield value
    elif isinstance(value, list | tuple | Mapping):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from instances_in(item, kind)


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield what is in nested lists, tuples and mappings, with its place there: the keys and positions on the way."""
    if isinstance(value, list | tuple | Mapping):
        for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from leaves(item, (*path, key))
    else:
        yield path, value


def map_leaves(value: Any, function: Callable[[Any], Any], kind: type | None = None) -> Any:
    """Rebuild nested lists and tuples with `function(leaf)` in place of each leaf, left to right.

    `kind`: what all of them become, `list` or `tuple`; None: what they are.
    """
    if isinstance(value, list | tuple):
        return (kind or type(value))(map_leaves(item, function, kind) for item in value)
    return function(value)


def map_instances(value: Any, kind: type[T], function: Callable[[T], Any]) -> Any:
    """Rebuild nested lists and tuples with `function(item)` in place of each instance of `kind`, left to right."""
    if isinstance(value, kind):
        return function(value)
    if isinstance(value, list):
        return [map_instances(v, kind, function) for v in value]
    if isinstance(value, tuple):
        return tuple(map_instances(v, kind, function) for v in value)
    return value
