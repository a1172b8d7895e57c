"""Which half of a backward runs what, on small graphs by hand and on random ones by their definition."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nnscaler.split_backward_graph import Halves, halves_of

Below = dict[str, tuple[str, ...]]


def halves(below: Below, received: Sequence[str] = ("x",), at_once: str = "") -> Halves[str]:
    return halves_of(below, received, lambda node: node in at_once.split())


def waiting(below: Below, received: Sequence[str] = ("x",), at_once: str = "") -> set[str]:
    found = halves(below, received, at_once)
    return {node for node in below if found.waits(node)}


LINEAR: Below = {"x": (), "w": (), "t": ("w",), "mm": ("x", "t")}


def test_a_parameter_waits() -> None:
    assert halves(LINEAR).trunk == {"x", "mm"}
    assert waiting(LINEAR) == {"w", "t"}


def test_where_nothing_is_received_all_waits() -> None:
    assert waiting(LINEAR, ()) == set(LINEAR)
    assert halves({}, ()).trunk == set()


def test_what_computes_all_at_once_is_not_started_twice() -> None:
    assert waiting(LINEAR, at_once="mm") == set()
    assert waiting({**LINEAR, "f": ("mm",)}, at_once="f") == {"w", "t"}  # it has gradients of one side only


def test_a_parameter_that_is_used_again_further_down_does_not_wait() -> None:
    again: Below = {**LINEAR, "v": (), "sin": ("mm",), "top": ("sin", "t", "v")}
    assert waiting(again) == {"v"}


def test_uses_side_by_side_wait_together() -> None:
    beside: Below = {**LINEAR, "y": (), "other": ("y", "t"), "cat": ("mm", "other")}
    found = halves(beside, ("x", "y"))
    assert found.waits("w") and found.groups["w"] == found.groups["t"]


def test_parameters_of_one_operator_are_one_group_but_for_one_that_cannot_wait() -> None:
    norm: Below = {"x": (), "g": (), "b": (), "norm": ("x", "g", "b"), "w": (), "linear": ("norm", "w")}
    found = halves(norm)
    assert found.groups["g"] == found.groups["b"] != found.groups["w"]
    shared = {**norm, "linear": ("norm", "w", "b")}
    assert waiting(shared) == {"g", "w"}


@st.composite
def graphs(draw: st.DrawFn) -> Below:
    below: Below = dict.fromkeys("xyuvw", ())
    for i in range(draw(st.integers(1, 9))):
        below[f"n{i}"] = tuple(sorted(draw(st.sets(st.sampled_from(sorted(below)), min_size=1, max_size=3))))
    return below


def reached(below: Mapping[str, Sequence[str]], node: str) -> set[str]:
    return {node}.union(*(reached(below, n) for n in below[node]))


@pytest.mark.long
@given(graphs())
def test_groups_by_their_definition(below: Below) -> None:
    found = halves(below, ("x", "y"))
    assert found.trunk == {n for n in below if reached(below, n) & {"x", "y"}}
    assert found.groups.keys() == below.keys() - found.trunk
    starts = {g: {n for n in found.trunk if any(found.groups.get(m) == g for m in below[n])} for g in found.early}
    for node, group in found.groups.items():
        assert all(found.groups[n] == group for n in below[node])
        if found.waits(node):
            own = {n for n in found.trunk if any(found.groups.get(m) == group for m in below[n])}
            for start in own:  # nothing below it along the trunk is another start of the group
                further = {n for m in below[start] if m in found.trunk for n in reached(below, m)}
                assert not further & own
    for group, own in starts.items():  # and a group is not left to I for nothing
        members = {n for n, g in found.groups.items() if g == group}
        doubled = [n for n in own for m in below[n] if m in found.trunk and reached(below, m) & own]
        assert doubled and members
