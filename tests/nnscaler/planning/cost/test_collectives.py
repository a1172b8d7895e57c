"""Times of collectives against numbers worked out by hand, and that more takes longer."""

from __future__ import annotations

from dataclasses import replace
from math import isclose

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nnscaler.planning.cluster.description import READY, Cluster, load_cluster
from nnscaler.planning.cost.analytic import AnalyticCost
from nnscaler.planning.cost.collectives import spanned
from nnscaler.planning.cost.model_protocol import KINDS, AxisPlace

GB = 1e9


def test_ring_inside_of_a_host(cluster: Cluster) -> None:
    cost = AnalyticCost(cluster)
    place = AxisPlace(8)
    # seven eighths of 1 GB at 100 GB/s are 8.75 ms, in seven steps of 1 us
    assert isclose(cost.collective("all_gather", GB, place), 8.75e-3 + 7e-6)
    assert isclose(cost.collective("reduce_scatter", GB, place), 8.75e-3 + 7e-6)
    assert isclose(cost.collective("all_reduce", GB, place), 17.5e-3 + 14e-6)
    # each rank holds 125 MB and keeps an eighth of it: 109.375 MB
    assert isclose(cost.collective("all_to_all", GB, place), 1.09375e-3 + 7e-6)
    assert isclose(cost.collective("send", GB, place), 10e-3 + 1e-6)


def test_hierarchical_two_hosts_of_eight(cluster: Cluster) -> None:
    cost = AnalyticCost(cluster)
    place = AxisPlace(16)
    inside, across = 8.75e-3 + 7e-6, 0.5 * 0.125 / 10 + 10e-6  # half of 125 MB at 10 GB/s
    assert isclose(cost.collective("all_gather", GB, place), inside + across)
    assert isclose(cost.collective("all_reduce", GB, place), 2 * (inside + across))
    # of 256 pieces of 1/256 GB, 7 of each rank's 16 go inside and 8 across
    pieces = 7 * (1e-6 + GB / 256 / 100e9) + 8 * (10e-6 + GB / 256 / 10e9)
    assert isclose(cost.collective("all_to_all", GB, place), pieces)
    assert isclose(cost.collective("send", GB, place), 0.1 + 10e-6)


def test_small_messages_take_the_tree(cluster: Cluster) -> None:
    # three levels of a tree, up and down, instead of fourteen steps of a ring
    assert isclose(AnalyticCost(cluster).collective("all_reduce", 8.0, AxisPlace(8)), 6e-6 + 2 * 8 / 100e9)


def test_a_launch_is_added_and_one_rank_is_free(cluster: Cluster) -> None:
    slow = replace(cluster, device=replace(cluster.device, launch=1e-3))
    place = AxisPlace(8)
    added = AnalyticCost(slow).collective("send", GB, place) - AnalyticCost(cluster).collective("send", GB, place)
    assert isclose(added, 1e-3)
    assert AnalyticCost(slow).collective("all_reduce", GB, AxisPlace(1, 8)) == 0


@pytest.mark.parametrize(
    ("place", "members"),
    [
        (AxisPlace(2), ((2, 0),)), (AxisPlace(8), ((8, 0),)), (AxisPlace(16), ((8, 0), (2, 1))),
        (AxisPlace(2, 8), ((2, 1),)), (AxisPlace(4, 4), ((2, 0), (2, 1))), (AxisPlace(2, 4), ((2, 0),)),
        (AxisPlace(12), ((4, 0), (3, 1))), (AxisPlace(2, 3), ((2, 1),)), (AxisPlace(1, 8), ()),
        (AxisPlace(64), ((8, 0), (8, 1))),
    ],
)  # fmt: skip
def test_levels_that_a_group_spans(cluster: Cluster, place: AxisPlace, members: tuple[tuple[int, int], ...]) -> None:
    found = spanned(cluster.spans, cluster.levels, place)
    assert found == tuple((count, cluster.levels[level]) for count, level in members)


@given(
    st.sampled_from(READY), st.sampled_from(KINDS), st.integers(0, 40), st.integers(0, 6), st.integers(1, 5),
    st.integers(1, 10**10),
)  # fmt: skip
def test_more_bytes_and_wider_groups_take_longer(
    name: str, kind: str, more: int, inner: int, width: int, size: int
) -> None:
    cost = AnalyticCost(load_cluster(name).scaled(4096))
    place, wider = AxisPlace(2**width, 2**inner), AxisPlace(2 ** (width + 1), 2**inner)
    took = cost.collective(kind, size, place)  # type: ignore[arg-type]
    assert 0 < took <= cost.collective(kind, size + more * size, place)  # type: ignore[arg-type]
    if kind != "all_to_all":  # of which a rank holds less on a wider axis
        assert took <= cost.collective(kind, size, wider) * (1 + 1e-12)  # type: ignore[arg-type]
    further = AxisPlace(2**width, 2 ** (inner + 1))
    assert took <= cost.collective(kind, size, further) * (1 + 1e-12)  # type: ignore[arg-type]
