"""The predicted time in which backwards add gradients to those of earlier micro-batches."""

from __future__ import annotations

from math import prod

import pytest

import nnscaler
from nnscaler.compile import WantedPlan, compile_traced
from nnscaler.ir.graph import element_bytes
from nnscaler.ir.operation_annotations import signatures
from nnscaler.performance.predict_step_time import programmed
from nnscaler.performance.stage_prices import ADDING, StagePrices
from nnscaler.planning.auto_plan_request import cluster_of, cost_of
from nnscaler.planning.cost.model_protocol import CostModel
from tests import traced_examples

WANTED = nnscaler.AutoPlan("a100x8")
COST: CostModel = cost_of(WANTED, cluster_of(WANTED, 2))


def prices_of(plan: str, micro_batches: int) -> tuple[StagePrices, ...]:
    traced = traced_examples.traced("gpt")
    wanted = WantedPlan(2, plan, micro_batches=micro_batches)
    made = compile_traced(traced, wanted, model={"name": "model"}).plan
    return programmed(traced.graph, signatures(traced.graph), made).predicted(COST).prices


def parameter_bytes() -> int:
    tensors = traced_examples.traced("gpt").graph.tensors.values()
    sizes = (t.shape for t in tensors if t.role == "parameter" and t.needs_grad)
    return sum(element_bytes("float32") * prod(shape) for shape in sizes)


@pytest.mark.parametrize("micro_batches", [1, 2, 3])
def test_all_but_the_first_backward_add_all_gradients(micro_batches: int) -> None:
    (price,) = prices_of("dp=2", micro_batches)
    whole = ADDING * COST.copied(parameter_bytes())
    assert price.added * micro_batches == pytest.approx((micro_batches - 1) * whole, rel=1e-9)


@pytest.mark.parametrize(("plan", "part"), [("dp=2,zero=1", 1.0), ("dp=2,zero=2", 0.5), ("dp=2,zero=3", 0.5)])
def test_gradients_that_are_divided_at_once_are_added_in_shards(plan: str, part: float) -> None:
    (whole,), (divided,) = prices_of("dp=2", 2), prices_of(plan, 2)
    assert divided.added == pytest.approx(part * whole.added, rel=0.02)  # a shard may be an element longer


def test_stages_add_what_they_hold() -> None:
    (whole,), stages = prices_of("dp=2", 2), prices_of("pp=2", 2)
    assert sum(price.added for price in stages) >= whole.added > max(price.added for price in stages)
    assert all(price.weights >= price.added for price in stages)
