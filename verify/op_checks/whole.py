"""The whole operator, run once: its outputs, and every input's gradient under random cotangents.

All partitions of one set of inputs are compared with this. Cotangents are random: under all-ones ones, a permutation
of the output or a gradient that ignores its cotangent would not show.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from verify.compare import is_finite, largest
from verify.op_checks.concrete import ConcreteCall, outputs_of, with_tensors


@dataclass(frozen=True)
class Whole:
    """`cotangents` has one entry per output: None where no gradient flows. `gradients` has one per input tensor."""

    concrete: ConcreteCall
    outputs: tuple[Tensor | None, ...]
    cotangents: tuple[Tensor | None, ...]
    gradients: tuple[Tensor | None, ...]
    repeatable: bool

    @property
    def informative(self) -> bool:
        """Whether there is anything to tell right from wrong by: finite, and not only zeros."""
        values = [t for t in (*self.outputs, *self.gradients) if t is not None and t.numel()]
        return all(is_finite(t) for t in values) and any(largest(o) > 0 for o in self.outputs if o is not None)


def run_whole(
    function: Callable[..., Any],
    concrete: ConcreteCall,
    generator: torch.Generator,
    without_gradient: Sequence[int] = (),
) -> Whole:
    """Runs the operator in float64. Raises whatever it raises.

    `without_gradient`: outputs that are never differentiated (maxima under a `+max` reduction).
    """
    leaves = as_leaves(concrete.tensors)
    args, kwargs = with_tensors(concrete.call, leaves, {})
    with torch.enable_grad():
        outputs = outputs_of(function(*args, **kwargs))
    cotangents = tuple(
        draw_cotangent(o, generator) if o is not None and i not in without_gradient else None
        for i, o in enumerate(outputs)
    )
    gradients = gradients_of([outputs], [cotangents], [leaves])[0]
    with torch.no_grad():
        again = outputs_of(function(*args, **kwargs))
    repeatable = all(
        a is b is None or (a is not None and b is not None and _same(a, b)) for a, b in zip(outputs, again, strict=True)
    )
    detached = tuple(None if o is None else o.detach() for o in outputs)
    return Whole(concrete, detached, cotangents, gradients, repeatable)


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())


def as_leaves(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Detached copies; floating ones require gradients."""
    return tuple(t.detach().clone().requires_grad_(t.is_floating_point() or t.is_complex()) for t in tensors)


def draw_cotangent(output: Tensor, generator: torch.Generator) -> Tensor | None:
    """Signed integers of 1 to 4; None for an output that has no gradient."""
    if not output.requires_grad:
        return None
    sign = torch.randint(0, 2, output.shape, generator=generator) * 2 - 1
    return (torch.randint(1, 5, output.shape, generator=generator) * sign).to(output.dtype)


def gradients_of(
    outputs: Sequence[Sequence[Tensor | None]],
    cotangents: Sequence[Sequence[Tensor | None]],
    leaves: Sequence[Sequence[Tensor]],
) -> list[tuple[Tensor | None, ...]]:
    """The gradient of every leaf of every part, by one backward pass over all parts together."""
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
