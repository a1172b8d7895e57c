"""Pipelines of equal layers: cuts, bounds under a limit of memory, and plans that mix ways to run a layer."""

from __future__ import annotations

import re
from itertools import product

import numpy as np
import pytest

from nnscaler.communication.insert_conversions import materialise
from nnscaler.errors import NnscalerError
from nnscaler.ir.operation_annotations import signatures
from nnscaler.planning.cluster.description import load_cluster, quantity
from nnscaler.planning.constraints import sizes
from nnscaler.planning.parallel_configurations import Configuration, configurations, uneven_ramps
from nnscaler.planning.planner import equal_layer_chain
from nnscaler.planning.planner.bounds.configuration import bound_within, coarse_bound, near_bound, rough_bound
from nnscaler.planning.planner.branch_and_bound import evaluate_chain, search
from nnscaler.planning.planner.build_certified_plan import partition_of, plan_of
from nnscaler.planning.planner.equal_layer_chain import price
from nnscaler.planning.planner.find_plan import find_plan
from nnscaler.planning.planner.planner_graph import PlanningCache
from nnscaler.planning.planner.prune_dominated import WHOLE_PASS, of_conversions, seconds_of
from nnscaler.planning.planner.stage_partition_dp import Together, best_cut
from nnscaler.planning.sharding.parameter_and_activation_memory import MemoryBudget
from nnscaler.planning.solver import variable_elimination as elimination
from nnscaler.scheduling.registry import DEFAULT, planned_schedules
from nnscaler.transform.apply import apply_plan
from tests.nnscaler.planning.planner.planned import deep, subject_of

PLENTY = 1e12


@pytest.mark.parametrize("seed", range(20))
def test_cuts_are_the_best_of_all(seed: int) -> None:
    random = np.random.default_rng(seed)
    stages, most, states, layers = (int(random.integers(*r)) for r in ((1, 4), (2, 5), (1, 4), (3, 8)))
    seconds = random.uniform(1.0, 2.0, (stages, most + 1, states, states)).cumsum(axis=1)
    seconds[random.random(seconds.shape) < 0.2] = np.inf
    seconds[:, 0] = np.inf
    weight = float(random.integers(0, 9))
    values = []
    for counts in product(range(1, most + 1), repeat=stages):
        for ends in product(range(states), repeat=stages + 1):
            each = [seconds[s, n, ends[s], ends[s + 1]] for s, n in enumerate(counts)]
            if sum(counts) == layers and np.isfinite(each).all():
                values.append(sum(each) + weight * max(each))
    found = best_cut(seconds, layers, weight)
    if not values:
        assert found is None
        return
    assert found is not None and found.value == pytest.approx(min(values), rel=1e-12)
    taken = [seconds[s, n, *ends] for s, (n, ends) in enumerate(zip(found.layers, found.states, strict=True))]
    assert sum(found.layers) == layers and found.value == pytest.approx(sum(taken) + weight * max(taken))
    assert all(a[1] == b[0] for a, b in zip(found.states, found.states[1:], strict=False))


@pytest.mark.parametrize("seed", range(20))
def test_what_stages_take_and_add_together_bounds_every_cut(seed: int) -> None:
    random = np.random.default_rng(seed)
    stages, most, layers = (int(random.integers(*r)) for r in ((2, 5), (2, 6), (4, 9)))
    seconds = random.uniform(1.0, 2.0, (stages, most + 1, 1, 1)).cumsum(axis=1)
    added = random.uniform(0.0, 1.0) * seconds
    seconds[:, 0] = np.inf
    weight = float(random.integers(1, 9)) * stages
    both = Together(seconds + random.uniform(0.0, 1.5, seconds.shape), weight / stages)
    values = []
    for counts in product(range(1, most + 1), repeat=stages):
        if sum(counts) == layers:
            taken = [(seconds[s, n, 0, 0], added[s, n, 0, 0], both.seconds[s, n, 0, 0]) for s, n in enumerate(counts)]
            largest = max(one for one, _, _ in taken)
            more = [max(least, both.often * (one - largest)) for _, least, one in taken]
            values.append(weight * largest + sum(more))
    alone, found = best_cut(seconds, layers, weight, added), best_cut(seconds, layers, weight, added, both)
    if not values:
        assert found is None
        return
    assert alone is not None and found is not None
    assert alone.value - 1e-9 <= found.value <= min(values) + 1e-9
    assert found.value > alone.value + 1e-3 or min(values) == pytest.approx(alone.value)


