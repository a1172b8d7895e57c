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
    stage_devices=st.lists(st.lists(st.integers(0, 5), max_size=2).map(tuple), max_size=4).map(tuple),
    orders=st.lists(st.sampled_from(["F0.0 B0.0", "F1.0 I1.0 W1.0", ""]), max_size=2).map(tuple),
)


@pytest.mark.long
@given(plans)
def test_a_plan_reads_back(plan: Plan) -> None:
    assert Plan.from_json(plan.to_json()) == plan


def test_ranks_devices_and_stages() -> None:
    plan = Plan((("pp", 3), ("dp", 2), ("tp", 2)), chunks=2)
    assert (plan.ranks, plan.devices, plan.stages, plan.data_parts) == (12, 3, 6, 2)
    assert plan.device_axes == ((("dp", 2), ("tp", 2)),) * 3
    assert plan.describe() == "pp=3 dp=2 tp=2"
    assert Plan(()).describe() == "1 rank"


def test_places_and_orders_are_written_where_they_are_given() -> None:
    """A plan without them is the text that it was before there were any."""
    assert Plan((("pp", 2),)).to_json() == (
        '{\n "mesh": [["pp", 2]],\n "micro_batches": 1,\n "schedule": "1f1b",\n "chunks": 1,\n "data_axes": ["dp"],\n'
        ' "notes": [],\n "stage_axes": [],\n "steps": []\n}\n'
    )
    plan = Plan((("pp", 2),), stage_devices=((0,), (1,), (1,), (0,)), orders=("F0.0", "F1.0"))
    assert '"stage_devices": [[0], [1], [1], [0]],\n "orders": ["F0.0", "F1.0"],' in plan.to_json()
    assert (plan.stages, plan.places) == (4, ((0,), (1,), (1,), (0,)))
    assert Plan((("pp", 2),), chunks=2).places == ((0,), (1,), (0,), (1,))


@pytest.mark.parametrize("value", ['"0"', "[0, 1]", '[[0], ["1"]]', "[[0], [true]]", "[[[0]]]"])
def test_places_are_lists_of_numbers(value: str) -> None:
    with pytest.raises(NnscalerError, match=r"plan.json: stage_devices is .*, not a list of lists of numbers"):
        Plan.from_json(f'{{"mesh": [["pp", 2]], "stage_devices": {value}}}')


def test_the_devices_of_a_stage_lie_along_tp() -> None:
    places = ((0, 1), (0,), (1,))
    assert Plan((("pp", 2),), stage_devices=places).mesh_axes == ((("tp", 2),), (), ())
    plan = Plan((("pp", 2), ("dp", 3), ("tp", 2)), stage_devices=places)
    assert plan.mesh_axes == ((("dp", 3), ("tp", 4)), *((("dp", 3), ("tp", 2)),) * 2)
    assert plan.device_ranks == (tuple(range(6)), tuple(range(6, 12)))


def test_fewer_micro_batches_leave_out_passes() -> None:
    plan = Plan(
        (("pp", 2),), micro_batches=3, orders=("F0.0 F0.1 F0.2 B0.0 B0.1 B0.2", "F1.2 B1.2 F1.0 B1.0 F1.1 B1.1")
    )
    fewer = plan.with_micro_batches(2)
    assert (fewer.micro_batches, fewer.orders) == (2, ("F0.0 F0.1 B0.0 B0.1", "F1.0 B1.0 F1.1 B1.1"))
    with pytest.raises(NnscalerError, match="orders for 3 micro-batches, and 4 are asked for"):
        plan.with_micro_batches(4)
    assert Plan(()).with_micro_batches(4).micro_batches == 4


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
