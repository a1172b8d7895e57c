"""Logical tensors: the whole tensors of the original model (the paper's pTensors)."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Literal

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
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    role: Role = "activation"
    needs_grad: bool = False
    fqns: tuple[str, ...] = ()

    @property
    def elements(self) -> int:
        return prod(self.shape)
