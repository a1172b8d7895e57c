"""Build graphs in passes: raw graphs, operations written with tensor names, and the shapes of their results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from op_registry.call import DType, dtype_name, map_instances, map_leaves
from op_registry.infer_torch_schema import schema_of

from nnscaler.ir.graph import Graph, LogicalTensor, Operation, Region, Slot

# Shapes and dtypes of an operator's results, by running it on the meta device.


def dtype_of(name: str) -> torch.dtype:
    """`float32` -> torch.float32."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype), name
    return dtype


def is_floating(name: str) -> bool:
    """Return whether tensors of this dtype can have gradients."""
    dtype = dtype_of(name)
    return dtype.is_floating_point or dtype.is_complex


def torch_operator(name: str) -> Callable[..., Any]:
    """Return the operator of a name: `aten.linear.default` -> torch.ops.aten.linear.default.

    Raises AttributeError when there is none.
    """
    found: Any = torch.ops
    for part in name.split("."):
        found = getattr(found, part)
    return found


Form = tuple[tuple[int, ...], str]  # shape and dtype of a tensor


def fresh_name(name: str, taken: set[str]) -> str:
    """Return `name`, or `name_1`, ... when it is taken, and take it."""
    candidate, number = name, 0
    while candidate in taken:
        number += 1
        candidate = f"{name}_{number}"
    taken.add(candidate)
    return candidate


def infer(
    operator: str, args: Iterable[Any], kwargs: Mapping[str, Any], tensors: Callable[[str], LogicalTensor]
) -> tuple[Form | None, ...]:
    """(shape, dtype) of each output of an operator of torch, None for one that is not a tensor.

    `args` and `kwargs` hold `TensorName`s; `tensors` looks their names up.
    """

    def meta(ref: TensorName) -> Tensor:
        tensor = tensors(ref.name)
        return torch.empty(tensor.shape, dtype=dtype_of(tensor.dtype), device="meta")

    def plain(leaf: Any) -> Any:
        return dtype_of(leaf.name) if isinstance(leaf, DType) else leaf

    def ready(value: Any) -> Any:
        return map_leaves(map_references(value, meta), plain, tuple)

    with torch.no_grad():
        result = torch_operator(operator)(*(ready(a) for a in args), **{k: ready(v) for k, v in kwargs.items()})
    outputs = result if isinstance(result, list | tuple) else (result,)
    return tuple((tuple(o.shape), dtype_name(o.dtype)) if isinstance(o, Tensor) else None for o in outputs)


# The importer's output: a graph whose operations may still write into their inputs.


@dataclass(frozen=True)
class RawGraph:
    """A graph as the importer makes it.

    graph      may hold in-place operators
    storages   by tensor, a number for its memory; equal numbers alias
    """

    graph: Graph
    storages: Mapping[str, int]


@lru_cache(maxsize=8192)
def written_inputs(operator: str) -> tuple[int, ...]:
    """Positions of the arguments that an operator of torch writes into; empty for operators of ours."""
    schema = schema_of(operator)
    arguments = () if schema is None else schema.arguments
    return tuple(i for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write)


def storage_of(value: Tensor) -> int:
    """Return a number for the memory behind a (fake) tensor, valid while it lives."""
    return value.untyped_storage()._cdata


LEAF_ROLES = ("parameter", "buffer", "constant", "input")


@dataclass(frozen=True, slots=True)
class TensorName:
    """Stands in arguments for the tensor called `name`, where an `Operation` would have a `Slot`."""

    name: str


def references(operation: Operation) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the operation's args and kwargs with a `TensorName` in place of each slot."""

    def reference(slot: Slot) -> TensorName:
        return TensorName(operation.inputs[slot.index])

    kwargs = {k: map_instances(v, Slot, reference) for k, v in operation.kwargs}
    return map_instances(operation.args, Slot, reference), kwargs


def map_references(value: Any, function: Callable[[TensorName], Any]) -> Any:
    """Rebuild nested arguments with `function(ref)` in place of each `TensorName`; lists become tuples."""
    return map_leaves(value, lambda leaf: function(leaf) if isinstance(leaf, TensorName) else leaf, tuple)


