"""Regions in pieces: which they are, how their operations are split, and why not."""
# ruff: noqa: E501 - a table of cases, one to a line

from __future__ import annotations

from dataclasses import replace

import pytest

from nnscaler.errors import NnscalerError
from nnscaler.ir.operation_placement import Chunk, PartitionedGraph, RunInvariant, Split
from nnscaler.layout import Invariant, Partial, Replicated, Sharded
from nnscaler.transform.apply import apply_plan
from nnscaler.transform.carry_plan_between_traces import carry
from nnscaler.transform.chunked_regions import regions_of
from nnscaler.transform.plan import ChunkStep, Plan, RecomputeStep, SplitStep
from tests.nnscaler.transform.conftest import Model
from tests.sampling import every
from tests.traced_examples import traced
from verify import verify_plan

MLP = ChunkStep(("up", "gelu", "down"), "co", "n", 2)
HEADS = ChunkStep(("attn",), "co", "scaled_dot_product_attention:b", 2)
LOSS = ChunkStep(("head", "flatten*", "cross_entropy_loss_*"), "tokens", "flatten:a", 2)


def applied(model: Model, *steps: object, mesh: tuple[tuple[str, int], ...] = (), **more: object) -> PartitionedGraph:
    return apply_plan(model.graph, dict(model.signatures), Plan(mesh, steps, **more))  # type: ignore[arg-type]


def over(graph: PartitionedGraph, axis: str) -> dict[str, object]:
    number = graph.stages[0].names.index(axis)
    return {name: placement.choices[0][number] for name, placement in graph.placements.items()}


def test_the_axis_of_pieces_comes_before_micro_batches(transformer: Model) -> None:
    (stage,) = applied(transformer, MLP, LOSS, mesh=(("dp", 2),), micro_batches=2).stages
    assert stage.names == ("dp", "co", "tokens", "micro") and stage.sizes == (2, 2, 2, 2)
    assert stage.first_in_time == 1


def test_what_follows_the_split_operation_is_split_too(transformer: Model) -> None:
    graph = applied(transformer, MLP)
    choices = over(graph, "co")
    hidden = [op for op in graph.graph.operations if graph.placements[op.name].chunk == Chunk("co_0", "co")]
    assert [op.operator.split(".")[1] for op in hidden] == ["linear", "gelu", "linear"]
    assert [choices[op.name].identifier for op in hidden] == ["n", hidden_dim(hidden[1], transformer), "k"]  # type: ignore[attr-defined]
    assert all(isinstance(c, RunInvariant) for name, c in choices.items() if name not in {op.name for op in hidden})


def hidden_dim(op: object, model: Model) -> str:
    bound = model.signatures[op.name].bound  # type: ignore[attr-defined]
    return [factor.identifier for factor in bound.outputs[0].dims[-1].factors][-1]


def test_heads_lead_back_to_the_packed_projection(transformer: Model) -> None:
    choices = over(applied(transformer, HEADS), "co")
    assert choices["linear"] == Split("n", 3)


def test_pieces_nest_inside_of_what_other_axes_cut(transformer: Model) -> None:
    wide = replace(MLP, parts=3)
    split = (SplitStep(("up",), "tp", "n"), SplitStep(("down",), "tp", "k"), SplitStep(("gelu",), "tp", "*2"))
    choices = over(applied(transformer, *split, wide, mesh=(("tp", 2),)), "co")
    assert choices["linear_2"] == Split("n", 2) and choices["linear_3"] == Split("k", 2)
    batch = ChunkStep(("up", "gelu", "down"), "co", "*0", 2)
    choices = over(applied(transformer, batch, mesh=(("dp", 2),), micro_batches=2), "co")
    assert choices["linear_2"] == Split("*0", 4)


def test_each_module_that_a_pattern_names_is_a_region() -> None:
    graph = traced("gpt").graph
    stages = {op.name: (0,) for op in graph.operations}
    plan = Plan((), (ChunkStep(("blocks.*.mlp",), "co", "n", 2), ChunkStep(("blocks.0", "blocks.1"), "two", "a", 2)))
    found = [
        (r.chunk.name, {op.module.split(".")[1] for op in r.operations}) for r in regions_of(graph, plan, stages)[1]
    ]
    assert found == [("two_0", {"0", "1"}), ("co_0", {"2"}), ("co_1", {"3"})]
    whole = Plan((), (ChunkStep(("blocks.*",), "co", "a", 2),))
    assert len(regions_of(graph, whole, stages)[1]) == 4
    cut = {**stages, **{op.name: (1,) for op in graph.operations if op.module.startswith("blocks.1.mlp")}}
    assert len(regions_of(graph, whole, cut)[1]) == 6  # what a stage has of a layer


