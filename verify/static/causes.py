"""A pair of layout states that disagree, in words: what is there, what is needed, and which communication is missing
or too much. The states are pairs of value and gradient, so each pair of them means one mechanism."""

from __future__ import annotations

from nnscaler.ir.layout import Invariant, Partial, Replicated, Sharded, State


def disagreement(have: State, need: State, axis: str, parts: int) -> str:
    """Why a value in state `have` cannot stand where `need` is wanted, over an axis of `parts` ranks."""
    match have, need:
        case Invariant(), Replicated():
            return (
                f"a backward all_reduce over {axis} is missing: each rank has only its own part of the gradient there, "
                "and nothing sums the parts (comm.replicate does)"
            )
        case Replicated(), Invariant():
            return (
                f"the gradient would be summed over {axis} although every rank has all of it: {parts} times too large"
            )
        case Partial(), Invariant() | Replicated():
            return f"an all_reduce over {axis} is missing: each rank holds only its own term of the sum"
        case Partial(), Sharded():
            return f"a reduce_scatter over {axis} is missing: each rank holds only its own term of the sum"
        case Invariant() | Replicated(), Partial():
            return (
                f"every rank of {axis} contributes the whole where each should contribute a term of the sum: it is "
                f"counted {parts} times (comm.keep_first leaves it on one rank)"
            )
        case Sharded(), Partial():
            return f"a shard over {axis} stands where a term of a sum is needed"
        case Invariant() | Replicated(), Sharded():
            return f"the whole tensor stands where this rank's shard over {axis} is needed ({need})"
        case Sharded(), Invariant() | Replicated():
            return f"an all_gather over {axis} is missing: each rank holds only its shard ({have})"
        case Sharded(), Sharded():
            return _shards(have, need, axis)
        case Partial(), Partial():
            return f"terms of a {have.reduction} over {axis} stand where terms of a {need.reduction} are needed"
    return f"{have} over {axis} stands where {need} is needed"


def _shards(have: Sharded, need: Sharded, axis: str) -> str:
    if have.dim == need.dim:
        return (
            f"the shards over {axis} are cut otherwise: {have} and {need} are different elements of dim {need.dim} "
            "(contiguous against strided): a permutation of the shards"
        )
    return (
        f"the tensor is cut along dim {have.dim} over {axis} where dim {need.dim} is needed: an all_to_all is missing"
    )


def converted(have: State, expected: str, function: str, axis: str, parts: int) -> str:
    """Why a conversion whose row starts from `expected` is given `have`."""
    match have, function:
        case Invariant() | Replicated(), "all_reduce" | "all_reduce_replicated" | "reduce_scatter":
            return f"every rank of {axis} already has the whole sum: summing again makes it {parts} times too large"
        case Sharded(), "all_reduce" | "all_reduce_replicated" | "reduce_scatter":
            return f"{function} over {axis} adds shards, which are different elements: an all_gather joins them"
        case Partial(), "all_gather" | "all_gather_replicated":
            return f"{function} over {axis} joins terms of a sum, which have to be added: an all_reduce adds them"
        case Invariant() | Replicated(), "all_gather" | "all_gather_replicated":
            return f"every rank of {axis} already has the whole: joining {parts} copies makes it {parts} times as long"
        case Invariant(), "invariant" | "shard_replicated" | "keep_first_replicated":
            return (
                f"the gradient over {axis} is full on every rank, and this row takes it for a partial sum: wrong group"
            )
        case Replicated(), "replicate" | "shard" | "keep_first":
            return f"the gradient over {axis} is a partial sum, and this row takes it for the full one: summed twice"
        case Partial(), _:
            return f"an all_reduce over {axis} is missing before it: each rank holds only its own term of the sum"
        case Sharded(), _:
            return f"each rank of {axis} holds only its shard ({have}) there"
    return f"the value is {have} over {axis}, and this row starts from {expected}"
