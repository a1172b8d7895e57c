"""Plans applied: candidates, what follows from the batch, what is hoisted, and what illegal plans are told."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from nnscaler.errors import NnscalerError
from nnscaler.ir.graph import Graph
from nnscaler.ir.operation_placement import PartitionedGraph, RunInvariant, RunPartial, RunReplicated, Split
from nnscaler.layout import Sharded
from nnscaler.transform.apply import apply_plan, make_stages, reorder
from nnscaler.transform.complete_plan import batch_states, largest_micro_batches
from nnscaler.transform.plan import AssignStep, OrderStep, Plan, RecomputeStep, ReplicateStep, SplitStep, Step
from nnscaler.transform.propagate_choices import all_candidates, reach
from nnscaler.transform.select_operations import select

TP = (("tp", 2),)


def apply(model: Any, plan: Plan) -> PartitionedGraph:
    return apply_plan(model.graph, dict(model.signatures), plan)


def refused(model: Any, plan: Plan) -> NnscalerError:
    with pytest.raises(NnscalerError) as raised:
        apply(model, plan)
    return raised.value


def named(graph: Graph, module: str) -> str:
    """The operation of a module."""
    return next(op.name for op in graph.operations if op.module == module)


# -- candidates ---------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_heads_reach_the_packed_projection_as_a_strided_split(transformer: Any) -> None:
    found = all_candidates(transformer.graph, transformer.signatures, 2)
    assert Split("n", 3) in found[named(transformer.graph, "attn.packed")]
    assert Split("k") in found[named(transformer.graph, "attn.out")]


def test_the_batch_reaches_everything_but_parameters(transformer: Any) -> None:
    found = reach(transformer.graph, transformer.signatures, 2, {"x": Sharded(0)})
    assert all(found[op.name] for op in transformer.graph.operations if op.module)
    assert Split("n") not in found[named(transformer.graph, "up")]


def test_candidates_are_uneven_only_where_sizes_do_not_divide(transformer: Any) -> None:
    found = all_candidates(transformer.graph, transformer.signatures, 5)
    sizes = transformer.signatures[named(transformer.graph, "up")].bound.sizes
    for split in found[named(transformer.graph, "up")]:
        assert split == (Split("*1") if split.identifier == "*1" else Split(split.identifier, sizes=split.sizes))
        assert sum(split.sizes) in (0, sizes[split.identifier]) and len(split.sizes) in (0, 5)
    assert Split("*1") in found[named(transformer.graph, "up")]  # the sequence of 5


# -- following ----------------------------------------------------------------------------------------------------


def test_data_parallel_splits_every_operation_and_keeps_the_count_a_sum(transformer: Any) -> None:
    made = apply(transformer, Plan((("dp", 4),)))
    choices = {op.name: (op.operator, made.placements[op.name].choices[0][0]) for op in made.graph.operations}
    whole = {operator for operator, choice in choices.values() if not isinstance(choice, Split)}
    assert whole == {"aten.div.Tensor"}
    assert choices[named(transformer.graph, "up")][1] == Split("*0")


def test_micro_batches_lie_inside_of_data_parallel_parts(transformer: Any) -> None:
    made = apply(transformer, Plan((("dp", 2),), micro_batches=4))
    up = made.placements[named(transformer.graph, "up")].choices[0]
    assert up == (Split("*0"), Split("*0", 2))


def test_the_count_of_labels_is_hoisted_and_nothing_else(transformer: Any) -> None:
    made = apply(transformer, Plan((("dp", 2),), micro_batches=2))
    hoisted = [op.operator for op in made.graph.operations if made.placements[op.name].prepare]
    assert hoisted == ["aten.reshape.default", "nnscaler.ce_count"]
    counts = [op for op in made.graph.operations if op.operator == "nnscaler.ce_count"]
    assert len(counts) == 1  # the one of each micro-batch is gone
    assert made.placements[counts[0].name].choices[0][-1] == RunInvariant()
    assert apply(transformer, Plan((("dp", 2),))).graph == transformer.graph


def test_what_no_step_says_follows_from_the_inputs_of_an_operation(transformer: Any) -> None:
    made = apply(transformer, Plan(TP, (SplitStep(("up",), "tp", "n"),)))
    gelu = next(op.name for op in made.graph.operations if "gelu" in op.operator)
    down = named(made.graph, "down")
    assert made.placements[gelu].choices[0][0] == Split("*2")
    assert made.placements[down].choices[0][0] == Split("k")


def test_replicate_steps(transformer: Any) -> None:
    steps = (
        ReplicateStep(("up",), "tp"),
        ReplicateStep(("down",), "tp", deferred=True),
        ReplicateStep(("head",), "tp", partial=(0, 2)),
    )
    made = apply(transformer, Plan(TP, steps))
    choices = [made.placements[named(made.graph, m)].choices[0][0] for m in ("up", "down", "head")]
    assert choices == [RunInvariant(), RunReplicated(), RunPartial(frozenset({0, 2}))]


def test_later_steps_win(transformer: Any) -> None:
    steps = SplitStep(("*",), "tp", "n"), SplitStep(("up",), "tp", "k")
    made = apply(transformer, Plan(TP, (SplitStep(("up", "down"), "tp", "n"), steps[1])))
    assert made.placements[named(made.graph, "up")].choices[0][0] == Split("k")
    assert made.placements[named(made.graph, "down")].choices[0][0] == Split("n")


# -- stages -------------------------------------------------------------------------------------------------------


def test_devices_hold_consecutive_ranks() -> None:
    stages = make_stages(Plan((("pp", 2),), chunks=2, stage_axes=((("dp", 2),), (("tp", 3), ("dp", 1)))))
    assert [s.mesh.ranks for s in stages] == [(0, 1), (2, 3, 4), (0, 1), (2, 3, 4)]
    assert [s.names for s in stages][:2] == [("dp", "micro"), ("tp", "micro")]


def test_stages_are_where_the_plan_has_them() -> None:
    plan = Plan((("pp", 2), ("tp", 2)), stage_devices=((0,), (1,), (1,), (0,), (0,)))
    stages = make_stages(plan)
    assert [s.devices for s in stages] == [(0,), (1,), (1,), (0,), (0,)]
    assert [s.mesh.ranks for s in stages] == [(0, 1), (2, 3), (2, 3), (0, 1), (0, 1)]


def test_a_stage_on_several_devices_has_the_ranks_of_all() -> None:
    """Its devices lie one after another along tp: a rank keeps its place on the other axes."""
    for axes, ranks in (
        ((), (0, 1)),
        ((("tp", 2),), (0, 1, 2, 3)),
        ((("dp", 2),), (0, 2, 1, 3)),
        ((("dp", 2), ("tp", 2)), (0, 1, 4, 5, 2, 3, 6, 7)),
        ((("tp", 2), ("dp", 2)), (0, 1, 2, 3, 4, 5, 6, 7)),
    ):
        stage, first, _ = make_stages(Plan((("pp", 2), *axes), stage_devices=((0, 1), (0,), (1,))))
        assert (stage.devices, stage.mesh.ranks) == ((0, 1), ranks)
        for rank in first.mesh.ranks:
            here, there = first.mesh.coordinates(rank), stage.mesh.coordinates(rank)
            assert here.get("dp") == there.get("dp") and here.get("tp", 0) == there["tp"]


def test_a_step_may_name_an_axis_of_the_device_where_its_operations_are(transformer: Any) -> None:
    steps: tuple[Step, ...] = AssignStep(("up", "gelu", "down"), (2,)), SplitStep(("up",), "tp", "n")
    places = ((0,), (1,), (1,))
    plan = Plan((("pp", 2),), steps, stage_axes=((), (("tp", 2),)), stage_devices=places)
    up = apply(transformer, plan).placements[named(transformer.graph, "up")]
    assert up.stages == (2,) and up.choices[2][0] == Split("n")
    error = refused(transformer, replace(plan, stage_devices=((0,), (1,), (0,))))
    assert "which no stage of its operations has" in error.message


@pytest.mark.parametrize(
    ("places", "chunks", "message"),
    [
        (((0,), (2,)), 1, "stage_devices: stage 1 is on the devices [2]"),
        (((0,), (-1,)), 1, "stage_devices: stage 1 is on the devices [-1]"),
        (((0,), ()), 1, "stage_devices: stage 1 is on the devices []"),
        (((0,), (1, 1)), 1, "stage_devices: stage 1 is on the devices [1, 1]"),
        (((0,), (0,)), 1, "stage_devices: device 1 has no stage"),
        (((0,), (1,), (1,), (0,)), 2, "the plan has chunks 2, and stage_devices for 4 stages"),
    ],
)
def test_places_that_make_no_sense(transformer: Any, places: Any, chunks: int, message: str) -> None:
    error = refused(transformer, Plan((("pp", 2),), chunks=chunks, stage_devices=places))
    assert (error.code, error.message) == ("plan_illegal", message)
    assert error.help


def test_devices_that_share_a_stage_are_alike(transformer: Any) -> None:
    plan = Plan((("pp", 2),), stage_axes=((("dp", 2),), (("tp", 2),)), stage_devices=((0, 1), (1,)))
    error = refused(transformer, plan)
    assert error.message == "stage_devices: stage 0 is on devices with unlike axes: 0: dp=2, 1: tp=2" and error.help


def test_choices_are_those_of_the_operations_own_mesh(transformer: Any) -> None:
    steps: tuple[Step, ...] = AssignStep(("up", "gelu", "down"), (1,)), SplitStep(("up",), "tp", "n")
    plan = Plan((("pp", 2),), steps, 2, stage_axes=((("dp", 4),), (("tp", 3), ("dp", 2))))
    made = apply(transformer, plan)
    packed, up = (made.placements[named(made.graph, m)] for m in ("attn.packed", "up"))
    assert (packed.stages, up.stages) == ((0,), (1,))
    assert packed.choices[0] == (Split("*0"), Split("*0", 4))
    assert up.choices[1] == (Split("n"), Split("*0"), Split("*0", 4))


# -- order, recompute ---------------------------------------------------------------------------------------------


def test_order(transformer: Any) -> None:
    names = [op.name for op in transformer.graph.operations]
    labels = next(op.name for op in transformer.graph.operations if op.inputs == ("labels",))
    first = next(op.name for op in transformer.graph.operations if op.module == "attn.packed")
    assert names.index(labels) > names.index(first)
    changed = reorder(transformer.graph, [OrderStep((labels,), (first,))])
    after = [op.name for op in changed.operations]
    assert after.index(labels) < after.index(first)
    assert [n for n in after if n != labels] == [n for n in names if n != labels]
    made = {name for t in changed.tensors.values() if t.role != "activation" for name in (t.name,)}
    for op in changed.operations:
        assert made.issuperset(op.inputs)
        made.update(n for n in op.outputs if n)


def test_an_order_against_the_dependencies_is_illegal(transformer: Any) -> None:
    error = refused(transformer, Plan((), (OrderStep(("down",), ("up",)),)))
    assert "the order steps contradict the dependencies" in error.message


def test_each_recompute_step_is_a_group(transformer: Any) -> None:
    made = apply(transformer, Plan((), (RecomputeStep(("attn",)), RecomputeStep(("up", "down")))))
    groups = [made.placements[op.name].recompute for op in made.graph.operations]
    assert {g for g in groups if g} == {"recompute_0", "recompute_1"}
    assert sum(a != b for a, b in pairwise(groups)) > 2


# -- selection ----------------------------------------------------------------------------------------------------


def test_select_by_name_module_parameter_and_glob(transformer: Any) -> None:
    graph = transformer.graph
    packed = named(graph, "attn.packed")
    assert [op.name for op in select(graph, ["attn.packed.weight"])] == [packed]
    assert [op.name for op in select(graph, [packed])] == [packed]
    assert {op.module for op in select(graph, ["attn"])} == {"attn", "attn.packed", "attn.out"}
    assert {op.module for op in select(graph, ["*p*"])} >= {"up", "attn.packed"}


# -- illegal plans ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plan", "message", "help"),
    [
        (
            Plan(TP, (SplitStep(("norm",), "tp", "*2"),)),
            "split of layer_norm over tp=2",
            "identifiers that 2 parts may split",
        ),
        (Plan((("tp", 19),), (SplitStep(("up",), "tp", "n"),)), "18", "identifiers that 19 parts may split: none"),
        (Plan(TP, (SplitStep(("up",), "tp", "n", sizes=(9, 9)),)), "are equal", "*0, *1, k, n"),
        (Plan(TP, (SplitStep(("up",), "tp", "n", sizes=(10, 9)),)), "do not add up to 18", "*0, *1, k, n"),
        (Plan(TP, (SplitStep(("up",), "tp", "z"),)), "has no identifier 'z'", "*0, *1, k, n"),
        (
            Plan(TP, (SplitStep(("mlp*",), "tp", "n"),)),
            "pattern 'mlp*' matches no module and no operation",
            "modules of this model: ",
        ),
        (
            Plan(TP, (SplitStep(("up",), "tensor", "n"),)),
            "a split step names axis 'tensor'",
            "axes of this plan: ['tp']",
        ),
        (
            Plan((("dp", 9),)),
            "the batch of 8 (input x) has fewer rows than dp=9",
            "legal: dp in [1, 2, 3, 4, 5, 6, 7, 8]",
        ),
        (Plan((("dp", 2),), (), 3), "does not divide by micro-batches=3 after 2 data-parallel parts", "[1, 2, 4]"),
        (Plan((("pp", 2),), (AssignStep(("up",), (2,)),)), "stages [2] are assigned", "this plan has stages 0..1"),
        (
            Plan((("pp", 2),), (AssignStep(("up",), (1,)), AssignStep(("down",), (0,)))),
            "is assigned to stage 0, and its input",
            "the same or a later stage",
        ),
        (Plan(TP, (ReplicateStep(("gelu",), "tp", partial=(0,)),)), "not linear in operands [0]", "or replicate it"),
        (
            Plan((("pp", 2), ("dp", 2)), stage_axes=(TP, TP)),
            "the plan has stage_axes for 2 devices",
            "the mesh is pp=2 alone",
        ),
        (
            Plan((("pp", 2),), (SplitStep(("up",), "tp", "n"),), stage_axes=((("dp", 2),), TP)),
            "which no stage of its operations has",
            "[1]",
        ),
        (Plan((("micro", 2),)), "the plan has the axes ['micro']", "other than pp, micro"),
        (Plan((), (), 0), "0 micro-batches", "at least one"),
    ],
)
def test_illegal_plans_say_what_would_be_legal(transformer: Any, plan: Plan, message: str, help: str) -> None:
    error = refused(transformer, plan)
    assert error.code == "plan_illegal"
    assert message in str(error)
    assert help in (error.help or "")


def test_an_illegal_split_names_the_annotation_and_the_models_line(transformer: Any) -> None:
    error = refused(transformer, Plan(TP, (SplitStep(("up",), "tp", "z"),)))
    assert "(aten.linear.default is annotated `" in error.message
    assert error.where is not None and error.where.file.endswith("conftest.py")


def test_two_axes_on_one_digit_do_not_go_together(transformer: Any) -> None:
    steps = SplitStep(("up",), "a", "n"), SplitStep(("up",), "b", "n")
    error = refused(transformer, Plan((("a", 3), ("b", 2)), steps))
    assert "choices of" in error.message and "two axes overlap on dim" in error.message
    made = apply(transformer, Plan((("a", 3), ("b", 2)), (steps[0], SplitStep(("up",), "b", "n", 3))))
    assert made.placements[named(made.graph, "up")].choices[0][:2] == (Split("n"), Split("n", 3))


def test_the_batch_is_dim_0_of_the_first_input(transformer: Any) -> None:
    assert batch_states(transformer.graph, "dp", 2, 1) == {"x": Sharded(0), "labels": Sharded(0)}
    assert largest_micro_batches(transformer.graph, 6, 2) == 4
