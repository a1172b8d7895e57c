"""Attention whose keys go around the ranks, against attention on one: and what it would take to get it wrong."""
# ruff: noqa: E501 - a table of cases, one to a line

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from nnscaler.layout import Sharded
from nnscaler.runtime.communication.communicator import CommunicationCall, Communicator
from nnscaler.runtime.communication.differentiable_collectives import AxisGroup
from nnscaler.runtime.communication.simulator import Simulator
from nnscaler.runtime.cut_tensors import join_pieces, piece_of
from nnscaler.runtime.ops import ring_attention

E, V, HEADS = 3, 5, 4


@dataclass(frozen=True)
class Case:
    """`mask`: "rows" (a bias of each query and key), "seen" (bools), "keys" (one bias for each key) or none."""

    ranks: int
    causal: bool
    rows: int
    columns: int
    outer: int = 1
    sizes: tuple[int, ...] = ()
    grouped: bool = False
    mask: str = ""


CASES = [
    *(Case(n, causal, 2 * n * o, 2 * n * o, o) for n in (1, 2, 3, 4) for causal in (True, False) for o in (1, 2, 3)),
    *(Case(n, causal, 12, 12, grouped=True) for n in (2, 3) for causal in (True, False)),
    *(Case(len(s), causal, sum(s), sum(s), sizes=s) for s in ((4, 3), (3, 2, 2), (1, 4, 2, 2)) for causal in (True, False)),
    Case(3, True, 12, 24),
    Case(2, True, 24, 12, 2),
    *(Case(n, False, 8, 24, 2, (), grouped, mask) for n in (1, 4) for grouped in (False, True) for mask in ("rows", "seen", "keys")),
]  # fmt: skip


def run(
    case: Case, attention: Callable[..., Tensor] = ring_attention, listen: list[CommunicationCall] | None = None
) -> float:
    """Return the greatest difference of results and gradients; infinity for what is not finite or has other shapes."""
    torch.manual_seed(case.rows)
    keys = HEADS // 2 if case.grouped else HEADS

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64)

    leaves = [drawn(2, HEADS, case.rows, E), drawn(2, keys, case.columns, E), drawn(2, keys, case.columns, V)]
    masks = {"rows": (HEADS, case.rows), "seen": (1, case.rows), "keys": (1, 1)}
    if case.mask:
        leaves.append(drawn(2, *masks[case.mask], case.columns))
        leaves[-1] = leaves[-1] > -0.5 if case.mask == "seen" else leaves[-1]
    of_keys = case.mask == "keys"
    cut = (2, 2, 2, 3 if of_keys else 2)
    leaves = [t.requires_grad_(t.is_floating_point()) for t in leaves]
    whole = torch.nn.functional.scaled_dot_product_attention(
        *leaves[:3], *leaves[3:], is_causal=case.causal, enable_gqa=case.grouped
    )
    above = drawn(*whole.shape)
    wanted = [whole, *torch.autograd.grad(whole, [t for t in leaves if t.requires_grad], above)]

    def piece(tensor: Tensor, dim: int, rank: int) -> Tensor:
        return piece_of(tensor.detach(), Sharded(dim, case.outer, (), case.sizes), case.ranks, rank).clone()

    def one(communicator: Communicator) -> list[Tensor]:
        if listen is not None and communicator.rank == 0:
            communicator.listener = listen.append
        over = AxisGroup("cp", case.ranks, communicator.rank, tuple(range(case.ranks)), communicator)
        own = [piece(t, dim, over.index).requires_grad_(t.requires_grad) for t, dim in zip(leaves, cut, strict=False)]
        made = attention(
            *own,
            over=over,
            causal=case.causal,
            enable_gqa=case.grouped,
            outer=case.outer,
            sizes=case.sizes,
            mask_of_keys=of_keys,
        )
        gradients = torch.autograd.grad(made, [t for t in own if t.requires_grad], piece(above, 2, over.index))
        return [made.detach(), *gradients]

    parts = Simulator(case.ranks).run(one)
    found = [
        join_pieces(list(p), Sharded(dim, case.outer, (), case.sizes))
        for p, dim in zip(zip(*parts, strict=True), (2, *cut), strict=False)
    ]
    differences = [float((a - b).detach().abs().max()) for a, b in zip(found, wanted, strict=True)]
    return max(d if d == d else float("inf") for d in differences)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_ring_computes_what_one_rank_does(case: Case) -> None:
    assert run(case) < 1e-13


