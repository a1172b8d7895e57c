"""The tables of two searched axes agree with the ways that programs take."""

from __future__ import annotations

from itertools import product
from math import inf

import numpy as np
import pytest

from nnscaler.ir.graph import LogicalTensor
from nnscaler.ir.layout_conversion import explain_illegal
from nnscaler.layout import INVARIANT, PARTIAL, REPLICATED, Layout, Sharded
from nnscaler.planning.cluster.read import load_cluster
from nnscaler.planning.cost.analytic import AnalyticCost
from nnscaler.planning.cost.model_protocol import AxisPlace
from nnscaler.planning.sharding.conversion_costs import Conversions, hops_between
from nnscaler.planning.sharding.problem_config import Setting

STATES = (INVARIANT, REPLICATED, PARTIAL, Sharded(0), Sharded(1), Sharded(1, 2))
PLACES = {"a": AxisPlace(2, 3), "b": AxisPlace(3)}


def conversions(*searched: tuple[str, int]) -> Conversions:
    cost = AnalyticCost(load_cluster("ethernet10g").scaled(6))
    return Conversions(Setting(searched, (), 1, {}, PLACES), cost)


@pytest.mark.parametrize("needs_grad", [True, False])
def test_two_axes(needs_grad: bool) -> None:
    """As the shortest path by elements sent, nearly always: where orders send about as much, seconds may say otherwise,
    and a path may go through `Invariant` on one axis, convert the other, and come back."""
    tensor = LogicalTensor("x", (12, 36), "float32", needs_grad=needs_grad)
    sizes = (2, 3, 1)
    layouts: list[Layout] = [
        (*pair, INVARIANT)
        for pair in product(STATES, STATES)
        if explain_illegal((*pair, INVARIANT), sizes, tensor.shape) is None and (needs_grad or REPLICATED not in pair)
    ]
    found = conversions(("a", 2), ("b", 3))
    table = found.table(tensor, layouts, layouts)
    paths = np.array([[found.seconds(tensor, a, b) for b in layouts] for a in layouts])
    both = np.isfinite(table) & np.isfinite(paths)
    assert both.mean() > 0.98
    assert not (np.isfinite(table) & ~np.isfinite(paths)).any()
    assert (table[both] <= paths[both] * 1.01).all()
    assert np.isclose(table[both], paths[both], rtol=1e-9).mean() > 0.95
    assert (np.diag(table) == 0).all()


def test_one_axis_is_a_row_of_the_conversion_table() -> None:
    tensor = LogicalTensor("x", (12, 36), "float32", needs_grad=True)
    found = conversions(("b", 3))
    layouts: list[Layout] = [(s, INVARIANT) for s in STATES if s != Sharded(1, 2)]
    table = found.table(tensor, layouts, layouts)
    for (i, a), (j, b) in product(enumerate(layouts), enumerate(layouts)):
        assert table[i, j] == pytest.approx(found.seconds(tensor, a, b)), (a, b)
    assert hops_between(Sharded(0), Sharded(1), 3, tensor.shape, True) == (("all_to_all", "all_to_all"),)
    assert hops_between(INVARIANT, REPLICATED, 3, tensor.shape, True) == ((None, "all_reduce"),)
    assert table[layouts.index((REPLICATED, INVARIANT)), layouts.index((INVARIANT, INVARIANT))] == 0.0
    assert inf not in (table[0, 1], table[2, 0])
