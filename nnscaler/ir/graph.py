"""The graph: a model as data, in SSA form and topological order, made of logical tensors and operations."""

from __future__ import annotations

import keyword
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from types import MappingProxyType
from typing import Any, Literal

from op_registry.call import Call, TensorArgument, map_instances
from op_registry.source_location import SourceLocation

# Logical tensors and operations, of which a graph is made.
# A logical tensor is a whole tensor of the original model (the paper's pTensor).

# Names that a rank program can give to tensors and axes.

# what a rank program uses for other things: its imports, and the attributes of a stage
RESERVED = frozenset(
    "self torch aten comm ops dtypes float recompute user device index ranks axes micro micro_batches parameters "
    "frozen buffers constants inputs prepare_inputs receives sends updates forward prepare context rank coordinates "
    "sizes loss results slices staleness versions time_axes in_piece at_piece at_rest local graph_number".split()
)


def is_free_name(name: str) -> bool:
    """Return whether the name is an identifier of Python that a rank program does not use already."""
    return name.isidentifier() and not keyword.iskeyword(name) and name not in RESERVED


# Sizes of dtypes, by torch's names for them.

HALF = ("float16", "bfloat16")
_BYTES = {"bool": 1, "complex32": 4, "complex64": 8, "complex128": 16, "bfloat16": 2}


def element_bytes(dtype: str) -> int:
    """Return the bytes of one element: `float32` -> 4."""
    if dtype in _BYTES:
        return _BYTES[dtype]
    digits = "".join(c for c in dtype.partition("_")[0] if c.isdigit())  # float8_e4m3fn
    return int(digits) // 8


def gradient_dtype(dtype: str) -> str:
    """Gradients of half precision are accumulated in float32."""
    return "float32" if dtype in HALF else dtype


Role = Literal["parameter", "buffer", "constant", "input", "activation"]


@dataclass(frozen=True, slots=True)
class LogicalTensor:
    """A tensor of the graph.

    name         unique in the graph
    shape        of the whole tensor
    dtype        its name: `float32`
    role         parameter, buffer, constant, input or activation
    needs_grad   whether gradients flow through it, by dataflow
    fqns         a parameter's or buffer's names in the model's state, all of them when it is tied (the first is the
                 canonical one); an input's path in the sample inputs; empty otherwise
    master       dtype in which a parameter rests between steps; empty: `dtype`
    sums         dtype in which its gradient is summed over ranks; empty: `gradient_dtype` of it
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    role: Role = "activation"
    needs_grad: bool = False
    fqns: tuple[str, ...] = ()
    master: str = ""
    sums: str = ""

    @property
    def elements(self) -> int:
        return prod(self.shape)


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


def as_call(operation: Operation, tensors: Mapping[str, LogicalTensor]) -> Call:
    """Return the operation in the form in which the registry's functions take it."""

    def argument(slot: Slot) -> TensorArgument:
        tensor = tensors[operation.inputs[slot.index]]
        return TensorArgument(slot.index, tensor.shape, tensor.dtype)

    outputs = tuple(
        None if name is None else TensorArgument(i, tensors[name].shape, tensors[name].dtype)
        for i, name in enumerate(operation.outputs)
    )
    kwargs = {k: map_instances(v, Slot, argument) for k, v in operation.kwargs}
    return Call(operation.operator, map_instances(operation.args, Slot, argument), kwargs, outputs)


LOSS = "loss"  # its name among the results


@dataclass(frozen=True)
class Graph:
    """A traced model: its scalar loss, and what else its forward returns.

    `tensors`      every tensor, in order of definition: stored ones (parameters, buffers, constants) and inputs
                   first. Unused parameters are listed too: they have no gradient
    `operations`   topologically ordered; each tensor is the output of at most one
    `loss`         the name of the scalar loss; empty for a model without one, which only runs forward
    `loss_casts`   dtypes to which forward casts the loss at its end, in order: after the sum of its parts, which a cast
                   of each would round
    `updates`      (buffer, tensor): the buffer's value after the step
    `outputs`      (name, tensor) of every further tensor that forward returns
    `structure`    how forward returns them (`nnscaler.runtime.output_structure`); empty where it returns the loss alone
    """

    name: str
    tensors: Mapping[str, LogicalTensor]
    operations: tuple[Operation, ...]
    loss: str
    updates: tuple[tuple[str, str], ...] = ()
    outputs: tuple[tuple[str, str], ...] = ()
    structure: str = ""
    loss_casts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "tensors", MappingProxyType(dict(self.tensors)))

    def __getstate__(self) -> dict[str, object]:
        names = ("name", "operations", "loss", "updates", "outputs", "structure", "loss_casts")
        return {"tensors": dict(self.tensors), **{n: getattr(self, n) for n in names}}

    def __setstate__(self, state: dict[str, object]) -> None:
        for key, value in state.items():
            object.__setattr__(self, key, value)
        self.__post_init__()

    @property
    def results(self) -> tuple[tuple[str, str], ...]:
        """(name, tensor) of all that forward returns, the loss first."""
        return ((LOSS, self.loss), *self.outputs) if self.loss else self.outputs

    def result_dtype(self, name: str, tensor: str) -> str:
        """Return the dtype in which forward returns a result."""
        return self.loss_casts[-1] if name == LOSS and self.loss_casts else self.tensors[tensor].dtype

    @cached_property
    def ends(self) -> frozenset[str]:
        """The tensors that the graph is there for: results, and new values of buffers."""
        return frozenset((*(name for _, name in self.results), *(value for _, value in self.updates)))

    @cached_property
    def producers(self) -> Mapping[str, Operation]:
        """tensor name -> the operation that makes it."""
        return {name: op for op in self.operations for name in op.outputs if name is not None}

    @cached_property
    def consumers(self) -> Mapping[str, tuple[tuple[Operation, int], ...]]:
        """tensor name -> (operation, slot) of every use."""
        uses: dict[str, list[tuple[Operation, int]]] = {name: [] for name in self.tensors}
        for op in self.operations:
            for slot, name in enumerate(op.inputs):
                uses[name].append((op, slot))
        return {name: tuple(found) for name, found in uses.items()}

    @cached_property
    def by_name(self) -> Mapping[str, Operation]:
        return {op.name: op for op in self.operations}

    def with_role(self, *roles: str) -> tuple[LogicalTensor, ...]:
        """Return the tensors with one of these roles, in order of definition."""
        return tuple(t for t in self.tensors.values() if t.role in roles)

    def replace(self, **changes: object) -> Graph:
        return replace(self, **changes)  # type: ignore[arg-type]
