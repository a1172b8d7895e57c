"""A plan that is searched from Python, replayed, and compared with another."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import nnscaler
from nnscaler.errors import NnscalerError
from nnscaler.ir.graph import Graph
from nnscaler.ir.operation_annotations import signatures
from nnscaler.performance.predict_step_time import replay
from nnscaler.planning.auto_plan_request import Decided, cluster_of, cost_of, parse_auto, search_plan
from nnscaler.planning.compare_plans_and_choices import differences
from nnscaler.planning.constraints import sizes
from nnscaler.planning.plan_from_axes import make_plan
from nnscaler.tracing import Traced, trace

WANTED = nnscaler.AutoPlan("a100x8")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 8)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().sum()


@pytest.fixture(scope="module")
def traced() -> Traced:
    return trace(Net(), {"x": torch.randn(12, 8)})


@pytest.fixture(scope="module")
def graph(traced: Traced) -> Graph:
    return traced.graph


@pytest.mark.long
def test_what_is_searched_is_what_is_compiled() -> None:
    wanted = nnscaler.AutoPlan("a100x8", constraints=sizes(tp=2, pp=1))
    program = nnscaler.parallelize(Net(), {"x": torch.randn(12, 8)}, ranks=4, plan=wanted)
    assert program.plan.describe() == "dp=2 tp=2" and program.plan.micro_batches == 1


def test_micro_batches_are_searched_where_none_are_named(graph: Graph) -> None:
    known = signatures(graph)
    narrow = nnscaler.AutoPlan("a100x8", constraints=sizes(pp=2))
    free = search_plan(graph, known, 2, narrow)
    one = search_plan(graph, known, 2, narrow, Decided(micro_batches=1))
    asked = search_plan(graph, known, 2, narrow, Decided(micro_batches=3))
    assert (one.plan.micro_batches, asked.plan.micro_batches) == (1, 3)
    assert free.certificate.bound <= min(one.best.seconds, asked.best.seconds)


def test_what_does_not_fit_says_what_would_do(graph: Graph) -> None:
    known = signatures(graph)
    with pytest.raises(NnscalerError, match="no plan for 2 ranks of a100x8 fits into 1kB") as raised:
        search_plan(graph, known, 2, nnscaler.AutoPlan("a100x8", 1e3))
    assert raised.value.code == "plan_too_large" and "more memory" in (raised.value.help or "")


def test_this_machine_is_too_small_for_what_another_one_holds(graph: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nnscaler.planning.cluster.detect_this_machine.host_memory", lambda: 2000)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(NnscalerError, match="this machine") as raised:
        search_plan(graph, signatures(graph), 2, nnscaler.AutoPlan())
    assert "--cluster NAME" in (raised.value.help or "")


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("auto", nnscaler.AutoPlan()),
        ("auto:h100x8", nnscaler.AutoPlan("h100x8")),
        ("dp=2", None),
        ("automatic.json", None),
    ],
)
def test_words_that_ask_for_a_search(text: str, wanted: nnscaler.AutoPlan | None) -> None:
    assert parse_auto(text) == wanted


@pytest.mark.parametrize("wanted", [{"dp": 2}, {"pp": 2}, {"dp": 2, "pp": 2}], ids=str)
def test_a_device_is_busy_while_its_passes_run(graph: Graph, wanted: dict[str, int]) -> None:
    known = signatures(graph)
    ranks = 4 if len(wanted) == 2 else 2
    plan = make_plan(graph, known, wanted, micro_batches=3)
    found = replay(graph, known, plan, cost_of(WANTED, cluster_of(WANTED, ranks)))
    times = found.prediction
    assert len(found.busy) == wanted.get("pp", 1)
    for busy, forward, backward, once in zip(found.busy, times.forward, times.backward, times.once, strict=True):
        assert busy * found.seconds == pytest.approx(3 * (forward + backward) + once)
        assert busy <= 1 + 1e-9
    weights = 2 * (8 * 24 + 24 + 24 * 8 + 8) * 4  # bytes of the two layers
    if wanted == {"dp": 2}:
        assert found.sent == (pytest.approx(weights, abs=64),), "an all_reduce of every gradient, and the loss"
    if wanted == {"pp": 2}:
        assert found.sent[:1] == (12 * 8 * 4,) and found.sent[1] >= 12 * 8 * 4, "activations, and their gradients"


def test_differences_name_what_is_run_otherwise(graph: Graph) -> None:
    known = signatures(graph)
    cost = cost_of(WANTED, cluster_of(WANTED, 2))
    parts = [
        replay(graph, known, make_plan(graph, known, wanted, micro_batches=batches), cost).communicated.partitioned
        for wanted, batches in (({"tp": 2}, 1), ({"pp": 2}, 3))
    ]
    assert differences(parts[0], parts[0]) == ()
    found = {(d.kind, d.operation): (d.before, d.now) for d in differences(*parts)}
    assert found["stage", "linear_3"] == ("0", "1") and ("stage", "linear") not in found
    assert found["split", "linear"] == ("tp n", "whole")
    whole, states, gradients, shards = (
        replay(graph, known, make_plan(graph, known, {"dp": 2, **wanted}), cost).communicated.partitioned
        for wanted in ({}, {"zero": 1}, {"zero": 2}, {"zero": 3})
    )
    told = differences(whole, shards)
    assert len(told) == 8 and {d.kind for d in told} == {"at rest"}
    assert {(d.before, d.now) for d in told} == {("as it is read", "in shards over dp")}
    (between,) = {(d.before, d.now) for d in differences(states, gradients)}
    assert between == ("in shards over dp between steps", "in shards over dp between steps, and its gradient")


def test_a_profile_that_is_not_there_is_an_error(graph: Graph, tmp_path: Path) -> None:
    with pytest.raises(NnscalerError, match=r"none\.json"):
        search_plan(graph, signatures(graph), 2, nnscaler.AutoPlan(profile=tmp_path / "none.json"))