def test_a_row_that_sees_no_key_is_zero() -> None:
    query = torch.randn(1, 4, E, dtype=torch.float64, requires_grad=True)
    hidden = torch.zeros(4, 4, dtype=torch.bool)
    alone = AxisGroup("cp", 1, 0, (0,), Simulator(1).communicators[0])
    result = ring_attention(query, query, query, hidden, over=alone)
    (gradient,) = torch.autograd.grad(result.sum(), query)
    assert not result.any() and not gradient.any()


def test_blocks_and_not_wholes_are_handed_on() -> None:
    made: list[CommunicationCall] = []
    run(Case(4, True, 16, 16), listen=made)
    assert {c.kind for c in made} == {"rotate"} and {c.shapes for c in made} == {
        ((2, HEADS, 4, E),),
        ((2, HEADS, 4, V),),
    }
    assert len(made) == 2 * 3 + 2 * (3 + 4)  # forward; backward, whose gradients go home


def test_half_precision_adds_up_in_float32() -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 32, 8).bfloat16() for _ in range(3))
    exact = torch.nn.functional.scaled_dot_product_attention(*(t.double() for t in (query, key, value)), is_causal=True)

    def one(communicator: Communicator) -> Tensor:
        over = AxisGroup("cp", 4, communicator.rank, (0, 1, 2, 3), communicator)
        own = (t[:, 8 * over.index : 8 * over.index + 8].clone() for t in (query, key, value))
        return ring_attention(*own, over=over, causal=True)

    found = torch.cat(Simulator(4).run(one), 1)
    assert found.dtype == torch.bfloat16
    assert float((found.double() - exact).abs().max()) <= 2**-8 * float(
        exact.abs().max()
    )  # one rounding, of the result


MUTANTS = {  # name -> (text, what it becomes)
    "no rescale by the maximum": ("result[..., rows, :] * less + weights", "result[..., rows, :] + weights"),
    "no rescale of the sum": ("total[..., rows, :] * less", "total[..., rows, :]"),
    "wrong direction": ("(self.over.index - step) % self.over.size", "(self.over.index + step) % self.over.size"),
    "mask by local places": ("self.runs(self.columns, self.owner(step))", "self.runs(self.columns, self.over.index)"),
    "the last step is dropped": ("return range(self.over.size)", "return range(max(1, self.over.size - 1))"),
    "gradients of keys are not sent home": ("        back = back.rotated(ring, step)", "        if step + 1 < ring.over.size:\n            back = back.rotated(ring, step)"),
    "gradients without what the row has in common": (" - inner[..., rows, :])", ")"),
    "the diagonal is hidden": ("places > torch.arange(first, after", "places >= torch.arange(first, after"),
}  # fmt: skip


def mutated(text: str, becomes: str) -> Any:
    source = inspect.getsource(sys.modules[ring_attention.__module__])
    assert text in source
    module = ModuleType("ring_mutant")
    sys.modules[module.__name__] = module  # dataclasses look there
    exec(compile(source.replace(text, becomes), "ring_mutant.py", "exec"), module.__dict__)
    return module.ring_attention


@pytest.mark.parametrize("name", MUTANTS)
def test_mistakes_show(name: str) -> None:
    attention = mutated(*MUTANTS[name])
    # with two ranks both directions are one; with three a block comes from the other side
    assert run(Case(3, True, 12, 12, 2), attention) > 1e-3