def test_no_strategy_goes_that_is_best_in_some_ramp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each form is eliminated by itself, on tables that keep all strategies."""
    lean = subject_of(deep(9), 4).chain(2, 4)
    monkeypatch.setattr(equal_layer_chain, "WIDE", 10**6)
    monkeypatch.setattr(equal_layer_chain, "lean", lambda tables, fixed: (tables, ()))
    whole = subject_of(deep(9), 4).chain(2, 4)
    assert lean is not None and whole is not None and sum(lean.sizes) < sum(whole.sizes)
    forms = (WHOLE_PASS, *uneven_ramps())
    assert len(forms) > 3
    for form in forms:
        counted = whole.with_conversions(of_conversions(form))
        costs = [seconds_of(own, form)[:, None] for own in whole.tables.columns]
        alone = [price(counted, piece, dict(enumerate(costs))) for piece in (whole.head, whole.layer, whole.tail)]
        assert lean.least(form) == pytest.approx([float(one.table.min()) for one in alone], rel=1e-12), form


@pytest.mark.long
def test_what_is_a_chain() -> None:
    assert subject_of(deep(9), 4).chain(2, 1) is not None
    assert subject_of("gpt", 4).chain(2, 1) is None  # few layers
    assert subject_of("moe", 4).chain(2, 1) is None


@pytest.mark.long
def test_what_is_too_wide_for_a_chain_is_planned_without(monkeypatch: pytest.MonkeyPatch) -> None:
    chained = search(subject_of(deep(9), 2), 2, PLENTY)
    monkeypatch.setattr(elimination, "CAP", 2**14)  # as if the layers met in many choices
    subject = subject_of(deep(9), 2)
    assert subject.chain(2, 1) is None
    plain = search(subject, 2, PLENTY)
    assert chained.best is not None and plain.best is not None
    assert plain.best.seconds == pytest.approx(chained.best.seconds, rel=1e-9)


@pytest.mark.parametrize("cluster", ["h100x8", pytest.param("ethernet10g", marks=pytest.mark.long)])
def test_a_bound_is_one_for_every_plan_that_is_made_under_some_limit(cluster: str) -> None:
    """Plans are made with much and with little memory; each one's own memory as the limit makes its bound tightest."""
    subject = subject_of(deep(8), 4, cluster)
    looked, close = 0, 0
    chosen = [
        c
        for c in configurations(4, subject.batch, len(subject.layers), planned_schedules(), each=True)
        if c.recompute is None and c.micro_batches == 4 and c.dp <= 2
    ]
    others = [c for c in chosen if c.schedule is not DEFAULT]
    for c in [*(c for c in chosen if c.schedule is DEFAULT), *others[::3]]:
        free = evaluate_chain(subject, c, PLENTY)
        assert free is not None and free.fits
        for share in (0.7,):
            made = evaluate_chain(subject, c, share * free.memory)
            if made is None or not made.fits:
                continue
            for limit in (made.memory, PLENTY):
                for bound in (rough_bound, near_bound, coarse_bound, bound_within):
                    assert bound(subject, c, limit) <= made.seconds * (1 + 1e-9), (c, share, bound)
            if c.schedule is DEFAULT:  # of the others the ramp is bounded too, and by less
                looked += 1
                close += bound_within(subject, c, made.memory) >= 0.9 * made.seconds
    assert looked > 4 and close > 0.7 * looked


def limited(subject: PlanningCache, share: float, **sizes: int) -> tuple[Configuration, float]:
    """A configuration and the share of what it takes without a limit."""
    c = Configuration(**sizes, recompute=None)  # type: ignore[arg-type]
    free = evaluate_chain(subject, c, PLENTY)
    assert free is not None
    return c, share * free.memory


@pytest.mark.long
def test_layers_are_run_again_where_memory_asks_for_it() -> None:
    subject = subject_of(deep(12), 4)
    c, memory = limited(subject, 0.75, pp=4, micro_batches=8)
    found = evaluate_chain(subject, c, memory)
    assert found is not None and found.fits and found.memory <= memory
    assert 0 < len(found.again.layers) < 12  # some layers
    early, late = found.stages[0].items, found.stages[-1].items
    again = [sum(item - 1 in found.again.layers for item in range(*items)) for items in (early, late)]
    assert again[0] > again[1]  # the first stage keeps most micro-batches
    plan = plan_of(subject, found)
    assert sum(step.kind == "recompute" for step in plan.steps) == len(found.again.layers)
    # the program has the stages that were planned
    cut = partition_of(subject, found)
    for number, layer in enumerate(subject.layers):
        (stage,) = {s for name in layer.operations for s in cut.stage_of[name] if len(cut.stage_of[name]) == 1}
        assert found.stages[stage].items[0] <= number + 1 < found.stages[stage].items[1]
    materialise(apply_plan(subject.graph, subject.signatures, plan), subject.signatures)


def test_mixing_is_better_than_all_or_none() -> None:
    subject = subject_of(deep(12), 4)
    _, memory = limited(subject, 0.8, pp=4, micro_batches=8)

    def this(c: Configuration) -> bool:
        return c.pp == 4 and c.micro_batches == 8 and c.schedule is DEFAULT

    mixed = search(subject, 4, memory, this)
    plain = search(subject, 4, memory, lambda c: this(c) and c.recompute is not None)
    assert mixed.best is not None and plain.best is not None and mixed.gap < 0.1
    assert mixed.best.seconds < 0.9 * plain.best.seconds


def test_a_table_that_is_the_head_too_is_cut_where_memory_is_dear() -> None:
    subject = subject_of(deep(9, tokens=8192, tied=True), 4)
    c = Configuration(tp=4)
    free = evaluate_chain(subject, c, PLENTY)
    assert free is not None
    table = 8192 * 32 * 16  # bytes with its gradient and the optimizer's states
    assert free.stages[0].resting > table  # whole: to cut it would cost time
    tight = evaluate_chain(subject, c, 0.5 * free.memory)
    assert tight is not None and tight.fits and tight.stages[0].resting < table


def test_too_little_memory_is_told_with_what_would_do() -> None:
    graph = deep(12)
    limit = 1.03 * subject_of(graph, 4).least(1).resting / 4  # what rests can be spread so evenly, and no more fits
    with pytest.raises(NnscalerError, match=r"the least that was found is .*B a rank \(pp=4, .* recompute") as told:
        find_plan(
            graph,
            signatures(graph),
            load_cluster("h100x8").scaled(4),
            constraint=sizes(pp=4),
            memory=MemoryBudget(limit),
        )
    named = re.search(r"--memory (\S+) would do", told.value.help or "")
    assert named is not None
    enough = quantity(named[1], "bytes")
    made = find_plan(
        graph, signatures(graph), load_cluster("h100x8").scaled(4), constraint=sizes(pp=4), memory=MemoryBudget(enough)
    )
    assert made.best.memory <= enough < 1.5 * limit
