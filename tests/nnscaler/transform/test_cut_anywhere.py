"""Stages of models without numbered layers: any place may be cut, borders of modules where that costs little."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from op_registry.source_location import SourceLocation

from nnscaler.errors import NnscalerError
from nnscaler.ir.graph import Graph, Operation
from nnscaler.transform.balanced_cuts_at_module_borders import (
    ENOUGH,
    blocks_of,
    describe_modules,
    open_modules,
    outermost,
    weight_of,
)
from nnscaler.transform.partition_stages import (
    PLACES,
    SLACK,
    StagePartition,
    layers_of,
    partition_stages,
    repeated_operations,
)
from tests.nnscaler.transform.built import Builder

PATHS = ("", "stem", "down", "down.conv", "down.norm", "up", "up.conv", "up.attention.q")


def stages_of(graph: Graph, found: StagePartition, stages: int) -> list[list[str]]:
    return [[op.name for op in graph.operations if s in found.stage_of[op.name]] for s in range(stages)]


def crossing(graph: Graph, anchored: Sequence[Operation], place: int) -> int:
    """The weighed bytes at a place, counted tensor by tensor."""
    before, after = ({op.name for op in part} for part in (anchored[:place], anchored[place:]))
    made = [name for op in anchored if op.name in before for name in op.outputs if name is not None]
    sent = [name for name in made if any(user.name in after for user, _ in graph.consumers[name])]
    first, second = anchored[place - 1].module.split("."), anchored[place].module.split(".")
    depth = 0
    for a, b in zip(first, second, strict=False):
        if a != b or not a:
            break
        depth += 1
    return round(sum(4 * graph.tensors[name].elements for name in sent) * weight_of(depth))


@pytest.mark.long
@given(st.integers(2, 8), st.integers(2, 4), st.data())
@settings(max_examples=150, deadline=None)
def test_stages_equal_brute_force(count: int, stages: int, data: st.DataObject) -> None:
    b = Builder()
    names = [b.stored("x", "input"), b.stored("w", "parameter"), b.stored("c", "constant")]
    for i in range(count):
        inputs = data.draw(st.lists(st.sampled_from(names), min_size=1, max_size=3))
        cost, elements = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 30))
        module = data.draw(st.sampled_from(PATHS))
        names.append(b.op(f"o{i}", inputs, module, cost=cost, elements=elements))
    graph = b.graph(b.op("loss", [names[-1], "w"]))
    assert layers_of(graph) == ()
    repeated = repeated_operations(graph)
    anchored = [op for op in graph.operations if op.name not in repeated]
    legal = list(combinations(range(1, len(anchored)), stages - 1))
    if not legal:
        with pytest.raises(NnscalerError, match=f"legal here is {len(anchored)}"):
            partition_stages(graph, stages, b.cost)
        return
    costs = [b.cost(op) for op in anchored]

    def sums(cuts: Sequence[int]) -> list[float]:
        return [sum(costs[start:end]) for start, end in pairwise([0, *cuts, len(costs)])]

    def value(cuts: Sequence[int]) -> tuple[float, float]:
        return sum(crossing(graph, anchored, cut) for cut in cuts), round(sum(s * s for s in sums(cuts)), 6)

    found = partition_stages(graph, stages, b.cost)
    # every anchored operation is on one stage, stages are contiguous, and none is empty
    on = [found.stage_of[op.name] for op in anchored]
    assert all(len(where) == 1 for where in on)
    assert [where[0] for where in on] == sorted(where[0] for where in on)
    assert {where[0] for where in on} == set(range(stages))
    # nothing flows back; what is repeated is wherever it is read
    for op in graph.operations:
        for name in op.inputs:
            producer = graph.producers.get(name)
            if producer is not None and producer.name in repeated:
                assert set(found.stage_of[producer.name]) >= set(found.stage_of[op.name])
            elif producer is not None:
                assert found.stage_of[producer.name][0] <= found.stage_of[op.name][0]
    least = min(max(sums(cuts)) for cuts in legal)
    near = [cuts for cuts in legal if max(sums(cuts)) <= least * (1 + SLACK) * (1 + 1e-9)]
    made = [i for i in range(1, len(anchored)) if on[i] != on[i - 1]]
    assert list(found.costs) == sums(made) and max(found.costs) <= least * (1 + SLACK) * (1 + 1e-9)
    assert value(made)[0] == min(value(cuts)[0] for cuts in near)


def block(b: Builder, x: str, name: str, *, elements: int = 8, cost: float = 10) -> str:
    """Three operations in a module whose input is added to its result."""
    h = b.op(f"{name}_in", [x, "w"], f"{name}.reduce", cost=cost, elements=elements)
    h = b.op(f"{name}_out", [h, "w"], f"{name}.expand", cost=cost, elements=elements)
    return b.op(f"{name}_add", [h, x], name, cost=1, elements=elements)


def residual(count: int, **costs: float) -> tuple[Builder, Graph]:
    b = Builder()
    x = b.op("stem", [b.stored("x", "input"), b.stored("w", "parameter")], "stem", elements=8)
    for i in range(count):
        x = block(b, x, "abcdefgh"[i])
    graph = b.graph(b.op("loss", [x]))
    b.costs.update(costs)
    return b, graph


def test_a_skip_connection_is_not_cut_where_that_costs_little() -> None:
    b, graph = residual(4)
    assert partition_stages(graph, 2, b.cost).layers == ("stem .. b", "c .. loss")
    assert partition_stages(graph, 4, b.cost).layers == ("stem .. a", "b", "c", "d .. loss")
    # three stages of four blocks: a block has to be cut
    found = partition_stages(graph, 3, b.cost)
    assert found.layers == ("stem .. b.reduce", "b.expand .. c", "d .. loss") and found.costs == (32, 32, 22)


def test_the_slack_is_no_more_than_it_says() -> None:
    b = Builder()
    x = b.op("p", [b.stored("x", "input"), b.stored("w", "parameter")], "p", cost=50, elements=40)
    x = b.op("q", [x], "q", cost=4, elements=1)
    graph = b.graph(b.op("loss", [x], cost=50))
    assert partition_stages(graph, 2, b.cost).costs in ((54, 50), (50, 54))
    assert stages_of(graph, partition_stages(graph, 2, b.cost), 2) == [["p", "q"], ["loss"]]  # 4 bytes, not 160
    b.costs.update(q=4, loss=44)  # {50, 48} or, with 4 bytes, {54, 44}: 8 % more
    assert stages_of(graph, partition_stages(graph, 2, b.cost), 2) == [["p"], ["q", "loss"]]
    b.costs.update(q=2, loss=46)  # {50, 48} or {52, 46}: 4 % more
    assert stages_of(graph, partition_stages(graph, 2, b.cost), 2) == [["p", "q"], ["loss"]]
    # chunks are cut for balance alone only where layers are cut: here there are none
    assert stages_of(graph, partition_stages(graph, 2, b.cost, finer=True), 2) == [["p", "q"], ["loss"]]


def test_narrow_places_win_over_borders_that_are_wide() -> None:
    b = Builder()
    x = b.op("p", [b.stored("x", "input"), b.stored("w", "parameter")], "net.p", cost=10, elements=40)
    x = b.op("q", [x], "net.p.low", cost=0, elements=4)
    x = b.op("r", [x], "net.p.high", cost=0, elements=40)
    graph = b.graph(b.op("loss", [x], "net.last", cost=10))
    assert stages_of(graph, partition_stages(graph, 2, b.cost), 2) == [["p", "q"], ["r", "loss"]]


def test_one_large_operation_is_told_with_its_line() -> None:
    b, graph = residual(3, b_in=400)
    where = SourceLocation("/somewhere/model.py", 17, "h = self.reduce(x)")
    lined = tuple(
        Operation(op.name, op.operator, op.inputs, (), (), op.outputs, where=where, module=op.module)
        for op in graph.operations
    )
    listed, uneven = partition_stages(graph.replace(operations=lined), 2, b.cost).notes
    assert listed.count("|") == 1
    assert uneven.startswith("stage 1 has 95% of the cost, where 50% would be even: b_in (model.py:17) alone has 88%")
    assert "/somewhere" not in uneven and "tp divides it" in uneven
    (only,) = partition_stages(residual(4)[1], 2, residual(4)[0].cost).notes
    assert "where" not in only


def test_too_many_stages_name_the_operations_and_the_line() -> None:
    b = Builder()
    where = SourceLocation("model.py", 3, "x = self.a(x)")
    x = b.op("a", [b.stored("x", "input"), b.stored("w", "parameter")], "a")
    x = b.op("relu", [x])
    graph = b.graph(b.op("loss", [x]))
    first = graph.operations[0]
    lined = Operation("a", "op", first.inputs, (), (), first.outputs, where=where, module="a")
    graph = graph.replace(operations=(lined, *graph.operations[1:]))
    assert len(partition_stages(graph, 3, b.cost).costs) == 3
    with pytest.raises(NnscalerError) as raised:
        partition_stages(graph, 4, b.cost)
    told = str(raised.value)
    assert "into 4 pipeline stages" in told and "3 of them: a, relu, loss" in told
    assert "legal here is 3" in told and raised.value.where is where


def test_stray_numbers_are_no_layers() -> None:
    """A `Sequential` that holds little of the parameters says nothing about where to cut."""

    def graph(elements: int) -> tuple[Builder, Graph]:
        b = Builder()
        small = b.stored("small", "parameter")
        x = b.op("t0", [b.stored("x", "input"), small], "time.0")
        x = b.op("t1", [x, small], "time.1")
        for name in "abcd":
            x = b.op(name, [x, b.stored(f"w{name}", "parameter")], name, cost=10)
        tensor = b.tensors["small"]
        b.tensors["small"] = type(tensor)("small", (elements,), "float32", "parameter", True, ("small",))
        return b, b.graph(b.op("loss", [x]))

    b, made = graph(4)
    assert layers_of(made) == () and partition_stages(made, 2, b.cost).layers == ("time .. b", "c .. loss")
    b, made = graph(16)  # half of all
    assert len(layers_of(made)) == 2 and partition_stages(made, 2, b.cost).layers == ("time.0", "time.1")


def test_of_very_many_places_the_narrow_ones_are_compared() -> None:
    for huge in (1, 10**9):  # alike, and one operation that is nearly all
        b = Builder()
        x = b.op("first", [b.stored("x", "input"), b.stored("w", "parameter")], cost=huge)
        for i in range(PLACES + 900):
            x = b.op(f"o{i}", [x], elements=3 if i % 7 else 1)
        graph = b.graph(b.op("loss", [x]))
        found = partition_stages(graph, 3, b.cost)
        whole = sum(found.costs)
        least = max(whole / 3, huge)
        assert max(found.costs) <= (1 + SLACK) * (least + 4 / PLACES * whole)
        ends = [[op for op in graph.operations if found.stage_of[op.name] == (stage,)][-1] for stage in (0, 1)]
        assert [graph.tensors[op.name].elements for op in ends] == [1, 1]


# -- blocks, between which the planner cuts


def test_blocks_follow_modules_down_to_small_shares() -> None:
    b, graph = residual(4, b_in=1000)
    parts = [block.operations for block in blocks_of(graph.operations, (), b.cost)]
    assert [name for part in parts for name in part] == [op.name for op in graph.operations]
    assert ("b_in",) in parts and ("c_in", "c_out", "c_add") in parts  # c has less than 1 / ENOUGH
    assert blocks_of((), (), b.cost) == ()


@pytest.mark.long
@given(st.lists(st.tuples(st.sampled_from(PATHS), st.integers(1, 50)), min_size=1, max_size=60), st.data())
@settings(max_examples=60, deadline=None)
def test_blocks_are_small_wherever_they_may_be(drawn: list[tuple[str, int]], data: st.DataObject) -> None:
    operations = tuple(Operation(f"o{i}", "op", (), (), (), (None,), module=path) for i, (path, _) in enumerate(drawn))
    costs = {op.name: float(cost) for op, (_, cost) in zip(operations, drawn, strict=True)}
    forbidden = data.draw(st.sets(st.integers(1, len(operations))))
    blocks = blocks_of(operations, forbidden, lambda op: costs[op.name])
    assert [name for block in blocks for name in block.operations] == [op.name for op in operations]
    depths, at = open_modules(operations), 0
    for block in blocks:
        assert block.weight == weight_of(depths[at]) and (at == 0 or at not in forbidden)
        inside = range(at + 1, at + len(block.operations))
        small = sum(costs[name] for name in block.operations) * ENOUGH <= sum(costs.values())
        assert small or all(place in forbidden for place in inside)
        at += len(block.operations)


def test_modules_are_described_by_the_largest_that_are_whole() -> None:
    paths = ("net.stem", "net.a.conv", "net.a.norm", "net.a", "net.b.conv", "net.b", "")
    operations = [Operation(f"o{i}", "op", (), (), (), (None,), module=path) for i, path in enumerate(paths)]
    assert open_modules(operations) == [0, 1, 2, 2, 1, 2, 0, 0]
    assert outermost(open_modules(operations), range(1, 7)) == (6,)
    assert outermost(open_modules(operations), range(1, 6)) == (1, 4)
    assert describe_modules(operations[:4], operations) == "net.stem .. net.a"
    assert describe_modules(operations[:6], operations) == "net"
    assert describe_modules(operations[1:3], operations) == "net.a.conv .. net.a.norm"
    assert describe_modules(operations[3:], operations) == "net.a (part) .. o6"
