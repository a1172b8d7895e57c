"""The whole operator, run once: its outputs, and every input's gradient under random cotangents.

All partitions of one set of inputs are compared with this. Cotangents are random: under all-ones ones, a permutation
of the output or a gradient that ignores its cotangent would not show.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from nnscaler.layout import State
from nnscaler.runtime.stage_base_class import RunContext
from nnscaler.runtime.tensor_bits_and_differences import family_scale, is_finite
from verify.evidence.inputs.concrete_call import ConcreteCall, outputs_of, plain_of, with_tensors
from verify.evidence.inputs.draw_values import as_special

# Operators that draw random numbers, run as generated programs do: numbers are drawn by logical coordinate.


@dataclass(frozen=True)
class MeshPlace:
    """A stand-in for the stage that the runtime's random operators ask for their rank's place on the mesh."""

    axes: Mapping[str, int]
    at: Mapping[str, int]
    context: RunContext
    device: str = "cpu"

    def sizes(self) -> dict[str, int]:
        return dict(self.axes)

    def coordinates(self) -> dict[str, int]:
        return dict(self.at)


def random_arguments(
    shape: tuple[int, ...], axes: Mapping[str, int], rank: Mapping[str, int], states: Mapping[str, State]
) -> dict[str, Any]:
    """Return the arguments that the compiler adds to a random operator's call, for one rank.

    shape   of the logical tensor that says where the numbers lie: the first input, or the output where there is none
    axes    axis -> ranks along it
    rank    axis -> the rank's place
    states  axis -> how that tensor lies along it
    """
    return {"stage": MeshPlace(axes, rank, RunContext()), "name": "operation", "states": states, "logical_shape": shape}


def whole_arguments(shape: Sequence[int]) -> dict[str, Any]:
    """The same for the whole operator, on one rank."""
    return random_arguments(tuple(shape), {}, {}, {})


# The whole.


@dataclass(frozen=True)
class WholeRun:
    """One run of the whole operator.

    outputs           one entry per output; None for what is no tensor
    cotangents        one entry per output; None where no gradient flows
    gradients         one entry per input tensor
    plain             outputs that are no tensors
    dtype             of floating numbers in this run
    without_gradient  indices of floating inputs that do not ask for a gradient
    """

    concrete: ConcreteCall
    outputs: tuple[Tensor | None, ...]
    cotangents: tuple[Tensor | None, ...]
    gradients: tuple[Tensor | None, ...]
    plain: tuple[Any, ...] = ()
    dtype: torch.dtype = torch.float64
    without_gradient: frozenset[int] = frozenset()

    @property
    def finite(self) -> bool:
        """Return whether all outputs and gradients are finite."""
        return all(is_finite(t) for t in (*self.outputs, *self.gradients) if t is not None and t.numel())

    @cached_property
    def gradient_scale(self) -> float:
        """The largest absolute value in all gradients."""
        return family_scale(self.gradients)

    @property
    def comparable(self) -> bool:
        """Return whether the gradients are finite, and the outputs too but for infinities among other numbers."""
        if self.finite:
            return True
        held = [t for t in self.outputs if t is not None and not is_finite(t)]
        rest = all(is_finite(t) for t in self.gradients if t is not None)
        return rest and all(not bool(t.isnan().any()) and bool((t[torch.isfinite(t)] != 0).any()) for t in held)

    @property
    def shows_something(self) -> bool:
        """Return whether some output has a value other than zero: zeros alone cannot tell right from wrong."""
        return any(bool(o.any()) for o in self.outputs if o is not None)


def run_whole(
    function: Callable[..., Any],
    concrete: ConcreteCall,
    generator: torch.Generator,
    dtype: torch.dtype = torch.float64,
    without_gradient: frozenset[int] = frozenset(),
    random_cotangents: bool = True,
    factor: float = 1.0,
) -> WholeRun:
    """Run the operator with floating tensors in `dtype`. Raises whatever it raises.

    `without_gradient`: input tensors (by index) that do not ask for a gradient; `factor`: of the cotangents.
    """
    leaves = as_leaves(concrete.tensors, dtype, without_gradient)
    args, kwargs = with_tensors(concrete.call, leaves, {}, dtype)
    with torch.enable_grad():
        result = function(*args, **kwargs)
    outputs = outputs_of(result)
    if any(o is not None and o.dtype == torch.complex32 for o in outputs):
        raise TypeError("torch cannot compare complex numbers of half precision")
    drawn = [draw_cotangent(o, generator, random_cotangents) if o is not None else None for o in outputs]
    kind = concrete.kind
    cotangents = tuple(None if c is None else as_special(c * factor, kind, generator) for c in drawn)
    gradients = gradients_of([outputs], [cotangents], [leaves])[0]
    detached = tuple(None if o is None else o.detach() for o in outputs)
    return WholeRun(concrete, detached, cotangents, gradients, plain_of(result), dtype, without_gradient)


def as_leaves(
    tensors: Sequence[Tensor], dtype: torch.dtype = torch.float64, without_gradient: frozenset[int] = frozenset()
) -> tuple[Tensor, ...]:
    """Return contiguous copies, floating ones in `dtype` and asking for gradients."""
    return tuple(_leaf(t, dtype, i not in without_gradient) for i, t in enumerate(tensors))


_COMPLEX = {torch.float64: torch.complex128, torch.float32: torch.complex64}


def _leaf(tensor: Tensor, dtype: torch.dtype, wanted: bool) -> Tensor:
    floating = tensor.is_floating_point()
    to = dtype if floating else _COMPLEX.get(dtype, tensor.dtype) if tensor.is_complex() else tensor.dtype
    copy = tensor.to(to, memory_format=torch.contiguous_format, copy=True)
    return copy.requires_grad_() if wanted and (floating or tensor.is_complex()) else copy


def draw_cotangent(output: Tensor, generator: torch.Generator, random: bool = True) -> Tensor | None:
    """Draw signed integers of 1 to 4; None for an output that has no gradient."""
    if not output.requires_grad:
        return None
    if not random:
        return torch.ones_like(output)
    values = torch.randint(1, 9, output.shape, generator=generator)
    return torch.where(values > 4, 4 - values, values).to(output.dtype)


def gradients_of(
    outputs: Sequence[Sequence[Tensor | None]],
    cotangents: Sequence[Sequence[Tensor | None]],
    leaves: Sequence[Sequence[Tensor]],
) -> list[tuple[Tensor | None, ...]]:
    """Return the gradient of every leaf of every part, by one backward pass over all parts together."""
    ends: list[Tensor] = []
    seeds: list[Tensor] = []
    for part, part_cotangents in zip(outputs, cotangents, strict=True):
        for output, cotangent in zip(part, part_cotangents, strict=True):
            if output is not None and cotangent is not None and output.requires_grad:
                ends.append(output)
                seeds.append(cotangent)
    wanted = [leaf for part in leaves for leaf in part if leaf.requires_grad]
    found: Sequence[Tensor | None] = [None] * len(wanted)
    if ends and wanted:
        found = torch.autograd.grad(ends, wanted, seeds, allow_unused=True)
    remaining = iter(found)
    return [tuple(next(remaining) if leaf.requires_grad else None for leaf in part) for part in leaves]