@pytest.mark.long
def test_what_stands_between_is_moved_before_or_behind() -> None:
    graph = traced("llama_hf").graph
    stages = {op.name: (0,) for op in graph.operations}
    loss = ("lm_head", "view_12", "view_13", "cross_entropy_loss_*")
    moved, (region,) = regions_of(graph, Plan((), (ChunkStep(loss, "co", "view_12:b", 2),)), stages)
    names = [op.name for op in moved.operations]
    first = names.index("linear_28")
    assert names[first - 2 : first] == ["pad", "slice_17"]  # labels of the next tokens, which read nothing of it
    assert names[first : first + 8] == [op.name for op in region.operations]
    assert sorted(names) == sorted(op.name for op in graph.operations)
    invariant = {n: i for i, op in enumerate(moved.operations) for n in op.outputs}
    assert all(invariant.get(n, -1) < i for i, op in enumerate(moved.operations) for n in op.inputs)
    between = Plan((), (ChunkStep(("lm_head", "cross_entropy_loss_*"), "co", "n", 2),))
    kept, regions = regions_of(graph, between, stages)
    assert len(regions) == 2 and [op.name for op in kept.operations] == [op.name for op in graph.operations]


def test_a_region_computes_its_pieces_again_and_not_as_a_group_of_another_step(transformer: Model) -> None:
    graph = applied(transformer, RecomputeStep(("up", "norm")), MLP)
    by_module = {op.module: graph.placements[op.name] for op in graph.graph.operations}
    assert by_module["norm"].recompute == "recompute_0" and by_module["up"].recompute is None
    assert by_module["up"].chunk == Chunk("co_0", "co", True)


BAD = [
    (ChunkStep(("up",), "co", "q", 2), "has the identifier 'q'", "linear_2:*0|*1|k|n"),
    (ChunkStep(("up",), "co", "attn:n", 2), "no operation that 'attn' names", "linear_2:"),
    (ChunkStep(("nothing",), "co", "n", 2), "matches no module", "modules of this model"),
    (ChunkStep(("up",), "co", "n", 1), "in 1 pieces of co", "at least 2 pieces"),
    (ChunkStep(("up",), "co", "n", 40), "of linear_2 in 40 pieces of co: ", "that 40 pieces may split here: none"),
    (ChunkStep(("up",), "micro", "n", 2), "names its axis 'micro'", "such as co"),
    (ChunkStep(("norm", "up"), "co", "c", 2), "has the identifier 'c'", "layer_norm:a|b"),
    (ChunkStep(("attn",), "co", "linear:*1", 2), "needs it Replicated: that is known when all 2 pieces are done", "leave"),
    (replace(LOSS, operations=("head", "flatten*", "cross_entropy_loss*")), "needs values of all 2 pieces of tokens", "leave"),
    (replace(LOSS, identifier="n"), "needs values of all 2 pieces of tokens at once", "leave"),
]  # fmt: skip


@pytest.mark.parametrize(("step", "message", "help"), BAD)
def test_what_cannot_be_is_refused_with_what_can(transformer: Model, step: ChunkStep, message: str, help: str) -> None:
    with pytest.raises(NnscalerError) as raised:
        applied(transformer, step)
    assert raised.value.code == "plan_illegal"
    assert message in raised.value.message and help in (raised.value.help or "")


def test_axes_have_one_size_and_a_name_of_their_own(transformer: Model) -> None:
    with pytest.raises(NnscalerError, match="in 3 pieces of co, and in 2 in another step"):
        applied(transformer, HEADS, replace(MLP, parts=3))
    with pytest.raises(NnscalerError, match="names its axis 'tp'"):
        applied(transformer, replace(MLP, axis="tp"), mesh=(("tp", 2),))


def test_a_plan_is_carried_to_other_sizes(transformer: Model) -> None:
    plan = Plan((), (MLP, HEADS, LOSS))
    assert carry(plan, transformer.graph, transformer.graph) == plan


def test_states_of_a_region(transformer: Model) -> None:
    """What the docs say of the border, in the layouts of the program."""
    from nnscaler.communication.communicated_graph import Convert, Join
    from nnscaler.communication.insert_conversions import materialise

    known = dict(transformer.signatures)
    made = materialise(apply_plan(transformer.graph, known, Plan((), (MLP,))), known)
    (program,) = made.stages
    inside = [s for s in program.forward if isinstance(s, Convert) and s.chunk is not None]
    rows = [(type(s.source.layout[0]), type(s.target.layout[0])) for s in inside]
    assert rows == [(Replicated, Sharded)] * 3 + [(Replicated, Partial)]
    (end,) = (s for s in program.forward if isinstance(s, Join))
    assert [v.layout[0] for v in end.sources] == [Partial()] and [v.layout[0] for v in end.targets] == [Invariant()]
    assert all(isinstance(state, Invariant) for stored in program.stored for state in (*stored.at_rest, *stored.leaf))
    assert not made.volumes


@pytest.mark.long
@pytest.mark.parametrize(
    ("ranks", "plan"),
    every(
        2,
        [
            (1, Plan((), (replace(HEADS, recompute=False), MLP, LOSS))),
            (2, Plan((("dp", 2),), (HEADS, MLP, LOSS), micro_batches=2)),
            (1, Plan((), (ChunkStep(("norm", "up", "gelu", "down"), "co", "up:*1", 5),))),
        ],
    ),
)
def test_programs_with_pieces_equal_the_model(transformer: Model, ranks: int, plan: Plan) -> None:
    report = verify_plan(transformer.module, transformer.inputs, ranks=ranks, plan=plan, micro_batches=None)
    assert report.verdict.passes, [f.message for f in report.findings]
