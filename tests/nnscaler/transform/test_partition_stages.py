"""Partition into pipeline stages, on small graphs built by hand."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nnscaler.errors import NnscalerError
from nnscaler.ir.graph import Graph, LogicalTensor
from nnscaler.transform.balanced_cuts_at_module_borders import balanced_cuts
from nnscaler.transform.partition_stages import StageRules, layers_of, partition_stages, repeated_operations
from nnscaler.transform.select_operations import describe_layers
from tests.nnscaler.transform.built import Builder


def chain(layers: int, *, per_layer: int = 2, path: Callable[[int], str] = "blocks.{}".format) -> tuple[Builder, Graph]:
    """embedding, `layers` layers of `per_layer` operations each, head, loss."""
    b = Builder()
    x = b.op("embed", [b.stored("ids", "input"), b.stored("wte", "parameter")], "wte")
    for i in range(layers):
        for j in range(per_layer):
            x = b.op(f"l{i}_{j}", [x], f"{path(i)}.part{j}")
    x = b.op("head", [x, "wte"], "head")
    return b, b.graph(b.op("loss", [x, b.stored("labels", "input")]))


def stage_sets(graph: Graph, stages: int, b: Builder) -> list[list[str]]:
    found = partition_stages(graph, stages, b.cost)
    return [[op.name for op in graph.operations if s in found.stage_of[op.name]] for s in range(stages)]


def test_cut_between_layers_with_ends_attached() -> None:
    b, graph = chain(4)
    found = partition_stages(graph, 4, b.cost)
    assert stage_sets(graph, 4, b)[0] == ["embed", "l0_0", "l0_1"]
    assert stage_sets(graph, 4, b)[3] == ["l3_0", "l3_1", "head", "loss"]
    assert found.layers == ("blocks.0", "blocks.1", "blocks.2", "blocks.3")
    assert sum(found.costs) == 11
    assert partition_stages(graph, 2, b.cost).layers == ("blocks.0 .. blocks.1", "blocks.2 .. blocks.3")
    assert partition_stages(graph, 1, b.cost).layers == ("blocks.0 .. blocks.3",)


def test_heavy_head_gets_fewer_layers_and_the_rest_is_even() -> None:
    b, graph = chain(6)
    b.costs["head"] = 4
    assert partition_stages(graph, 3, b.cost).costs == (5, 6, 7)
    b.costs["head"] = 12
    assert partition_stages(graph, 3, b.cost).costs == (5, 6, 15)


def test_within_layers_a_heavy_head_is_balanced() -> None:
    b, graph = chain(4, per_layer=4)
    b.costs["head"] = 4
    assert partition_stages(graph, 2, b.cost).costs == (9, 13)
    found = partition_stages(graph, 2, b.cost, within=True)
    assert found.costs == (11, 11) and found.notes == ()
    assert found.layers == ("blocks.0 .. blocks.2 (part)", "blocks.2 (part) .. blocks.3")
    b.costs["head"] = 0
    assert partition_stages(graph, 2, b.cost, within=True).costs == (9, 9)


def test_more_stages_than_layers_are_cut_finer() -> None:
    b, graph = chain(4)
    assert partition_stages(graph, 5, b.cost).layers[0] == "blocks.0"  # the border of a module
    found = partition_stages(graph, 6, b.cost, finer=True)
    assert max(found.costs) == 2 and found.notes == ()
    assert found.layers[-1] == "head .. loss"
    assert partition_stages(graph, 5, b.cost, finer=True).layers[0] == "blocks.0 (part)"
    assert partition_stages(graph, 4, b.cost, finer=True).layers == partition_stages(graph, 4, b.cost).layers
    for finer in (False, True):
        with pytest.raises(NnscalerError, match="is 11") as error:
            partition_stages(graph, 12, b.cost, finer=finer)
        assert error.value.code == "plan_illegal"


def test_a_model_without_numbered_parts_is_cut_anywhere() -> None:
    b, graph = chain(3, path="abc".__getitem__)
    assert layers_of(graph) == ()
    assert partition_stages(graph, 1, b.cost).layers == ("wte .. loss",)
    found = partition_stages(graph, 2, b.cost)
    assert found.layers == ("wte .. b", "c .. loss") and found.costs == (5, 4)  # {4, 5} would cut b
    assert found.notes == ("stages, each with its share of the cost: wte .. b (56%) | c .. loss (44%)",)


def test_nested_numbers_use_the_outermost_level_that_suffices() -> None:
    b, graph = chain(6, path=lambda i: f"encoder.stages.{i // 2}.blocks.{i % 2}")
    assert [layer.path for layer in layers_of(graph)] == [f"encoder.stages.{i}" for i in range(3)]
    assert len(layers_of(graph, 4)) == 6
    assert partition_stages(graph, 3, b.cost).layers[1] == "encoder.stages.1"
    assert "encoder.stages.0.blocks.1" in " ".join(partition_stages(graph, 6, b.cost).layers)


def test_sequential_mlp_is_not_made_of_layers() -> None:
    b = Builder()
    x = b.op("embed", [b.stored("x", "input"), b.stored("w", "parameter")])
    for i in range(2):
        for j in range(3):
            x = b.op(f"l{i}_{j}", [x], f"blocks.{i}.mlp.{j}")
    graph = b.graph(b.op("loss", [x]))
    assert len(layers_of(graph, 6)) == 2
    assert partition_stages(graph, 3, b.cost).layers == (
        "blocks.0 (part)",
        "blocks.0 (part) .. blocks.1 (part)",
        "blocks.1 (part)",
    )


def test_plain_sequential_counts_when_there_is_nothing_better() -> None:
    b = Builder()
    x = b.op("0", [b.stored("x", "input"), b.stored("w", "parameter")], "0")
    for i in range(1, 4):
        x = b.op(str(i), [x], str(i))
    graph = b.graph(b.op("loss", [x]))
    assert partition_stages(graph, 2, b.cost).layers == ("0 .. 1", "2 .. 3")


def test_masks_are_repeated_where_needed_and_parameters_are_not() -> None:
    b = Builder()
    x = b.op("embed", [b.stored("ids", "input"), b.stored("w", "parameter")])
    b.op("mask0", ["ids"], "blocks.0.attn")
    b.op("mask", ["mask0"], "blocks.0.attn")
    b.op("bias", [b.stored("rel", "parameter")], "blocks.0.attn")
    for i in range(3):
        x = b.op(f"l{i}", [x, *(["mask"] if i != 1 else []), "bias"], f"blocks.{i}.attn")
    b.op("count", [b.stored("labels", "input")])
    graph = b.graph(b.op("loss", [x, "count"]))
    found = partition_stages(graph, 3, b.cost).stage_of
    assert found["mask0"] == found["mask"] == (0, 2)
    assert found["bias"] == (0,)
    assert found["count"] == (2,)
    assert "mask0" not in repeated_operations(graph, random={"op"})


def test_encoder_decoder_in_order_with_the_encoder_output_crossing() -> None:
    b = Builder()
    x = b.op("embed", [b.stored("ids", "input"), b.stored("w", "parameter")], "shared")
    for i in range(2):
        x = b.op(f"e{i}", [x], f"encoder.block.{i}.layer.0")
    memory = b.op("norm", [x], "encoder.final_layer_norm")
    y = b.op("embed2", [b.stored("targets", "input"), "w"], "shared", elements=2)
    for i in range(2):
        y = b.op(f"d{i}", [y, memory], f"decoder.block.{i}.layer.0")
    graph = b.graph(b.op("loss", [y]))
    found = partition_stages(graph, 4, b.cost)
    assert found.layers == ("encoder.block.0", "encoder.block.1", "decoder.block.0", "decoder.block.1")
    assert found.stage_of["norm"] == (1,) and found.stage_of["embed2"] == (2,)
    assert describe_layers(layers_of(graph)) == "encoder.block.0 .. encoder.block.1, decoder.block.0 .. decoder.block.1"


def test_no_cut_between_an_updated_buffer_and_its_readers() -> None:
    b = Builder()
    x = b.op("l0", [b.stored("x", "input"), b.stored("w", "parameter"), b.stored("mean", "buffer")], "blocks.0.norm")
    x = b.op("l1", [x, "mean"], "blocks.1.norm")
    x = b.op("l2", [x], "blocks.2.norm")
    b.op("tick", [b.stored("ticks", "buffer")])
    graph = b.graph(b.op("loss", [x]), (("mean", "l1"), ("ticks", "tick")))
    assert "tick" not in repeated_operations(graph)
    assert stage_sets(graph, 2, b) == [["l0", "l1"], ["l2", "tick", "loss"]]
    assert stage_sets(graph, 4, b) == [["l0", "l1"], ["l2"], ["tick"], ["loss"]]
    with pytest.raises(NnscalerError, match="is 4"):
        partition_stages(graph, 5, b.cost)


def test_the_loss_is_on_the_last_stage() -> None:
    b, graph = chain(2)
    b.op("after", ["loss"], "blocks.7.part", cost=100)
    graph = b.graph("loss")
    assert partition_stages(graph, 2, b.cost, finer=True).stage_of["loss"] == (1,)


def test_stages_hold_what_is_put_on_them_and_what_stays_together() -> None:
    b, graph = chain(6)
    b.costs["embed"] = b.costs["head"] = b.costs["loss"] = 0

    def layers(at: dict[str, int], *joined: tuple[str, str]) -> list[int]:
        """How many layers each stage has."""
        found = partition_stages(graph, 3, b.cost, rules=StageRules(at=at, joined=joined))
        return [sum(found.stage_of[f"l{i}_1"] == (stage,) for i in range(6)) for stage in range(3)]

    assert layers({}) == [2, 2, 2]
    assert layers({"l3_0": -1}) in ([1, 2, 3], [2, 1, 3]) and layers({"l2_1": 0})[0] == 3
    assert layers({}, ("l0_0", "l3_1")) == [4, 1, 1]
    for at in ({"l5_0": 0}, {"l1_0": 3}):
        with pytest.raises(NnscalerError, match="no 3 pipeline stages have"):
            layers(at)


def test_ties_go_to_the_narrow_place() -> None:
    b, graph = chain(4, per_layer=1)
    wide = {"l0_0": 10, "l1_0": 10, "l2_0": 3}
    tensors = {n: LogicalTensor(n, (wide.get(n, 4),), "float32", t.role, t.needs_grad) for n, t in b.tensors.items()}
    b.costs.update(embed=0, head=0, loss=0, l1_0=4, l2_0=1, l3_0=3)  # 1 4 1 3: {1 4 | 1 3} and {1 4 1 | 3} differ
    assert partition_stages(graph, 2, b.cost).costs == (5, 4)
    b.costs.update(l1_0=4, l2_0=0, l3_0=5)  # 1 4 0 5: both cuts have maximum 5
    assert partition_stages(graph.replace(tensors=tensors), 2, b.cost).stage_of["l2_0"] == (0,)


@pytest.mark.long
@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=9),
    st.data(),
    st.integers(1, 5),
)
@settings(max_examples=150, deadline=None)
def test_balanced_cuts_equal_brute_force(costs: list[int], data: st.DataObject, segments: int) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(1, len(costs) - 1)))) if len(costs) > 1 else []
    groups = sorted(data.draw(st.lists(st.integers(0, 5), min_size=len(cuts), max_size=len(cuts))))
    crossing = data.draw(st.lists(st.integers(0, 3), min_size=len(cuts), max_size=len(cuts)))

    def value(chosen: Iterable[int]) -> tuple[float, float, float]:
        places = [0, *(cuts[i] for i in chosen), len(costs)]
        used = costs if any(costs) else [1] * len(costs)
        sums = [sum(used[a:b]) for a, b in pairwise(places)]
        return max(sums), sum(crossing[i] for i in chosen), sum(s * s for s in sums)

    legal = [
        chosen
        for chosen in combinations(range(len(cuts)), segments - 1)
        if len({groups[i] for i in chosen}) == segments - 1
    ]
    found = balanced_cuts(costs, cuts, groups, crossing, segments)
    if not legal:
        assert found is None
    else:
        assert found is not None
        assert value([cuts.index(c) for c in found]) == min(value(chosen) for chosen in legal)


@pytest.mark.long
@given(st.integers(1, 5), st.integers(1, 12), st.data())
@settings(max_examples=60, deadline=None)
def test_every_tensor_flows_to_the_same_or_a_later_stage(layers: int, stages: int, data: st.DataObject) -> None:
    b = Builder()
    names = [b.stored("x", "input"), b.stored("w", "parameter"), b.stored("c", "constant")]
    for i in range(layers):
        for j in range(data.draw(st.integers(1, 4))):
            inputs = data.draw(st.lists(st.sampled_from(names), min_size=0, max_size=3))
            names.append(b.op(f"o{i}_{j}", inputs, f"blocks.{i}.m", cost=data.draw(st.integers(0, 5))))
    graph = b.graph(b.op("loss", [*names[3:], "w"]))
    try:
        found = partition_stages(graph, stages, b.cost, finer=True)
    except NnscalerError as error:
        assert error.code == "plan_illegal"
        assert stages > 1
        return
    repeated = repeated_operations(graph)
    assert {s for op in graph.operations if op.name not in repeated for s in found.stage_of[op.name]} == set(
        range(stages)
    )
    for op in graph.operations:
        for name in op.inputs:
            producer = graph.producers.get(name)
            if producer is not None and producer.name in repeated:
                assert set(found.stage_of[producer.name]) >= set(found.stage_of[op.name])
            elif producer is not None:
                assert found.stage_of[producer.name][0] <= found.stage_of[op.name][0]


def test_fast_enough_for_many_layers() -> None:
    b, graph = chain(64, per_layer=23)
    start = time.process_time()
    partition_stages(graph, 8, b.cost)
    assert time.process_time() - start < 1  # 0.03 s on a quiet core
