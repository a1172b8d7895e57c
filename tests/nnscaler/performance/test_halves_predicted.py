"""The predicted time of a step whose backwards run in two halves, and its timeline."""

from __future__ import annotations

from dataclasses import replace

import pytest

import nnscaler
from nnscaler.compile import WantedPlan, compile_traced
from nnscaler.ir.operation_annotations import signatures
from nnscaler.performance.predict_step_time import Replay, replay
from nnscaler.planning.auto_plan_request import cluster_of, cost_of
from nnscaler.transform.plan import Plan, RecomputeStep
from tests import halves, traced_examples

WANTED = nnscaler.AutoPlan("a100x8")


def replayed(plan: Plan) -> Replay:
    graph = traced_examples.traced("gpt").graph
    return replay(graph, dict(signatures(graph)), plan, cost_of(WANTED, cluster_of(WANTED, plan.ranks)))


def plan_of(text: str, ranks: int, micro_batches: int) -> Plan:
    wanted = WantedPlan(ranks, text, micro_batches=micro_batches)
    return compile_traced(traced_examples.traced("gpt"), wanted, model={"name": "model"}).plan


@pytest.mark.long
def test_halves_one_after_the_other_take_the_time_of_the_whole_where_nothing_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = plan_of("dp=2,tp=2", 4, 3)
    split = replace(whole, schedule=halves.registered(monkeypatch, halves.adjacent))
    assert replayed(split).seconds == pytest.approx(replayed(whole).seconds, rel=1e-12)


def test_gradients_travel_before_those_of_parameters_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one micro-batch each stage computes its W while the one before it runs I: nothing else changes."""
    whole = plan_of("tp=2,pp=2", 4, 1)
    split = replace(whole, schedule=halves.registered(monkeypatch, halves.adjacent))
    before, after = replayed(whole).prediction, replayed(split).prediction
    first, last = after.weights
    assert (before.weights, before.backward) == (after.weights, after.backward)
    assert 0.9 * after.backward[0] < first < after.backward[0]  # all but the message
    assert 0.1 * after.backward[1] < last < 0.6 * after.backward[1]  # vectors of norms are for I
    assert before.timeline.makespan - after.timeline.makespan == pytest.approx(last, rel=1e-9)


def test_what_is_computed_again_comes_back_in_the_first_half(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = plan_of("pp=2", 2, 2)
    again = replace(plain, steps=(*plain.steps, *(RecomputeStep((f"blocks.{i}",)) for i in range(4))))
    before, after = replayed(plain).prediction, replayed(again).prediction
    assert after.weights[1] == pytest.approx(before.weights[1], rel=1e-12)
    assert after.backward[1] > before.backward[1]
    assert after.weights[0] - before.weights[0] == pytest.approx(after.backward[0] - before.backward[0], rel=1e-9)


def test_the_timeline_of_a_program_has_both_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = halves.registered(monkeypatch, halves.zero_bubble)
    wanted = WantedPlan(2, "pp=2", micro_batches=3, schedule=schedule)
    program = compile_traced(traced_examples.traced("gpt"), wanted, model={"name": "model"})
    timeline = program.manifest.timeline
    assert timeline is not None
    for row, role in zip(timeline.rows, program.sources.values(), strict=True):
        said = " ".join(f"{bar.kind}{bar.stage}.{bar.micro}" for bar in row.bars)
        assert f"\n{said}\n" in role and "W" in said
        assert all(a.end <= b.start + 1e-3 for a, b in zip(row.bars, row.bars[1:], strict=False))
