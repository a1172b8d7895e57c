"""How a logical tensor lies on the axes of a mesh, as rank programs write it.

The same four states as the compiler's (this tower imports nothing of it), with the same text. Per axis, a state says
what each rank holds of the value and of the gradient:

| state               | value on each rank | gradient on each rank | pairing <v, g>      |
|---------------------|--------------------|-----------------------|---------------------|
| Invariant           | full, equal        | full, equal           | v . g on one rank   |
| Replicated          | full, equal        | partial sum           | v . sum_r g_r       |
| Sharded(dim, outer) | a shard            | the same shard        | sum_r v_r . g_r     |
| Partial(reduction)  | partial sum        | full, equal           | (sum_r v_r) . g     |
| Prefix(dim)         | rows up to its own | a term of those rows  | v . sum_r g_r       |

`outer` is measured in the logical dim: the dim is viewed as (outer, parts, inner) and the axis owns the middle digit.
`sections` are sizes of concatenated pieces of the dim, each of which is sharded. `sizes` are those of unequal shards:
each of the `outer` blocks of the dim is cut into pieces of these sizes, one per rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True, slots=True)
class Invariant:
    def __repr__(self) -> str:
        return "Invariant()"


@dataclass(frozen=True, slots=True)
class Replicated:
    def __repr__(self) -> str:
        return "Replicated()"


@dataclass(frozen=True, slots=True)
class Sharded:
    dim: int
    outer: int = 1
    sections: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()

    def __repr__(self) -> str:
        if self.sections:
            return f"Sharded({self.dim}, sections={self.sections})"
        outer = f", outer={self.outer}" if self.outer > 1 else ""
        return f"Sharded({self.dim}{outer}, sizes={self.sizes})" if self.sizes else f"Sharded({self.dim}{outer})"


@dataclass(frozen=True, slots=True)
class Partial:
    reduction: str = "sum"  # "sum" | "max"

    def __repr__(self) -> str:
        return "Partial()" if self.reduction == "sum" else f"Partial({self.reduction!r})"


@dataclass(frozen=True, slots=True)
class Prefix:
    """The rows of a dim up to the last one of the own slice, over slices in time. `sizes`: of unequal slices; `terms`:
    these rows are terms of a sum over slices."""

    dim: int
    sizes: tuple[int, ...] = ()
    terms: bool = False

    def __repr__(self) -> str:
        sizes = f", sizes={self.sizes}" if self.sizes else ""
        return f"Prefix({self.dim}{sizes}{', terms=True' if self.terms else ''})"

    def ends(self, size: int, parts: int) -> tuple[int, ...]:
        """Return by slice the number of rows up to its last one, of a dim of `size` in `parts` slices."""
        return tuple(accumulate(self.sizes or (size // parts,) * parts))


State = Invariant | Replicated | Sharded | Partial | Prefix


def is_cut(state: State, parts: int) -> bool:
    """Return whether an axis of `parts` ranks divides a tensor; not where one rank, its owner, has all of it."""
    return isinstance(state, Sharded) and parts > 1 and sum(size > 0 for size in state.sizes) != 1


States = Mapping[str, State]  # by axis name; an axis that is missing is Invariant
