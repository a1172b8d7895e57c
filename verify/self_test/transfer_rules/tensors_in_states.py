"""Tensors that are in a state, and whether they are: states of `verify.evidence.dimension_types.states` as numbers
on ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import sympy  # type: ignore[import-untyped]
import torch
from torch import Tensor

from nnscaler.runtime.tensor_bits_and_differences import largest_finite
from verify.evidence.dimension_types.rules.call_with_states import Operand
from verify.evidence.dimension_types.states import (
    Constant,
    PartialMax,
    PartialSum,
    Same,
    Shard,
    Size,
    State,
    Symbols,
    Zero,
    symbols_of,
)
from verify.evidence.inputs.draw_values import random_terms

Kind = Literal["normal", "integers", "positive", "unit", "above"]
KINDS: tuple[Kind, ...] = ("normal", "integers", "unit", "positive", "above")


class Undecided(Exception):
    """These values show nothing; the message says why."""


@dataclass(frozen=True)
class Ranks:
    """How ranks share what is split.

    whole    every symbol's size in the whole
    local    per rank, every symbol's size there
    indices  split symbol -> the indices that each rank holds: disjoint, rising, together all
    """

    whole: Mapping[Any, int]
    local: tuple[Mapping[Any, int], ...]
    indices: Mapping[Any, tuple[Tensor, ...]]

    @property
    def split(self) -> Symbols:
        return frozenset(self.indices)


def make_ranks(sizes: Mapping[Any, int], split: Symbols, parts: int, generator: torch.Generator) -> Ranks:
    """Deal every split symbol's indices at random, at least one to each of `parts` ranks."""
    indices: dict[Any, tuple[Tensor, ...]] = {}
    for symbol in sorted(split, key=str):
        order = torch.randperm(sizes[symbol], generator=generator)
        cuts = (torch.randperm(sizes[symbol] - 1, generator=generator)[: parts - 1] + 1).sort().values.tolist()
        pieces = order.tensor_split(cuts)
        indices[symbol] = tuple(piece.sort().values for piece in pieces)
    local = tuple({**sizes, **{s: len(pieces[rank]) for s, pieces in indices.items()}} for rank in range(parts))
    return Ranks(sizes, local, indices)


def evaluate(value: Any, sizes: Mapping[Any, int]) -> Any:
    """Return a number, or a list of them, at these sizes. Raises Undecided where it is no number."""
    if isinstance(value, list | tuple):
        return [evaluate(item, sizes) for item in value]
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        value = value.node.expr
    if not isinstance(value, sympy.Basic):
        return value
    found = value.xreplace({symbol: sympy.Integer(size) for symbol, size in sizes.items()})
    if found in (sympy.true, sympy.false):
        return bool(found)
    if not found.is_number:
        raise Undecided(f"{value} is no number")
    return int(found) if found.is_Integer else float(found)


def draw(
    operand: Operand, ranks: Ranks, kind: Kind, integers: Sequence[int], generator: torch.Generator
) -> tuple[Tensor, list[Tensor]]:
    """Return the whole tensor and what each rank holds, in the operand's state."""
    shape = evaluate(operand.sizes, ranks.whole)
    state = operand.state
    if isinstance(state, Constant | Zero):
        number = torch.zeros(()) if isinstance(state, Zero) else _fill([], operand.dtype, kind, integers, generator)
        shapes = [shape, *(evaluate(operand.sizes, sizes) for sizes in ranks.local)]
        whole, *held = [number.to(operand.dtype).expand(s).clone() for s in shapes]
        return whole, held
    if isinstance(state, Shard):
        if state.outer is None:
            one = [1 if d == state.dim else size for d, size in enumerate(shape)]
            whole = _fill(one, operand.dtype, kind, integers, generator).expand(shape).clone()
        else:
            whole = _fill(shape, operand.dtype, kind, integers, generator)
        return whole, [shard_of(whole, state, operand.sizes[state.dim], ranks, r) for r in range(len(ranks.local))]
    whole = _fill(shape, operand.dtype, kind, integers, generator)
    if isinstance(state, PartialSum):
        if whole.dtype == torch.bool:
            raise Undecided("truth values have no partial sums")
        return whole, random_terms(whole, len(ranks.local), generator, real=True)
    if isinstance(state, PartialMax):
        return whole, _candidates(whole, len(ranks.local), generator)
    return whole, [whole.clone() for _ in ranks.local]


def shard_of(whole: Tensor, state: Shard, size: Size, ranks: Ranks, rank: int) -> Tensor:
    """Return the part of `whole` that a rank holds; `size` is its dim's."""
    if state.sections:
        lengths = evaluate(state.sections, ranks.whole)
        parts = whole.split(lengths, state.dim)
        pieces = [
            shard_of(part, Shard(state.dim), section, ranks, rank)
            for part, section in zip(parts, state.sections, strict=True)
        ]
        return torch.cat(pieces, state.dim)
    (symbol,) = symbols_of(size) & ranks.split
    outer = 1 if state.outer is None else evaluate(state.outer, ranks.whole)
    before, after = whole.shape[: state.dim], whole.shape[state.dim + 1 :]
    inner, rest = divmod(whole.shape[state.dim], outer * ranks.whole[symbol])
    if rest:
        raise Undecided(f"{whole.shape[state.dim]} is not {outer} x {ranks.whole[symbol]} x anything")
    middle = whole.reshape(*before, outer, ranks.whole[symbol], inner, *after)
    held = middle.index_select(state.dim + 1, ranks.indices[symbol][rank])
    return held.reshape(*before, -1, *after) if held.numel() else held.flatten(state.dim, state.dim + 2)


