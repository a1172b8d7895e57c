"""Find what an operator makes of where values lie in memory: it has to be one function of the values.

Shards are views with strides of their own, images may have their channels last, and the gradient of a sum is one
number with strides of zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from verify.evidence.inputs.concrete_call import ConcreteCall
from verify.operators.audit.watched_run import BackwardRaised, Facts, Watched, apart_in_float64, one_line, watch

BOUND = 1e-8  # relative; another kernel may run on other strides

Cotangents = Sequence[Tensor | None]
Lay = Callable[[Tensor], Tensor]


class Compared(NamedTuple):
    """`facts` of the first difference; in which pass and what the operator `raised`, where it did; how many `runs` were
    compared."""

    facts: Facts
    raised: tuple[str, str] | None
    runs: int


def depends_on_layout(
    function: Callable[..., object], concrete: ConcreteCall, first: Watched, names: Sequence[str]
) -> Compared:
    """Run the operator on the inputs and cotangents of its `first` run, laid out otherwise; `names`: of its inputs.

    That it refuses such tensors is no wrong result.
    """
    raised, runs = None, 0
    for (lay, given), (other_lay, others) in _layouts(concrete.tensors, first.cotangents):
        leaves = _leaves(concrete, other_lay)

        def one(lay: Lay = lay, given: Cotangents = given) -> Watched:
            return watch(function, concrete, None, _leaves(concrete, lay), given)

        def other(lay: Lay = other_lay, given: Cotangents = others) -> Watched:
            return watch(function, concrete, None, _leaves(concrete, lay), given)

        try:
            facts = apart_in_float64(one, other, names, BOUND, first.gradients)
        except Exception as error:  # noqa: BLE001 - refusing such inputs is no wrong result
            where = "in its backward " if isinstance(error, BackwardRaised) else ""
            raised = raised or (where, one_line(error.error if isinstance(error, BackwardRaised) else error))
            continue
        runs += 1
        if facts:
            return Compared({"strides": ", ".join(str(t.stride()) for t in leaves), **facts}, raised, runs)
    return Compared({}, raised, runs)


def _layouts(tensors: Sequence[Tensor], cotangents: Cotangents) -> Iterator[tuple[tuple[Lay, Cotangents], ...]]:
    """Yield two ways in which the same inputs and cotangents may lie, of which the first is the usual one."""
    usual = contiguous, [None if c is None else contiguous(c) for c in cotangents]
    others: list[Lay] = [strided]
    if any(_last(t) is not None for t in (*tensors, *cotangents) if t is not None):
        others.append(channels_last)
    for lay in others:
        laid = [None if c is None else lay(c) for c in cotangents]
        if not all(lay(t).is_contiguous() for t in tensors):
            yield usual, (lay, laid)
    ones = [None if c is None else contiguous(torch.ones_like(c)) for c in cotangents]
    if any(c is not None and c.numel() > 1 for c in ones):
        expanded = [None if c is None else torch.ones((), dtype=c.dtype).expand(c.shape) for c in ones]
        yield (contiguous, ones), (contiguous, expanded)


def _leaves(concrete: ConcreteCall, lay: Lay) -> list[Tensor]:
    leaves: list[Tensor] = []
    for index, tensor in enumerate(concrete.tensors):
        differentiable = tensor.is_floating_point() or tensor.is_complex()
        wide = tensor.to(torch.complex128 if tensor.is_complex() else torch.float64) if differentiable else tensor
        laid = lay(wide).detach()
        leaves.append(laid.requires_grad_() if differentiable and index not in concrete.constants else laid)
    return leaves


def strided(tensor: Tensor) -> Tensor:
    """Return the same values with gaps and in another order in memory.

    Gaps hold NaN, in integers other values of the tensor: whoever takes the memory for contiguous reads them.
    """
    values = tensor.detach()
    if values.numel() < 2:
        return values.clone()
    order = list(range(values.dim()))[::-1]
    flipped = values.permute(order)
    filler = torch.full_like(flipped, float("nan")) if values.is_floating_point() else flipped.flip(0)
    wide: Tensor = torch.stack([filler, flipped], -1)
    return wide.select(-1, 1).permute(order)


def contiguous(tensor: Tensor) -> Tensor:
    """Return a copy that lies in the order of its dims."""
    return tensor.clone(memory_format=torch.contiguous_format)


def channels_last(tensor: Tensor) -> Tensor:
    """Return a copy whose second dim is last in memory, where there are as many dims as images have."""
    return tensor.clone(memory_format=_last(tensor) or torch.contiguous_format)


def _last(tensor: Tensor) -> torch.memory_format | None:
    return {4: torch.channels_last, 5: torch.channels_last_3d}.get(tensor.dim())
