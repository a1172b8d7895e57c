"""Bytes that training holds on one rank: of parameters with what belongs to them, and of activations for backward.

ZeRO shards one or more of the three parts of a parameter; the caller says how many elements of each lie on a rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

from nnscaler.ir.dtype import HALF, element_bytes, gradient_dtype
from nnscaler.planning.cost.model import Shapes
from nnscaler.transform.kept import VIEWS, kept_slots
from nnscaler.transform.signature import Signature

Optimizer = Literal["adam", "momentum", "sgd"]
_STATES: dict[Optimizer, int] = {"adam": 2, "momentum": 1, "sgd": 0}
_STATE_BYTES = 4  # optimizers keep float32


@dataclass(frozen=True, slots=True)
class ParameterMemory:
    """Bytes on one rank of one parameter or of several."""

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer

    def __add__(self, other: ParameterMemory) -> ParameterMemory:
        return ParameterMemory(
            self.parameters + other.parameters, self.gradients + other.gradients, self.optimizer + other.optimizer
        )


def parameter_memory(
    elements: int,
    dtype: str,
    *,
    gradient_elements: int | None = None,
    optimizer_elements: int | None = None,
    optimizer: Optimizer = "adam",
    trainable: bool = True,
) -> ParameterMemory:
    """`elements` of the parameter's shard at rest; of its gradient and of the optimizer's states the same, unless
    given.

    Gradients of half precision are accumulated in float32, and the optimizer keeps a float32 copy of such a parameter.
    """
    stored = elements * element_bytes(dtype)
    if not trainable:
        return ParameterMemory(stored)
    gradients = elements if gradient_elements is None else gradient_elements
    updated = elements if optimizer_elements is None else optimizer_elements
    copies = _STATES[optimizer] + (dtype in HALF)
    return ParameterMemory(stored, gradients * element_bytes(gradient_dtype(dtype)), updated * copies * _STATE_BYTES)


def kept_bytes(
    signature: Signature, shapes_in: Shapes, needs_grad: Sequence[bool], dtypes: Sequence[str] | None = None
) -> tuple[int, ...]:
    """Of each input of a shard, the bytes that are kept for backward; 0 where its value is not read.

    `needs_grad`: of each input; `dtypes`: the operands', the call's own if not given. A view keeps nothing. Values that
    several operations read are kept once, and parameters are there anyway: the caller knows which these are.
    """
    own = [t.dtype for t in signature.call.tensors()] if dtypes is None else dtypes
    operator = signature.call.operator
    kept = () if operator in VIEWS else kept_slots(operator, signature.linear, needs_grad)
    sizes = [0 if s is None else prod(s) * element_bytes(d) for s, d in zip(shapes_in, own, strict=True)]
    return tuple(size if slot in kept else 0 for slot, size in enumerate(sizes))
