"""Plans that `cp=` in a specification makes, and what it says of models with which it does not go."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from nnscaler.errors import NnscalerError
from nnscaler.ir.graph import Graph
from nnscaler.ir.operation_annotations import signatures
from nnscaler.performance.predict_step_time import replay
from nnscaler.planning import context_and_expert_parallel
from nnscaler.planning.cluster.description import load_cluster
from nnscaler.planning.context_and_expert_parallel import contexts
from nnscaler.planning.cost.analytic import AnalyticCost
from nnscaler.planning.parallel_configurations import Configuration
from nnscaler.planning.parse_axes import parse_spec
from nnscaler.planning.plan_from_axes import make_plan
from nnscaler.planning.planner.branch_and_bound import evaluate
from nnscaler.planning.planner.build_certified_plan import plan_of
from nnscaler.planning.planner.planner_graph import PlanningCache
from nnscaler.tracing import trace
from nnscaler.transform.plan import Plan, SplitStep
from tests.traced_examples import traced


class Attention(nn.Module):
    """One layer of attention over tokens, at the lengths and with the arguments of a test."""

    def __init__(self, attend: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.into, self.attend = nn.Linear(4, 4), attend

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(self.into(x)).square().mean()


def graph_of(attend: Callable[[Tensor], Tensor], tokens: int) -> Graph:
    torch.manual_seed(0)
    return trace(Attention(attend), {"x": torch.randn(4, tokens, 4)}).graph


def causal(x: Tensor) -> Tensor:
    return nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)


def both_ways(x: Tensor) -> Tensor:
    return nn.functional.scaled_dot_product_attention(x, x, x)


def rings(plan: Plan) -> list[SplitStep]:
    return [step for step in plan.steps if isinstance(step, SplitStep) and step.circulating]


@pytest.mark.parametrize(
    ("attend", "tokens", "parts", "outer", "sizes"),
    [
        (causal, 16, 2, 8, ()),  # blocks, so that no rank has the late rows only
        (causal, 12, 2, 6, ()),
        (causal, 12, 4, 3, ()),
        (causal, 13, 4, 1, (4, 3, 3, 3)),
        (both_ways, 16, 2, 1, ()),  # all rows see as much
        (both_ways, 7, 3, 1, (3, 2, 2)),
    ],
)
def test_rows_and_columns_are_cut_alike(
    attend: Callable[[Tensor], Tensor], tokens: int, parts: int, outer: int, sizes: tuple[int, ...]
) -> None:
    graph = graph_of(attend, tokens)
    (step,) = rings(make_plan(graph, signatures(graph), {"cp": parts}))
    assert (step.axis, step.outer, step.sizes, step.circulating) == ("cp", outer, sizes, "s")


@pytest.mark.parametrize(
    ("attend", "tokens", "parts", "said"),
    [
        (lambda x: x.cumsum(1), 16, 2, "calls no attention whose keys can be passed around"),
        (causal, 3, 4, "reaches the 3 rows"),
        (lambda x: causal(x[:, :, None].flatten(0, 1).unflatten(0, (8, 8))), 16, 2, "no dim of the inputs"),
    ],
)
def test_refusals_say_where(attend: Callable[[Tensor], Tensor], tokens: int, parts: int, said: str) -> None:
    graph = graph_of(attend, tokens)
    with pytest.raises(NnscalerError, match=said) as found:
        make_plan(graph, signatures(graph), {"cp": parts})
    assert found.value.code == "plan_illegal" and found.value.help


def test_what_communicates_is_no_choice_in_time() -> None:
    graph = traced("gpt").graph
    plan = make_plan(graph, signatures(graph), {"cp": 2})
    moved = replace(plan, mesh=(), micro_batches=2, steps=tuple(replace(s, axis="micro") for s in rings(plan)))
    with pytest.raises(NnscalerError, match="communicate"):
        replay(graph, signatures(graph), moved, AnalyticCost(load_cluster("h100x8")))


def test_the_planner_prices_what_the_program_does() -> None:
    """Tables and the program that comes of them, by one cost model."""
    graph = traced("gpt").graph
    known = dict(signatures(graph))
    cost = AnalyticCost(load_cluster("h100x8").scaled(4))
    for c in (Configuration(cp=4), Configuration(cp=2, tp=2), Configuration(dp=2, cp=2)):
        subject = PlanningCache(graph, known, cost, cp=c.cp)
        assert c in list(subject.space(c.ranks))
        found = evaluate(subject, c, 1e12)
        assert found is not None and rings(plan_of(subject, found))
        program = replay(graph, known, plan_of(subject, found), cost).prediction
        assert program.seconds - program.beside[0] == pytest.approx(found.seconds, rel=1e-9)


def test_only_long_sequences_are_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = graph_of(causal, 32)
    known = signatures(graph)
    assert contexts(graph, known, 24, lambda cp: True) == (1,)
    assert contexts(graph, known, 24, lambda cp: cp == 3) == (3,)  # where a constraint asks for it
    assert contexts(graph, known, 24, lambda cp: False) == (1,)
    monkeypatch.setattr(context_and_expert_parallel, "LONG", 32)
    assert contexts(graph, known, 24, lambda cp: True) == (1, 2, 4)  # with 8, a rank has no 8 blocks


def test_the_specification_names_cp() -> None:
    assert parse_spec("dp=2,cp=2,tp=2", 8) == {"dp": 2, "cp": 2, "tp": 2}
    with pytest.raises(NnscalerError, match="cp is named twice"):
        parse_spec("cp=2,cp=2", 4)
