"""Channels in groups: one dim `(g c)` seen as two, and back."""

from __future__ import annotations

from verify.evidence.dimension_types.rules.call import Operand, RuleCall
from verify.evidence.dimension_types.sizes import Size, quotient
from verify.evidence.dimension_types.states import Shard, State, Unknown, checked


class Straddles(Exception):
    """A split that is neither of whole groups nor within each of them."""


def grouped(operand: Operand, dim: int, groups: Size, call: RuleCall) -> Operand:
    """Return the operand with its channels seen as two dims, (groups, channels of one)."""
    size = operand.sizes[dim]
    inner = quotient(size, groups)
    if inner is None:
        raise Straddles(f"{size} channels in {groups} groups")
    sizes = (*operand.sizes[:dim], groups, inner, *operand.sizes[dim + 1 :])
    state = operand.state
    if isinstance(state, Shard):
        if state.sections:
            raise Straddles("channels that are concatenated")
        if state.dim > dim:
            state = Shard(state.dim + 1, state.outer)
        elif state.dim == dim and not call.is_split(groups):
            outer = None if state.outer is None else quotient(state.outer, groups)
            if outer is None and state.outer is not None:
                raise Straddles("a split that straddles groups")
            state = Shard(dim + 1, outer)
    if isinstance(checked(state, sizes, call.split), Unknown):
        raise Straddles(f"{state} of {size} channels in {groups} groups")
    return Operand(sizes, operand.dtype, state)


def regrouped(state: State, dim: int, groups: Size) -> State:
    """Return the state of a tensor whose dims `dim` and `dim + 1` become one again.

    What is equal along one of them is not equal along both: None is then a shard with the least outer.
    """
    if not isinstance(state, Shard) or state.dim < dim:
        return state
    if state.dim == dim:
        return Shard(dim, 1 if state.outer is None else state.outer)
    if state.dim == dim + 1:
        return Shard(dim, groups if state.outer is None else state.outer * groups)
    return Shard(state.dim - 1, state.outer)
