"""Find whether an operator depends on how values lie in memory: it has to be one function of the values.

Shards are views with strides of their own, images may have their channels last, and the gradient of a sum is one
number with strides of zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from nnscaler.exception_in_one_line import in_one_line
from verify.evidence.inputs.concrete_call import ConcreteCall
from verify.operators.audit.watch_effects_on_tensors import BackwardRaised, Facts, Watched, apart_in_float64, watch

BOUND = 1e-8  # relative; another kernel may run on other strides

MOST = 4  # inputs that are laid otherwise one at a time
Cotangents = Sequence[Tensor | None]
Lay = Callable[[Tensor], Tensor]
Laid = tuple[Sequence[Lay], Cotangents]  # how each input lies, and the cotangents


class Compared(NamedTuple):
    """`facts` of the first difference; in which pass and what the operator `raised`, where it did; how many `runs` were
    compared."""

    facts: Facts
    raised: tuple[str, str] | None
    runs: int


def depends_on_layout(
    function: Callable[..., object],
    concrete: ConcreteCall,
    first: Watched,
    names: Sequence[str],
    *,
    users: bool = False,
) -> Compared:
    """Run the operator on the inputs and cotangents of its `first` run, laid out otherwise; `names`: of its inputs.

    `users`: its code is a user's, of which more layouts are tried. That it refuses such tensors is no wrong result.
    """
    raised, runs = None, 0
    ways = [*_layouts(concrete.tensors, first.cotangents)]
    for (lays, given), (other_lays, others) in [*ways, *(_more(concrete.tensors, first.cotangents) if users else ())]:
        leaves = _leaves(concrete, other_lays)

        def one(lays: Sequence[Lay] = lays, given: Cotangents = given) -> Watched:
            return watch(function, concrete, None, _leaves(concrete, lays), given)

        def other(lays: Sequence[Lay] = other_lays, given: Cotangents = others) -> Watched:
            return watch(function, concrete, None, _leaves(concrete, lays), given)

        try:
            facts = apart_in_float64(one, other, names, BOUND, first.gradients)
        except Exception as error:  # noqa: BLE001 - refusing such inputs is no wrong result
            where = "in its backward " if isinstance(error, BackwardRaised) else ""
            raised = raised or (where, in_one_line(error.error if isinstance(error, BackwardRaised) else error, 200))
            continue
        runs += 1
        if facts:
            return Compared({"strides": ", ".join(str(t.stride()) for t in leaves), **facts}, raised, runs)
    return Compared({}, raised, runs)


def _layouts(tensors: Sequence[Tensor], cotangents: Cotangents) -> Iterator[tuple[Laid, Laid]]:
    """Yield two ways in which the same inputs and cotangents may lie, of which the first is the usual one."""
    count = len(tensors)
    usual = [contiguous] * count, _all(contiguous, cotangents)
    others: list[Lay] = [strided]
    if any(_last(t) is not None for t in (*tensors, *cotangents) if t is not None):
        others.append(channels_last)
    for lay in others:
        if not all(lay(t).is_contiguous() for t in tensors):
            yield usual, ([lay] * count, _all(lay, cotangents))
    ones = [None if c is None else contiguous(torch.ones_like(c)) for c in cotangents]
    if any(c is not None and c.numel() > 1 for c in ones):
        one_number = [None if c is None else torch.ones((), dtype=c.dtype).expand(c.shape) for c in ones]
        yield ([contiguous] * count, ones), ([contiguous] * count, one_number)


def _more(tensors: Sequence[Tensor], cotangents: Cotangents) -> Iterator[tuple[Laid, Laid]]:
    """Yield more such ways: parts of wider rows, as of a packed projection; outer dims in another order; one input at a
    time; inputs that are expanded."""
    count = len(tensors)
    usual = [contiguous] * count, _all(contiguous, cotangents)
    for lay in (rows_apart, outer_exchanged):
        if not all(lay(t).is_contiguous() for t in tensors):
            yield usual, ([lay] * count, _all(lay, cotangents))
    for lay in (strided, rows_apart) if count > 1 else ():
        for index in range(min(count, MOST)):
            lays = [lay if i == index else contiguous for i in range(count)]
            if not lay(tensors[index]).is_contiguous():
                yield usual, (lays, usual[1])
    if any(t.dim() and t.shape[0] > 1 for t in tensors):
        yield ([repeated] * count, usual[1]), ([expanded] * count, usual[1])


def _all(lay: Lay, cotangents: Cotangents) -> list[Tensor | None]:
    return [None if c is None else lay(c) for c in cotangents]


def _leaves(concrete: ConcreteCall, lays: Sequence[Lay]) -> list[Tensor]:
    leaves: list[Tensor] = []
    for index, (tensor, lay) in enumerate(zip(concrete.tensors, lays, strict=True)):
        differentiable = tensor.is_floating_point() or tensor.is_complex()
        wide = tensor.to(torch.complex128 if tensor.is_complex() else torch.float64) if differentiable else tensor
        laid = lay(wide).detach()
        leaves.append(laid.requires_grad_() if differentiable and index not in concrete.constants else laid)
    return leaves


def rows_apart(tensor: Tensor) -> Tensor:
    """Return the same values as a part of wider rows: side by side in the last dim, with gaps between rows."""
    values = tensor.detach()
    if values.dim() < 2 or values.numel() < 2:
        return contiguous(values)
    filler = torch.full_like(values, float("nan")) if values.is_floating_point() else values.flip(0)
    return torch.cat([values, filler], -1).narrow(-1, 0, values.shape[-1])


def outer_exchanged(tensor: Tensor) -> Tensor:
    """Return a copy whose first two dims lie in the other order, where there are more."""
    return contiguous(tensor.transpose(0, 1)).transpose(0, 1) if tensor.dim() > 2 else contiguous(tensor)


def expanded(tensor: Tensor) -> Tensor:
    """Return the first entry of dim 0 in place of each, with a stride of zero."""
    return tensor[:1].expand(tensor.shape) if tensor.dim() and tensor.shape[0] > 1 else contiguous(tensor)


def repeated(tensor: Tensor) -> Tensor:
    """Return the values of `expanded`, each in memory of its own."""
    return contiguous(expanded(tensor))


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
