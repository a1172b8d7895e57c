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
    """What surrounded the operation in the model: gradient recording, and autocast (dtype name, or "off"). `recompute`:
    the call of `torch.utils.checkpoint` that computes it again in backward, which changes nothing of what it means."""

    grad_enabled: bool = True
    autocast: str | None = None
    recompute: str | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Operation:
    """One call of an operator.

    `inputs` are tensor names; `args` and `kwargs` hold a `Slot` where a tensor stands. The same tensor used twice has
    two slots. `outputs` are tensor names, None for an output that is not a tensor or is never used. `module` is the
    path of the module that ran it (`blocks.0.attn`, "" at the top), `module_type` its class name.
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
    """The operation as the registry's functions see it."""

    def argument(slot: Slot) -> TensorArgument:
        tensor = tensors[operation.inputs[slot.index]]
        return TensorArgument(slot.index, tensor.shape, tensor.dtype)

    outputs = tuple(
        None if name is None else TensorArgument(i, tensors[name].shape, tensors[name].dtype)
        for i, name in enumerate(operation.outputs)
    )
    kwargs = {k: map_slots(v, argument) for k, v in operation.kwargs}
    return Call(operation.operator, map_slots(operation.args, argument), kwargs, outputs)
