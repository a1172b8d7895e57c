"""Bounds from a window of equal layers are bounds of all of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nnscaler.planning.constraints import replicate, sizes
from nnscaler.planning.cost.analytic import AnalyticCost
from nnscaler.planning.cost.model_protocol import Overheads
from nnscaler.planning.parallel_configurations import Configuration, configurations
from nnscaler.planning.planner import planner_graph
from nnscaler.planning.planner.bounds.configuration import bound_within
from nnscaler.planning.planner.branch_and_bound import CLOSE, search
from nnscaler.planning.planner.evaluate_configuration import evaluate
from nnscaler.planning.sharding.build_problem import Weights, pose
from nnscaler.planning.solver.solve import solve
from nnscaler.scheduling.registry import DEFAULT, SCHEDULES, planned_schedules
from nnscaler.transform.select_operations import layers_of
from tests.nnscaler.planning.planner.planned import deep, subject_of
from tests.sampling import only

PLENTY = 1e12


@pytest.mark.long
@pytest.mark.parametrize("layers", only((0,), [9, 10]))
@pytest.mark.parametrize(
    ("tp", "parts"),
    only(
        (
            0,
            2,
        ),
        [(1, 2), (2, 1), (2, 4), (4, 2)],
    ),
)
def test_a_window_costs_no_more_than_all_layers(layers: int, tp: int, parts: int) -> None:
    subject = subject_of(deep(layers), 4, "ethernet10g")
    window = subject.window(tp)
    assert subject.repeated is not None and window is not None
    assert window.times * len(subject.repeated.window) == layers - 2
    short, whole = subject.tables(tp, parts, short=True), subject.tables(tp, parts)
    assert len(short.names) < 0.6 * len(whole.names)
    for weights in (Weights(), Weights(each=3.0, once=0.5, recompute=True)):
        bound = solve(pose(short, weights, window)).bound
        value = solve(pose(whole, weights)).value
        assert 0.9 * value < bound <= value * (1 + 1e-9)


@pytest.mark.long
def test_layers_that_differ_have_no_window() -> None:
    assert subject_of("gpt", 4).window(2) is None  # four layers
    assert subject_of(deep(8), 4).window(2) is not None


@pytest.mark.parametrize(("ranks", "share"), only((0,), [(2, 0.6), (4, 0.6), (4, 1.0), (4, 0.4)]))
def test_what_fits_takes_no_less_than_its_bound(ranks: int, share: float) -> None:
    subject = subject_of(deep(6), ranks)
    free = search(subject, ranks, PLENTY)
    assert free.best is not None
    memory = free.best.memory * share
    looked = 0
    for c in configurations(ranks, subject.batch, len(subject.layers), planned_schedules()):
        found = evaluate(subject, c, memory) if c.micro_batches == 4 and c.tp < 4 else None
        if found is not None and found.fits:
            assert bound_within(subject, c, memory) <= found.seconds * (1 + 1e-9), c
            looked += 1
    assert looked > 0


def test_what_is_found_with_a_chain_is_no_slower_than_without(monkeypatch: pytest.MonkeyPatch) -> None:
    def few(c: Configuration) -> bool:
        return c.micro_batches <= 2

    chained = search(subject_of(deep(10), 2), 2, PLENTY, few)
    monkeypatch.setattr(planner_graph, "MANY", 100)
    whole = search(subject_of(deep(10), 2), 2, PLENTY, few)
    assert chained.best is not None and whole.best is not None
    assert chained.best.seconds <= whole.best.seconds / (1 - CLOSE)
    assert chained.bound <= chained.best.seconds and chained.bound <= whole.best.seconds


def test_constraints_on_some_layers_only_make_them_differ() -> None:
    graph = deep(12)
    (one,) = [layer.operations for layer in layers_of(graph) if layer.index == 6]
    subject = replace(subject_of(graph, 2), constraint=replicate(graph, one))
    assert subject.repeated_on(1) is not None
    assert subject.repeated_on(2) is None and subject.window(2) is None and subject.chain(2, 1) is None
    tables = subject.tables(2, 1)
    resting = sum(float(columns.resting.min()) for columns in tables.columns)
    assert subject.least(2).resting <= resting * (1 + 1e-9)
    told = search(subject, 2, PLENTY, lambda c: c.tp == 2 and c.micro_batches == 1)
    assert told.best is not None and told.bound <= told.best.seconds


class _Measured(AnalyticCost):
    """A machine that was measured, on which two halves of a backward take longer than the whole."""

    measured, overheads = True, Overheads(halved=1.06)


def test_schedules_that_split_few_are_searched_where_halves_are_measured() -> None:
    """Or where one is asked for; and in the memory of 1F1B one of them takes less."""

    def pipeline(c: Configuration) -> bool:
        return c.pp == 2 and c.micro_batches == 4

    plain, measured = (subject_of("gpt", 2, priced=cost) for cost in (AnalyticCost, _Measured))
    few, others = (tuple(k for k in planned_schedules() if k.figures and k.figures.few is few) for few in (True, False))
    assert len(few) == 3 and {*plain.schedules} == {*others} and {*measured.schedules} == {*few, *others}
    asked = replace(plain, constraint=sizes(schedule="zb-h1-half:1"))
    assert {*asked.schedules} - {*others} == {SCHEDULES["zb-h1-half"]}
    found = search(asked, 2, PLENTY, lambda c: pipeline(c) and asked.constraint.permits(c)).best
    assert found is not None and str(found).endswith("zb-h1-half:1")

    alone = search(measured, 2, PLENTY, lambda c: pipeline(c) and c.schedule is DEFAULT).best
    assert alone is not None
    best = search(measured, 2, alone.memory, pipeline).best
    assert best is not None and best.configuration.schedule in few
    assert best.seconds < alone.seconds and best.memory <= alone.memory