def make_operation(
    name: str,
    operator: str,
    args: Iterable[Any],
    kwargs: Mapping[str, Any] | None = None,
    outputs: tuple[str | None, ...] = (),
    like: Operation | None = None,
    region: Region | None = None,
) -> Operation:
    """Make an operation from arguments with `TensorName`s; slots are numbered in the order in which the arguments name
    tensors.

    `like` lends its region, place and module; `region` overrides.
    """
    inputs: list[str] = []

    def slot(ref: TensorName) -> Slot:
        inputs.append(ref.name)
        return Slot(len(inputs) - 1)

    new_args = tuple(map_references(a, slot) for a in args)
    new_kwargs = tuple((k, map_references(v, slot)) for k, v in (kwargs or {}).items())
    made = Operation(name, operator, tuple(inputs), new_args, new_kwargs, outputs)
    if like is not None:
        made = replace(made, region=like.region, where=like.where, module=like.module, module_type=like.module_type)
    return made if region is None else replace(made, region=region)


@dataclass
class Builder:
    """A graph under construction, started from the stored tensors and inputs of `source`.

    `keep` copies an operation with the current names of its inputs; `alias` makes later uses of one name read
    another; `emit` adds a new operation. `finish` gives the graph: activations that nothing makes are dropped.
    """

    source: Graph
    tensors: dict[str, LogicalTensor] = field(default_factory=dict)
    operations: list[Operation] = field(default_factory=list)
    _names: dict[str, str] = field(default_factory=dict)
    _taken: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.tensors = {n: t for n, t in self.source.tensors.items() if t.role in LEAF_ROLES}
        self._taken = set(self.source.tensors) | {op.name for op in self.source.operations}

    def fresh(self, name: str) -> str:
        return fresh_name(name, self._taken)

    def current(self, name: str) -> str:
        """Return the tensor that later uses of `name` read."""
        while name in self._names:
            name = self._names[name]
        return name

    def tensor(self, name: str) -> LogicalTensor:
        return self.tensors[self.current(name)]

    def alias(self, name: str, to: str) -> None:
        """Let later uses of `name` read `to`."""
        target = self.current(to)
        if target != name:
            self._names[name] = target

    def references(self, operation: Operation) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """`references` with current names."""
        args, kwargs = references(operation)

        def rename(ref: TensorName) -> TensorName:
            return TensorName(self.current(ref.name))

        return map_references(args, rename), {k: map_references(v, rename) for k, v in kwargs.items()}

    def keep(self, operation: Operation, **changes: Any) -> None:
        """The operation as it is, reading current names; `changes` replaces fields."""
        inputs = tuple(self.current(n) for n in operation.inputs)
        same = not changes and inputs == operation.inputs
        self.operations.append(operation if same else replace(operation, inputs=inputs, **changes))
        for name in operation.outputs:
            if name is not None:
                self.tensors[name] = self.source.tensors[name]

    def emit(
        self,
        operator: str,
        args: Iterable[Any],
        kwargs: Mapping[str, Any] | None = None,
        *,
        outputs: tuple[LogicalTensor | None, ...],
        like: Operation,
        region: Region | None = None,
        name: str | None = None,
    ) -> Operation:
        """Add a new operation that makes `outputs`; it is named after its first output unless `name` is given."""
        names = tuple(None if t is None else t.name for t in outputs)
        chosen = name or next((n for n in names if n is not None), None) or self.fresh(like.name)
        operation = make_operation(chosen, operator, args, kwargs, names, like, region)
        self.operations.append(operation)
        self.tensors.update({t.name: t for t in outputs if t is not None})
        return operation

    def make(
        self,
        name: str,
        operator: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None = None,
        *,
        like: Operation,
        of: Form | None = None,
        region: Region | None = None,
    ) -> TensorName:
        """Add a new operation with one result, and return it under a fresh name. `of`: its shape and dtype, inferred
        where they are not given."""
        if of is None:
            (of,) = infer(operator, args, kwargs or {}, self.tensor)
        assert of is not None, operator
        made = LogicalTensor(self.fresh(name), *of)
        self.emit(operator, args, kwargs, outputs=(made,), like=like, region=region)
        return TensorName(made.name)

    def finish(self, updates: tuple[tuple[str, str], ...] | None = None) -> Graph:
        """Return the graph; `updates` replaces those of the source."""
        kept = self.source.updates if updates is None else updates
        renamed = tuple((buffer, self.current(value)) for buffer, value in kept)
        return self.source.replace(
            tensors=self.tensors,
            operations=tuple(self.operations),
            loss=self.current(self.source.loss),
            updates=renamed,
            outputs=tuple((name, self.current(tensor)) for name, tensor in self.source.outputs),
        )
