"""Cuts within limits: the best of all partitions that keep to them."""

from __future__ import annotations

from itertools import combinations, pairwise
from random import Random

import pytest

from nnscaler.transform.balanced_cuts_at_module_borders import balanced_cuts, cut_limits


@pytest.mark.parametrize("seed", range(20))
def test_limits_leave_the_best_of_those_that_keep_to_them(seed: int) -> None:
    random = Random(seed)
    items, segments = random.randint(5, 9), random.randint(2, 4)
    costs = [float(random.randint(1, 9)) for _ in range(items)]
    at = [(random.randrange(items), random.randint(-segments, segments - 1)) for _ in range(random.randint(1, 2))]
    legal = []
    for cuts in combinations(range(1, items), segments - 1):
        of = [sum(cut <= item for cut in cuts) for item in range(items)]
        if all(of[item] == segment % segments for item, segment in at):
            legal.append(max(sum(costs[a:b]) for a, b in pairwise((0, *cuts, items))))
    limits = cut_limits(segments, items, at)
    assert limits is not None
    places = list(range(1, items))
    found = balanced_cuts(costs, places, places, [0] * len(places), segments, limits)
    if not legal:
        assert found is None
        return
    assert found is not None
    assert max(sum(costs[a:b]) for a, b in pairwise((0, *found, items))) == min(legal)
    of = [sum(cut <= item for cut in found) for item in range(items)]
    assert all(of[item] == segment % segments for item, segment in at)


def test_segments_that_there_are_not() -> None:
    assert cut_limits(2, 5, [(0, 2)]) is None and cut_limits(2, 5, [(0, -3)]) is None
    assert cut_limits(1, 5, [(3, -1)]) == ()
