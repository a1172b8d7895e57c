"""Dealt pieces make up their tensor, every rank has a part of a sum, and all ask for the same pieces."""

from __future__ import annotations

import pytest
import torch

from nnscaler.layout import Invariant, Partial, Replicated, Sharded, State
from nnscaler.runtime.shards import assemble, unravel
from verify.programs.localise.interpret_graph_on_whole_batch import Dealer

SIZES = {"dp": 2, "tp": 3, "micro": 2}
LAYOUTS: list[dict[str, State]] = [
    {},
    {"dp": Sharded(0), "tp": Partial()},
    {"tp": Partial("max"), "dp": Sharded(1, 3)},
    {"dp": Partial(), "tp": Partial(), "micro": Partial()},
    {"dp": Replicated(), "tp": Sharded(1, 2), "micro": Sharded(0, 2)},
]


@pytest.mark.parametrize("states", LAYOUTS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.int64])
def test_pieces_make_up_the_tensor(states: dict[str, State], dtype: torch.dtype) -> None:
    tensor = (torch.randn(8, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(3)) * 9).to(dtype)
    dealer = Dealer()
    at = [unravel(i, SIZES) for i in range(12)]
    pieces = [(c, dealer.piece("t", tensor, states, SIZES, c)) for c in at]
    found = assemble(pieces, states, SIZES, (8, 12))
    assert not found.differences
    torch.testing.assert_close(found.value, tensor, rtol=0, atol=1e-13 if dtype == torch.float64 else 0)
    if any(isinstance(state, Partial) for state in states.values()):
        assert all(bool((piece != 0).any()) for _, piece in pieces)


def test_the_same_pieces_for_all_and_others_for_other_names() -> None:
    tensor, states = torch.ones(4, dtype=torch.float64), {"tp": Partial()}
    sizes, first = {"tp": 3}, {"tp": 0}
    one, other = Dealer(), Dealer()
    assert torch.equal(one.piece("a", tensor, states, sizes, first), other.piece("a", tensor, states, sizes, first))
    assert not torch.equal(one.piece("a", tensor, states, sizes, first), one.piece("b", tensor, states, sizes, first))


def test_a_layout_that_does_not_fit() -> None:
    with pytest.raises(ValueError, match="does not divide"):
        Dealer().piece("t", torch.ones(7), {"tp": Sharded(0)}, {"tp": 3}, {"tp": 0})


def test_invariant_pieces_are_equal_and_their_own_memory() -> None:
    tensor, dealer = torch.arange(3.0), Dealer()
    one, other = (dealer.piece("t", tensor, {"tp": Invariant()}, {"tp": 2}, {"tp": i}) for i in range(2))
    one += 1
    assert torch.equal(other, tensor)