def _fill(
    shape: Sequence[int], dtype: torch.dtype, kind: Kind, integers: Sequence[int], generator: torch.Generator
) -> Tensor:
    if dtype == torch.bool:
        return torch.rand(shape, generator=generator) < 0.4
    if not (dtype.is_floating_point or dtype.is_complex):
        return torch.tensor(integers)[torch.randint(len(integers), shape, generator=generator)].to(dtype)
    if dtype.is_complex:
        return torch.randn(shape, generator=generator, dtype=torch.complex128).to(dtype)
    if kind == "normal":
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    if kind == "integers":
        signs = torch.randint(0, 2, shape, generator=generator) * 2 - 1
        return (torch.randint(1, 4, shape, generator=generator) * signs).to(dtype)
    low, high = {"positive": (0.5, 1.5), "unit": (0.1, 0.9), "above": (1.5, 2.5)}[kind]
    return (low + (high - low) * torch.rand(shape, generator=generator, dtype=torch.float64)).to(dtype)


def _candidates(whole: Tensor, parts: int, generator: torch.Generator) -> list[Tensor]:
    """Draw tensors whose maximum is `whole`, in each entry held by one rank only."""
    if whole.dtype == torch.bool or whole.is_complex():
        raise Undecided("no order")
    holder = torch.randint(0, parts, whole.shape, generator=generator)
    below = whole - (torch.randint(1, 4, whole.shape, generator=generator)).to(whole.dtype)
    return [torch.where(holder == rank, whole, below) for rank in range(parts)]


def problem(
    state: State,
    whole: Tensor,
    held: Sequence[Tensor],
    sizes: Sequence[Size],
    ranks: Ranks,
    scale: float,
    coarsest: float = 0.0,
) -> str | None:
    """Return why what ranks hold is not in the state; None where it is. Raises Undecided where values show nothing.

    `scale`: the largest number that went in. What cancels out leaves rounding of numbers of its size. `coarsest`: the
    eps of the coarsest floating dtype that went in, to which terms are rounded, whatever they are added to.
    """
    for rank, (tensor, local) in enumerate(zip(held, ranks.local, strict=True)):
        expected = evaluate(tuple(sizes), local)
        if list(tensor.shape) != expected:
            return f"rank {rank} has shape {list(tensor.shape)} instead of {expected}"
        if tensor.dtype != whole.dtype:
            return f"rank {rank} has {tensor.dtype} instead of {whole.dtype}"
    if isinstance(state, Zero):
        if not torch.isfinite(whole).all():
            raise Undecided("not finite")  # 0 / 0, of both
        return None if not any(t.any() for t in (whole, *held)) else "not zero"
    if isinstance(state, Constant):
        numbers = torch.cat([t.flatten() for t in (whole, *held)])
        return None if numbers.numel() == 0 or _close(numbers, numbers[:1].expand_as(numbers), scale) else "no constant"
    if isinstance(state, PartialSum | PartialMax):
        return _combined(state, whole, held, scale, coarsest)
    for rank, tensor in enumerate(held):
        expected_tensor = whole
        if isinstance(state, Shard):
            expected_tensor = shard_of(whole, state, sizes[state.dim], ranks, rank)
            if state.outer is None and not _close(tensor, tensor.narrow(state.dim, 0, 1).expand_as(tensor), scale):
                return f"rank {rank} is not constant along dim {state.dim}"
        else:
            assert isinstance(state, Same)
        if not _close(tensor, expected_tensor, scale):
            return f"rank {rank} holds other values than {state}"
    return None


def _combined(state: State, whole: Tensor, held: Sequence[Tensor], scale: float, coarsest: float) -> str | None:
    if whole.dtype == torch.bool:
        if not isinstance(state, PartialMax):
            return "truth values have no partial sums"
        return None if torch.equal(torch.stack(list(held)).any(0), whole) else "the maximum is another"
    if not all(torch.isfinite(t).all() for t in (whole, *held)):
        raise Undecided("not finite")
    if isinstance(state, PartialMax):
        if whole.is_complex():
            return "complex numbers have no maximum"
        return None if _close(torch.stack(list(held)).amax(0), whole, scale) else "the maximum is another"
    scale = max(scale, *map(largest_finite, held))
    return None if _close(torch.stack(list(held)).sum(0), whole, scale, coarsest) else "the sum is another"


def _close(a: Tensor, b: Tensor, scale: float, coarsest: float = 0.0) -> bool:
    """Return whether two tensors are equal up to rounding, relative to the largest number that enters."""
    if a.shape != b.shape:
        return False
    if not (a.is_floating_point() or a.is_complex()):
        return torch.equal(a, b)
    bound = 1e5 * max(torch.finfo(a.dtype).eps, coarsest) * max(scale, largest_finite(b))
    return torch.allclose(a, b, rtol=0.0, atol=bound, equal_nan=True)
