"""The parts of the search by themselves: states, repetends, segments, units."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import inf

import pytest
from hypothesis import HealthCheck, assume, given, settings

from nnscaler.scheduling.search.exact_state_search import search_states
from nnscaler.scheduling.search.found_schedule import violations
from nnscaler.scheduling.search.job_shop_graph import Shop, Starts, makespan_of, sequences, shop_of
from nnscaler.scheduling.search.list_scheduling import settled
from nnscaler.scheduling.search.problem import (
    PassBlock,
    ScheduleProblem,
    equal_stages,
    looped,
    make_problem,
    pipeline_problem,
)
from nnscaler.scheduling.search.repetends import Repetend, longer_step, search_repetend
from nnscaler.scheduling.search.schedule_lower_bounds import bound_of, memory_needed
from nnscaler.scheduling.search.search_schedule import in_units
from tests.nnscaler.scheduling.search.problems import shortest, small_problems
from tests.nnscaler.scheduling.search.shapes import folded, with_shared

SLOW = [HealthCheck.too_slow]


def legal(shop: Shop, starts: Starts) -> bool:
    blocks = shop.problem.blocks
    orders = [[blocks[b].at(i) for b, i in order] for order in sequences(shop, starts)[: shop.problem.devices]]
    return not violations(shop.problem, starts, orders)


def fits(shop: Shop) -> bool:
    return all(memory_needed(shop, d)[1] <= shop.problem.limits[d] for d in range(shop.problem.devices))


@pytest.mark.long
@given(small_problems())
@settings(max_examples=40, deadline=None, suppress_health_check=SLOW)
def test_states_find_the_optimum_without_any_help(problem: ScheduleProblem) -> None:
    shop = shop_of(problem)
    found = search_states(shop, inf, 10_000)
    best = shortest(problem)
    assert found.complete
    if best == inf:
        assert found.starts is None
        return
    assert found.starts is not None
    assert legal(shop, found.starts)
    assert makespan_of(shop, found.starts) == found.bound == best
    # a better one is not there, and one that is as good as the known one is not asked for
    assert search_states(shop, best, 10_000).starts is None


@given(small_problems())
@settings(max_examples=25, deadline=None, suppress_health_check=SLOW)
def test_states_that_stop_early_still_prove_their_bound(problem: ScheduleProblem) -> None:
    for limit in (0, 1, 4):
        found = search_states(shop_of(problem), inf, limit)
        assert found.complete or found.bound <= shortest(problem)


def repetends(shop: Shop, period: int, laps: int) -> bool:
    """Return whether a repetend of this period exists, by trying all: each as a step of many micro-batches."""
    count = len(shop.order)
    long = shop_of(make_problem(shop.problem.blocks, shop.problem.dependencies, 2 * laps + 3, shop.problem.limits))
    for offsets in product(range(period), repeat=count - 1):
        for turns in product(range(laps + 1), repeat=count):
            starts = Repetend(period, (0, *offsets), turns).expand(long.problem.micro_batches)
            if all(b.duration <= period for b in shop.problem.blocks) and legal(long, starts):
                return True
    return False


@pytest.mark.parametrize("limit", [1.0, 2.0, inf])
@pytest.mark.parametrize("durations", [(1, 1, 1), (2, 1, 1), (1, 1, 2)])
def test_refuted_periods_have_no_repetend(limit: float, durations: tuple[int, int, int]) -> None:
    first, second, third = durations
    blocks = [
        PassBlock("F", 0, (0,), first, 1.0, 0.0),
        PassBlock("F", 1, (1,), second),
        PassBlock("B", 0, (0,), third, 0.0, 1.0),
    ]
    shop = shop_of(make_problem(blocks, [(0, 1), (1, 2)], 4, [limit, inf]))
    found = search_repetend(shop, bound_of(shop), 9, 100)
    assert found.repetend is not None
    assert found.refuted == found.repetend.period - 1
    assert repetends(shop, found.repetend.period, 2)
    assert found.refuted == 0 or not repetends(shop, found.refuted, 2)


@given(small_problems())
@settings(max_examples=25, deadline=None, suppress_health_check=SLOW)
def test_repetends_are_legal_for_any_number_of_micro_batches(problem: ScheduleProblem) -> None:
    shop = shop_of(problem)
    assume(fits(shop))
    most = int(sum(b.duration for b in problem.blocks) + sum(e.lag for e in problem.dependencies)) + 2
    found = search_repetend(shop, bound_of(shop), most, 500)
    assert found.repetend is not None
    assert bound_of(shop).period <= found.repetend.period + 1e-9
    for count in (1, 2, 5):
        longer = shop_of(make_problem(problem.blocks, problem.dependencies, count, problem.limits))
        assert legal(longer, settled(longer, found.repetend.expand(count)))


def test_warm_up_and_cool_down_of_a_repetend_keep_its_memory() -> None:
    shop = shop_of(pipeline_problem(equal_stages(folded(4)), 9, 5.0, split=True))
    found = search_repetend(shop, bound_of(shop), 12, 2_000)
    assert found.repetend is not None
    assert found.repetend.period == 6
    assert legal(shop, found.repetend.expand(9))


def test_a_segment_of_a_short_step_is_repeated_in_a_long_one() -> None:
    short = shop_of(pipeline_problem(with_shared(3, (0,)), 6, 2.0))
    found = search_states(short, inf, 50_000)
    assert found.starts is not None
    for count in (8, 14, 30):
        shop = shop_of(replace(short.problem, micro_batches=count))
        longer = longer_step(shop, found.starts, 60)
        assert longer is not None
        assert legal(shop, longer[0])
        assert (count - 6) % longer[1] == 0
        # a short step shows how long each further micro-batch takes
        assert makespan_of(shop, longer[0]) <= found.bound + (count - 6) * found.bound / 6


def test_units_are_exact_where_they_can_be() -> None:
    shop = shop_of(pipeline_problem(equal_stages(looped(2), (0.3, 0.6, 0.3)), 4, lag=0.15))
    found = in_units(shop, 50)
    assert found.exact
    assert found.unit == pytest.approx(0.15)
    assert [b.duration for b in found.shop.problem.blocks] == [2, 4, 2, 4]
    assert {e.lag for e in found.shop.problem.dependencies} == {0, 1}
    uneven = in_units(shop_of(pipeline_problem(equal_stages(looped(2), (1.0, 2.0001, 1.0)), 4)), 30)
    assert not uneven.exact
    assert [b.duration for b in uneven.shop.problem.blocks] == [9, 20, 9, 20]
