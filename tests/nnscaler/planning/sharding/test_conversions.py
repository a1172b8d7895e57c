"""The tables of a searched axis agree with the ways that programs take."""

from __future__ import annotations

from itertools import product
from math import inf

import pytest

from nnscaler.ir.graph import LogicalTensor
from nnscaler.layout import INVARIANT, PARTIAL, REPLICATED, Layout, Sharded
from nnscaler.planning.cluster.description import load_cluster
from nnscaler.planning.cost.analytic import AnalyticCost
from nnscaler.planning.cost.model_protocol import AxisPlace
from nnscaler.planning.sharding.conversion_costs import Conversions, hops_between
from nnscaler.planning.sharding.settings_and_strategies import Setting

STATES = (INVARIANT, REPLICATED, PARTIAL, Sharded(0), Sharded(1), Sharded(1, 2))


def test_one_axis_is_a_row_of_the_conversion_table() -> None:
    tensor = LogicalTensor("x", (12, 36), "float32", needs_grad=True)
    cost = AnalyticCost(load_cluster("ethernet10g").scaled(6))
    found = Conversions(Setting((("b", 3),), (), {}, {"b": AxisPlace(3)}), cost)
    layouts: list[Layout] = [(s, INVARIANT) for s in STATES if s != Sharded(1, 2)]
    table = found.table(tensor, layouts, layouts)
    for (i, a), (j, b) in product(enumerate(layouts), enumerate(layouts)):
        assert table[i, j] == pytest.approx(found.seconds(tensor, a, b)), (a, b)
    assert hops_between(Sharded(0), Sharded(1), 3, tensor.shape, True) == (("all_to_all", "all_to_all"),)
    assert hops_between(INVARIANT, REPLICATED, 3, tensor.shape, True) == ((None, "all_reduce"),)
    assert table[layouts.index((REPLICATED, INVARIANT)), layouts.index((INVARIANT, INVARIANT))] == 0.0
    assert inf not in (table[0, 1], table[2, 0])
