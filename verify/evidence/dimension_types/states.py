"""The abstract domain of the proofs: the state of a tensor while one identifier is split, or partial sums come in.

| state                | each rank holds                                                                        |
|----------------------|----------------------------------------------------------------------------------------|
| Same                 | the whole tensor, equal on all ranks                                                   |
| Shard(dim, outer)    | a shard: `dim` viewed as (outer, split, inner), and a part of the middle one            |
| Shard(dim, None)     | the same, of a tensor whose entries are equal along `dim`: a shard under any outer     |
| PartialSum           | a term: the sum over ranks is the tensor                                               |
| PartialMax           | a candidate: the maximum over ranks is the tensor                                      |
| Constant             | one number everywhere, the same in the whole tensor and on all ranks                   |
| Zero                 | zeros: a Constant, and also a PartialSum                                               |
| Unknown(reason)      | nothing is known                                                                       |

Which part of the middle one a rank holds does not matter: any disjoint sets of indices that together are all of them,
in rising order. So what is proved of `Shard` holds for every number of parts, even and uneven, and every stride.
`sections`: the dim is a concatenation of parts of these sizes, each with a symbol of its own that is split.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from verify.evidence.dimension_types.sizes import Size, Symbols, equal, mentions, quotient, symbols_of


@dataclass(frozen=True, slots=True)
class Unknown:
    """`reason`: the operator that lost it, and why."""

    reason: str = field(default="", compare=False)

    def __str__(self) -> str:
        return "unknown"


@dataclass(frozen=True, slots=True)
class Same:
    def __str__(self) -> str:
        return "the same on every rank"


@dataclass(frozen=True, slots=True)
class PartialSum:
    def __str__(self) -> str:
        return "a partial sum"


@dataclass(frozen=True, slots=True)
class PartialMax:
    def __str__(self) -> str:
        return "a partial maximum"


@dataclass(frozen=True, slots=True)
class Constant:
    def __str__(self) -> str:
        return "a constant"


@dataclass(frozen=True, slots=True)
class Zero:
    def __str__(self) -> str:
        return "zero"


@dataclass(frozen=True, slots=True)
class Shard:
    """`outer` None: entries are equal along `dim`."""

    dim: int
    outer: Size | None = 1
    sections: tuple[Size, ...] = ()

    def __str__(self) -> str:
        if self.sections:
            return f"a shard of dim {self.dim} in sections"
        if self.outer is None or self.outer == 1:
            return f"a shard of dim {self.dim}"
        return f"a shard of dim {self.dim} with outer {self.outer}"


State = Unknown | Same | PartialSum | PartialMax | Constant | Zero | Shard

SAME, PARTIAL_SUM, PARTIAL_MAX, CONSTANT, ZERO = Same(), PartialSum(), PartialMax(), Constant(), Zero()


def split_dims(sizes: tuple[Size, ...], split: Symbols) -> tuple[int, ...]:
    """Return the dims whose sizes depend on what is split."""
    return tuple(d for d, size in enumerate(sizes) if mentions(size, split))


def checked(state: State, sizes: tuple[Size, ...], split: Symbols) -> State:
    """Return the state, or Unknown where no tensor of these sizes can be in it.

    A tensor has a size that depends on what is split just when it is a shard of that dim, and of no other.
    """
    if isinstance(state, Unknown | Constant | Zero):
        return state
    dims = split_dims(sizes, split)
    if not isinstance(state, Shard):
        return Unknown(f"{state}, with a size that is split") if dims else state
    if dims != (state.dim,):
        return Unknown(f"{state}, with sizes {sizes} where {sorted(map(str, split))} are split")
    return state if _divides(state, sizes[state.dim], split) else Unknown(f"dim {state.dim} is not a product")


def _divides(state: Shard, size: Size, split: Symbols) -> bool:
    """Return whether the dim can be viewed as the state says."""
    if state.sections:
        total = sum(state.sections)
        return equal(total, size) and all(_one_factor(s, 1, split) for s in state.sections) and state.outer == 1
    return _one_factor(size, 1 if state.outer is None else state.outer, split)


def _one_factor(size: Size, outer: Size, split: Symbols) -> bool:
    """Return whether `size` is outer * (one split symbol) * inner."""
    inside = symbols_of(size) & split
    if len(inside) != 1 or mentions(outer, split):
        return False
    (symbol,) = inside
    inner = quotient(size, outer * symbol)
    return inner is not None and not mentions(inner, split)


def join(a: Shard, b: Shard) -> Shard | None:
    """Join the states of two shards of one dim that are read together; None if they hold different parts."""
    if a.outer is None:
        return b
    if b.outer is None:
        return a
    same = len(a.sections) == len(b.sections) and all(map(equal, a.sections, b.sections)) and equal(a.outer, b.outer)
    return a if same else None
