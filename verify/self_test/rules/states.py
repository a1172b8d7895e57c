"""Draw the split and the tensors' states for `rule_fuzz`: arbitrary, but mostly such that rules can say much about
them."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import sympy  # type: ignore[import-untyped]
import torch

from verify.evidence.dimension_types.rules.call import Operand
from verify.evidence.dimension_types.sizes import Size, Symbols, mentions, quotient, symbols_of
from verify.evidence.dimension_types.states import (
    CONSTANT,
    PARTIAL_MAX,
    PARTIAL_SUM,
    SAME,
    ZERO,
    Shard,
    State,
    Unknown,
    checked,
)
from verify.self_test.rules.calls import DrawnCall, operands_of


def draw_split(call: DrawnCall, random: Random) -> Symbols:
    """Draw the split: nothing, one symbol, or those of a concatenation."""
    symbols = sorted(call.symbols, key=str)
    if not symbols or random.random() < 0.2:
        return frozenset()
    chosen = frozenset({random.choice(symbols)})
    operands = [o for o in (*operands_of(call), *call.outputs) if o is not None]
    sums = [size for o in operands for size in o.sizes if isinstance(size, sympy.Add) and mentions(size, chosen)]
    if sums and random.random() < 0.8:
        return frozenset(random.choice(sums).free_symbols)
    return chosen


def draw_states(operands: Sequence[Operand], split: Symbols, random: Random) -> list[State]:
    """Return a state for every tensor that a tensor of its sizes can be in; most draws are such that rules may say
    much."""
    style = random.choice(("shards", "shards", "sums", "sums", "any"))
    strict = random.random() < 0.7
    if style == "shards":
        outers = random.random()
        return [_pick(o, split, Random(outers) if strict else random, (SAME,) * 8 + (CONSTANT, ZERO)) for o in operands]
    if style == "sums":
        one = random.randrange(max(len(operands), 1))
        several = random.random() < 0.4
        states = []
        for i, o in enumerate(operands):
            sums = i == one or (several and random.random() < 0.6)
            choices: tuple[State, ...] = (PARTIAL_SUM,) if sums else (SAME, SAME, SAME, ZERO, CONSTANT)
            states.append(_pick(o, split, random, choices))
        return states
    return [_pick(o, split, random, (SAME, PARTIAL_SUM, PARTIAL_MAX, CONSTANT, ZERO)) for o in operands]


def _pick(operand: Operand, split: Symbols, random: Random, others: Sequence[State]) -> State:
    dims = [d for d, size in enumerate(operand.sizes) if mentions(size, split)]
    if not dims:
        choices = [s for s in others if s != PARTIAL_SUM or operand.dtype != torch.bool]
        return random.choice(choices or [SAME])
    if len(dims) > 1:
        return random.choice((CONSTANT, ZERO))
    kind = random.random()
    if kind < 0.1:
        return CONSTANT if kind < 0.05 else ZERO
    size = operand.sizes[dims[0]]
    state = Shard(dims[0], None) if kind < 0.2 else _shard(dims[0], size, split, random)
    found = checked(state, operand.sizes, split)
    return random.choice((CONSTANT, ZERO)) if isinstance(found, Unknown) else found


def _shard(dim: int, size: Size, split: Symbols, random: Random) -> Shard:
    inside = symbols_of(size) & split
    if len(inside) > 1 and isinstance(size, sympy.Add):
        terms = list(size.args)
        random.shuffle(terms)
        return Shard(dim, 1, tuple(terms))
    rest = quotient(size, next(iter(inside)))
    if rest is None or rest == 1:
        return Shard(dim)
    factors: list[Size] = []
    for factor, power in sympy.factor_list(rest)[1]:
        factors += [factor] * power
    for prime, power in sympy.factorint(sympy.factor_list(rest)[0]).items():
        factors += [int(prime)] * power
    outer: Size = 1
    for factor in factors:
        outer = outer * factor if random.random() < 0.5 else outer
    return Shard(dim, int(outer) if isinstance(outer, sympy.Integer) else outer)
