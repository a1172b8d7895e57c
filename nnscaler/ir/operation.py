"""Operations: the nodes of a graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from op_registry.call import Call, TensorArgument
from op_registry.spec import SourceLocation

from nnscaler.ir.tensor import LogicalTensor


@dataclass(frozen=True, slots=True)
class Slot:
    """Stands in an operation's arguments for its `index`-th input tensor."""

    index: int


@dataclass(frozen=True, slots=True)
class Region:
    """The modes around the operation in the model.

    grad_enabled   whether gradients are recorded
    autocast       dtype name, or "off"; None outside of any region
    recompute      the call of `torch.utils.checkpoint` that computes it again in backward, which does not change its
                   meaning
    """

    grad_enabled: bool = True
    autocast: str | None = None
    recompute: str | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Operation:
    """One call of an operator. A tensor that is used twice has two slots.

    name          unique in the graph
    operator      `aten.linear.default`
    inputs        tensor names, by slot
    args          positional arguments, with a `Slot` where a tensor stands
    kwargs        keyword arguments, with a `Slot` where a tensor stands
    outputs       tensor names; None for an output that is not a tensor or is never used
    region        modes in which it ran
    where         place in the model's code
    module        path of the module that ran it (`blocks.0.attn`, "" at the top)
    module_type   class name of that module
    """

    name: str
    operator: str
    inputs: tuple[str, ...]
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    outputs: tuple[str | None, ...]
    region: Region = field(default_factory=Region)
    where: SourceLocation | None = None
    module: str = ""
    module_type: str = ""


def map_slots(value: Any, function: Any) -> Any:
    """Rebuild nested arguments with `function(slot)` in place of each slot."""
    if isinstance(value, Slot):
        return function(value)
    if isinstance(value, list):
        return [map_slots(v, function) for v in value]
    if isinstance(value, tuple):
        return tuple(map_slots(v, function) for v in value)
    return value


def as_call(operation: Operation, tensors: Mapping[str, LogicalTensor]) -> Call:
    """Return the operation in the form in which the registry's functions take it."""

    def argument(slot: Slot) -> TensorArgument:
        tensor = tensors[operation.inputs[slot.index]]
        return TensorArgument(slot.index, tensor.shape, tensor.dtype)

    outputs = tuple(
        None if name is None else TensorArgument(i, tensors[name].shape, tensors[name].dtype)
        for i, name in enumerate(operation.outputs)
    )
    kwargs = {k: map_slots(v, argument) for k, v in operation.kwargs}
    return Call(operation.operator, map_slots(operation.args, argument), kwargs, outputs)
