"""Values of tensors: chosen so that a wrong result does not look right by coincidence."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from verify.evidence.verify_op_options import Kind


def fill(shape: Sequence[int], kind: Kind, generator: torch.Generator) -> Tensor:
    """Random float64 values.

    integers: of 1 to 3, signed, on which sums and products are exact and no kink at 0 is hit. normal: real ones.
    sparse: every second one is 0. positive, negative: away from 0, for operators whose domain is a half-line.
    definite: square matrices are symmetric and positive definite, all else is positive.
    bits: 0 or 1, the simplest counter-examples. spiked: one that is larger than all others together. nan, infinite: one
    that is so. zeros, constant: all alike. mostly: alike but in the last half of all dims, so that first shards are
    alike and the whole is not. rising: along every dim. counts: whole numbers, one of them large.
    """
    if kind in ("zeros", "constant"):
        return torch.full(tuple(shape), 0.0 if kind == "zeros" else 2.0, dtype=torch.float64)
    if kind in ("integers", "sparse", "counts"):
        values = torch.randint(1, 7, shape, generator=generator)
        values = torch.where(values > 3, 3 - values, values).double()
        if kind == "counts":
            return with_one(values, 4096.0, generator)
        return values * torch.randint(0, 2, shape, generator=generator) if kind == "sparse" else values
    if kind in ("positive", "negative", "definite"):
        values = torch.rand(shape, generator=generator, dtype=torch.float64) * 0.7 + 0.2  # also in the unit interval
        if kind == "definite" and values.dim() > 1 and values.shape[-1] == values.shape[-2]:
            values = values + values.mT + 2 * values.shape[-1] * torch.eye(values.shape[-1], dtype=torch.float64)
        return -values if kind == "negative" else values
    if kind == "bits":
        return torch.randint(0, 2, shape, generator=generator).double()
    values = torch.randn(shape, generator=generator, dtype=torch.float64)
    if kind == "mostly":
        return torch.where(_last_half(shape), values, 2.0)
    if kind == "rising":
        return values.flatten().sort().values.reshape(values.shape)
    return with_one(values * 1e-3, 1.0, generator) if kind == "spiked" else as_special(values, kind, generator)


def _last_half(shape: Sequence[int]) -> Tensor:
    """Return where an element lies in the last half of all dims."""
    inside = torch.ones(tuple(shape), dtype=torch.bool)
    for dim, size in enumerate(shape):
        inside.narrow(dim, 0, size // 2).fill_(False)
    return inside


def as_special(values: Tensor, kind: str, generator: torch.Generator) -> Tensor:
    """Return values of which one is NaN or infinite, where the kind is so; else as they are."""
    one = {"nan": float("nan"), "infinite": float("inf")}.get(kind)
    return values if one is None else with_one(values, one, generator)


def with_one(values: Tensor, one: float, generator: torch.Generator) -> Tensor:
    """Return the values with `one` in a place that is drawn."""
    values = values.clone(memory_format=torch.contiguous_format)
    if values.numel():
        values.view(-1)[int(torch.randint(0, values.numel(), (1,), generator=generator))] = one
    return values


def in_order(tensor: Tensor) -> bool:
    """Return integers of one dim that rise: offsets, whose order is their meaning."""
    return tensor.dim() == 1 and tensor.dtype != torch.bool and bool((tensor[1:] > tensor[:-1]).all())


def fill_whole_numbers(
    shape: Sequence[int], below: int, kind: Kind, generator: torch.Generator, low: int = 0
) -> Tensor:
    """Return integers from `low` to `below` - 1, both of which occur (once, in a sparse draw: what depends on the
    largest id of a shard then shows); booleans where `below` is `low`."""
    if below == low:
        share = {"zeros": 0.0, "constant": 1.0}.get(kind, 0.4)
        return torch.rand(tuple(shape), generator=generator) < share
    if kind in ("zeros", "constant"):
        return torch.full(tuple(shape), low if kind == "zeros" else below - 1)
    inside = kind == "sparse" and below - low > 2
    drawn = torch.randint(low + inside, below - inside, tuple(shape), generator=generator)
    if drawn.numel() > 1:
        first, last = torch.randperm(drawn.numel(), generator=generator)[:2].tolist()
        drawn.view(-1)[first], drawn.view(-1)[last] = low, below - 1
    return torch.where(_last_half(shape), drawn, low) if kind == "mostly" else drawn


def with_sentinels(tensors: Sequence[Tensor], sentinels: Sequence[tuple[int, float]], seed: int) -> tuple[Tensor, ...]:
    """Return the tensors with `sentinels`, (tensor, number), in a third of their elements. There are more of them
    towards one end of every dim, so that no two shards have as many: which end it is hangs on the seed."""
    found = list(tensors)
    for index in dict.fromkeys(index for index, _ in sentinels):
        tensor, numbers = found[index], [number for other, number in sentinels if other == index]
        generator = torch.Generator().manual_seed(seed + index)
        order = torch.rand(tuple(tensor.shape), generator=generator)
        for dim, size in enumerate(tensor.shape):
            place = torch.linspace(0, 1, size).reshape([-1 if d == dim else 1 for d in range(tensor.dim())])
            order = order + 2 * (1 - place if seed % 2 else place) / tensor.dim()
        chosen = order.flatten().argsort()[: max(tensor.numel() // 3, len(numbers))]
        values = tensor.clone(memory_format=torch.contiguous_format)
        here = torch.tensor(numbers).to(tensor.dtype).repeat(len(chosen) // len(numbers) + 1)[: len(chosen)]
        values.view(-1)[chosen] = here
        found[index] = values
    return tuple(found)


def varied(before: Tensor, resized: Tensor, kind: Kind, generator: torch.Generator) -> Tensor:
    """Other values for a tensor whose elements were repeated to make it larger: repeated along a dim they would show
    nothing of it. Values that may be negative are drawn anew, others change places; rising ones go on rising."""
    if tuple(before.shape) == tuple(resized.shape) or resized.numel() < 2:
        return resized
    rising = before.dim() > 0 and before.shape[-1] > 2 and not before.is_complex() and before.dtype != torch.bool
    if rising and bool((before[..., 1:] >= before[..., :-1]).all()):
        return resized.sort(-1).values
    if kind != "given" and before.is_floating_point() and bool((before < 0).any()):
        return fill(tuple(resized.shape), kind, generator)
    order = torch.randperm(resized.numel(), generator=generator)
    return resized.flatten()[order].reshape(resized.shape)


def refill(tensor: Tensor, kind: Kind, generator: torch.Generator) -> Tensor:
    """Other values for a tensor that somebody gave.

    Floating and complex ones are drawn anew. Integers and booleans are drawn from the tensor's own values, with its
    smallest and its largest among them, so that they stay ids, labels or masks of the same range.
    """
    if kind == "given":
        return tensor.double() if tensor.is_floating_point() else tensor
    shape = tuple(tensor.shape)
    if tensor.is_floating_point():
        return fill(shape, kind, generator)
    if tensor.is_complex():
        return torch.complex(fill(shape, kind, generator), fill(shape, kind, generator))
    flat = tensor.flatten()
    if flat.numel() < 2 or in_order(tensor):
        return tensor
    if kind in ("zeros", "constant"):
        return (flat.min() if kind == "zeros" else flat.max()).expand(shape).clone()
    inner = flat
    if kind == "sparse" and tensor.dtype != torch.bool:  # the smallest and the largest occur once
        between = flat[(flat > flat.min()) & (flat < flat.max())]
        inner = between if between.numel() else flat
    drawn = inner[torch.randint(0, inner.numel(), (flat.numel(),), generator=generator)]
    ends = torch.randperm(flat.numel(), generator=generator)[:2]
    drawn[ends] = torch.stack([flat.min(), flat.max()]) if tensor.dtype != torch.bool else flat[ends]
    return drawn.reshape(shape)


def random_terms(
    tensor: Tensor, parts: int, generator: torch.Generator, *, real: bool = False, scale: float = 2.0
) -> list[Tensor]:
    """Draw terms of either sign whose sum is the tensor: what ranks may hold of a partial sum.

    Integers, and so exact, where it holds whole numbers only; real numbers of about `scale` elsewhere. `real`: for
    floating and complex dtypes always, since an operator that rounds is linear in integers. Raises for booleans.
    """
    shape = tuple(tensor.shape)
    fractional = tensor.is_complex() or (
        tensor.is_floating_point() and (real or not torch.equal(tensor, tensor.round()))
    )
    if fractional:
        dtype = torch.complex128 if tensor.is_complex() else torch.float64
        drawn = [scale * torch.randn(shape, generator=generator, dtype=dtype) for _ in range(parts - 1)]
    else:
        drawn = [torch.randint(-4, 5, shape, generator=generator) for _ in range(parts - 1)]
    terms = [term.to(tensor.dtype) for term in drawn]
    rest = tensor
    for term in terms:
        rest = rest - term
    return [*terms, rest]
