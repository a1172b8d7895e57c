"""Plans as text."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nnscaler.errors import NnscalerError
from nnscaler.transform.plan import (
    AssignStep,
    ChunkStep,
    OrderStep,
    Plan,
    RecomputeStep,
    ReplicateStep,
    RestStep,
    SplitStep,
)

words = st.text(st.characters(codec="utf-8", exclude_categories=("Cs",)), min_size=1, max_size=8)
names = st.lists(words, min_size=1, max_size=3).map(tuple)
counts = st.integers(1, 9)
steps = st.one_of(
    st.builds(SplitStep, names, words, words, counts, st.lists(counts, max_size=3).map(tuple)),
    st.builds(ReplicateStep, names, words, st.booleans(), st.lists(st.integers(0, 3), max_size=2).map(tuple)),
    st.builds(AssignStep, names, st.lists(st.integers(0, 5), min_size=1, max_size=3).map(tuple)),
    st.builds(OrderStep, names, names),
    st.builds(RecomputeStep, names),
    st.builds(ChunkStep, names, words, words, counts, st.booleans()),
    st.builds(RestStep, names, words),
)
axes = st.dictionaries(words, counts, max_size=3).map(lambda sizes: tuple(sizes.items()))
plans = st.builds(
    Plan,
    mesh=axes,
    steps=st.lists(steps, max_size=4).map(tuple),
    micro_batches=counts,
    schedule=st.sampled_from(["1f1b", "gpipe", "interleaved"]),
    chunks=counts,
    data_axes=st.sampled_from([(), ("dp",), ("dp", "fsdp")]),
    notes=st.lists(words, max_size=2).map(tuple),
    stage_axes=st.lists(axes, max_size=2).map(tuple),
)


@given(plans)
def test_a_plan_reads_back(plan: Plan) -> None:
    assert Plan.from_json(plan.to_json()) == plan


def test_ranks_devices_and_stages() -> None:
    plan = Plan((("pp", 3), ("dp", 2), ("tp", 2)), chunks=2)
    assert (plan.ranks, plan.devices, plan.stages, plan.data_parts) == (12, 3, 6, 2)
    assert plan.device_axes == ((("dp", 2), ("tp", 2)),) * 3
    assert plan.describe() == "pp=3 dp=2 tp=2"
    assert Plan(()).describe() == "1 rank"


@pytest.mark.parametrize(("patterns", "told"), [(("*",), "dp=2 zero=3"), (("head",), "dp=2 some zero=3")])
def test_what_rests_in_shards_is_told(patterns: tuple[str, ...], told: str) -> None:
    assert Plan((("dp", 2),), (RestStep(patterns),)).describe() == told


def test_devices_may_differ() -> None:
    plan = Plan((("pp", 2),), stage_axes=((("dp", 2),), (("tp", 3), ("dp", 3))))
    assert (plan.ranks, plan.devices, plan.data_parts) == (11, 2, 6)
    assert plan.describe() == "pp=2 (dp=2 | tp=3 dp=3)"


def test_one_name_may_stand_for_a_list() -> None:
    text = json.dumps({"mesh": [["tp", 2]], "steps": [{"step": "recompute", "operations": "blocks.*"}]})
    assert Plan.from_json(text).steps == (RecomputeStep(("blocks.*",)),)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "p.json is not JSON"),
        ("[]", 'p.json has no "mesh"'),
        ('{"mesh": {"dp": 2}}', "are not mesh axes"),
        ('{"mesh": [["dp", 0]]}', "are not mesh axes"),
        ('{"mesh": [["dp", 2], ["dp", 2]]}', "are not mesh axes"),
        ('{"mesh": [], "stage_axes": [[["tp"]]]}', "are not mesh axes"),
        ('{"mesh": [], "stage_axes": 2}', "2 are not mesh axes"),
        ('{"mesh": [], "micro_batches": "two"}', 'micro_batches is "two", not a whole number'),
        ('{"mesh": [], "steps": {}}', "steps are {}, not a list of steps"),
        ('{"mesh": [], "steps": [{"step": "assign", "operations": ["a"], "stages": ["b"]}]}', "not a list of numbers"),
        ('{"mesh": [], "colour": 1}', r"unknown entries \['colour'\]"),
        ('{"mesh": [], "steps": [{"step": "divide"}]}', "step 0 is {'step': 'divide'}"),
        ('{"mesh": [], "steps": [{"step": "split", "operations": ["a"], "dim": 0}]}', r"step 0 \(split\): .*'dim'"),
        ('{"mesh": [], "micro_batches": "4"}', 'micro_batches is "4", not a whole number'),
        ('{"mesh": [], "schedule": 1}', "schedule is 1, not a text"),
        ('{"mesh": [], "steps": "split"}', "steps are 'split', not a list"),
        ('{"mesh": [], "steps": [{"step": "recompute", "operations": [3]}]}', "operations is .*, not a list of texts"),
        ('{"mesh": [], "steps": [{"step": "assign"}]}', r"step 0 \(assign\): .*'operations' and 'stages'"),
    ],
)
def test_what_is_no_plan_is_refused_with_its_place(text: str, message: str) -> None:
    with pytest.raises(NnscalerError, match=message) as raised:
        Plan.from_json(text, "p.json")
    assert raised.value.code == "plan_illegal"
