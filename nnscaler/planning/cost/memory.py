"""Memory of a parameter on one rank, in bytes, with its gradient and optimizer states."""

from __future__ import annotations

from dataclasses import dataclass

from nnscaler.ir.dtype import HALF, element_bytes, gradient_dtype

_MOMENTS = 2  # of Adam
_STATE_BYTES = 4  # optimizers keep float32


@dataclass(frozen=True, slots=True)
class ParameterMemory:
    """Bytes on one rank.

    parameters   values
    gradients    of the dtype that gradients have
    optimizer    moments, and a float32 copy of values in half precision
    """

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer


def parameter_memory(elements: int, dtype: str, trainable: bool = True) -> ParameterMemory:
    """Return the memory of a shard with `elements` elements at rest, trained by Adam.

    Gradients of half precision are accumulated in float32, and the optimizer keeps a float32 copy of such a parameter.
    """
    stored = elements * element_bytes(dtype)
    if not trainable:
        return ParameterMemory(stored)
    copies = _MOMENTS + (dtype in HALF)
    return ParameterMemory(stored, elements * element_bytes(gradient_dtype(dtype)), elements * copies * _STATE_BYTES)
