"""Constraints hold, compose, are policies of their own, and say which one cannot hold."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

import verify
from nnscaler.errors import NnscalerError
from nnscaler.ir.derive_operand_layouts import input_states
from nnscaler.ir.graph import Graph, Operation
from nnscaler.ir.operation_annotations import signatures
from nnscaler.ir.operation_placement import Choice, Split
from nnscaler.layout import Axis, Sharded, State
from nnscaler.planning.cluster.description import load_cluster
from nnscaler.planning.constraints import (
    Constraint,
    all_of,
    forbid,
    interlaced,
    megatron,
    on_device,
    over_all_devices,
    read_constraints,
    replicate,
    require,
    sequence_parallel,
    sizes,
    together,
)
from nnscaler.planning.constraints.megatron import roles_of
from nnscaler.planning.plan_from_axes import make_plan, steps_of
from nnscaler.planning.planner.branch_and_bound import CLOSE
from nnscaler.planning.planner.build_certified_plan import choices_of
from nnscaler.planning.planner.find_plan import Found, find_plan
from nnscaler.transform.apply import apply_plan
from nnscaler.transform.complete_plan import choose
from nnscaler.transform.plan import AssignStep, OrderStep, Plan, RestStep
from tests.nnscaler.planning.plan_as_constraints import constraints_of
from tests.nnscaler.planning.planner.planned import graph_of, subject_of
from tests.random_plans import Mesh, random_plan
from tests.sampling import every
from tests.traced_examples import loaded


def found(graph: Graph, ranks: int, *kept: Constraint) -> Found:
    return find_plan(graph, signatures(graph), load_cluster("h100x8").scaled(ranks), constraint=all_of(kept))


def choices_on_tp(graph: Graph, plan: Plan) -> dict[str, Choice]:
    made, axes = choose(graph, signatures(graph), plan, plan.device_axes[0], frozenset(graph.by_name))
    at = [name for name, _ in axes].index("tp")
    return {name: choices[at] for name, choices in made.items()}


def weights(graph: Graph, choices: dict[str, Choice], operator: str = "aten.linear.default") -> dict[str, State]:
    """How the weights of these operations lie on tp."""
    known = signatures(graph)
    result = {}
    for op in graph.operations:
        if op.operator == operator:
            slot = next(i for i, name in enumerate(op.inputs) if graph.tensors[name].role == "parameter")
            result[graph.tensors[op.inputs[slot]].fqns[-1]] = input_states(known[op.name], choices[op.name])[slot]
    return result


def named(graph: Graph, ending: str) -> set[str]:
    """The operations that read a parameter whose name ends so."""
    parameters = graph.with_role("parameter")
    return {op.name for t in parameters if any(f.endswith(ending) for f in t.fqns) for op, _ in graph.consumers[t.name]}


@pytest.mark.long
def test_megatron_cuts_what_the_policy_cuts() -> None:
    graph = graph_of("gpt")
    told = found(graph, 4, megatron(graph, signatures(graph)), sizes(dp=2, tp=2))
    policy = make_plan(graph, signatures(graph), {"dp": 2, "tp": 2})
    cut = weights(graph, choices_of(told.subject, told.best))
    assert cut == weights(graph, choices_on_tp(graph, policy))
    assert cut["blocks.2.attn.qkv.weight"] == Sharded(0, 3) and cut["blocks.2.attn.proj.weight"] == Sharded(1)
    assert cut["blocks.2.mlp.up.weight"] == Sharded(0) and cut["blocks.2.mlp.down.weight"] == Sharded(1)
    assert cut["head.weight"] == Sharded(0)


@pytest.mark.long
def test_megatron_cuts_llama_in_pairs() -> None:
    """As the policy does, but where that one has a residual stream that is split too: it reads o_proj by its rows."""
    graph = graph_of("llama_hf")
    told = found(graph, 4, megatron(graph, signatures(graph)), sizes(dp=2, tp=2))
    cut = weights(graph, choices_of(told.subject, told.best))
    policy = weights(graph, choices_on_tp(graph, make_plan(graph, signatures(graph), {"dp": 2, "tp": 2})))
    assert len(cut) == 29
    for name, state in cut.items():
        last = name.split(".")[-2]
        assert state == (Sharded(1) if last in ("o_proj", "down_proj") else Sharded(0)), name
        assert state == policy[name] or last == "o_proj"


ROLES = {  # endings of parameters that are cut, and of those that are whole
    "gpt": (("wte.weight", "attn.qkv.weight", "mlp.down.weight"), ("wpe.weight", "ln_1.weight")),
    "llama_hf": (
        ("embed_tokens.weight", "k_proj.weight", "o_proj.weight", "lm_head.weight"),
        ("input_layernorm.weight",),
    ),
    "moe": (("experts.up", "experts.down", "head.weight"), ("router.weight", "norm_2.weight")),
    "t5_hf": (("EncDecAttention.k.weight", "DenseReluDense.wo.weight"), ("relative_attention_bias.weight",)),
    "swin_hf": (
        ("attention.q_proj.weight", "mlp.fc2.weight"),
        ("patch_embeddings.projection.weight", "downsample.reduction.weight", "classifier.weight"),
    ),
    "evoformer": (("row.bias.weight",), ("distance_head.weight", "outgoing.out.weight")),
    "mamba": (("in_proj.weight", "out_proj.weight"), ("A_log",)),
}
DEFAULT = ("gpt", "moe")


@pytest.mark.parametrize("name", [n if n in DEFAULT else pytest.param(n, marks=pytest.mark.long) for n in ROLES])
def test_roles_follow_from_annotations(name: str) -> None:
    graph = graph_of(name)
    roles = roles_of(graph, signatures(graph))
    assert not roles.whole & set(roles.cut) and roles.columns <= set(roles.cut)
    assert all("norm" not in graph.by_name[op].operator for op in roles.cut)
    cut, whole = ROLES[name]
    for ending in cut:
        assert named(graph, ending) and named(graph, ending) <= set(roles.cut), ending
    for ending in whole:
        assert named(graph, ending) and named(graph, ending) <= roles.whole, ending


def test_sequence_parallel_splits_what_megatron_keeps_whole() -> None:
    graph = graph_of("gpt")
    known = signatures(graph)
    plans = [
        found(graph, 4, kind(graph, known), sizes(tp=4, micro_batches=1)) for kind in (megatron, sequence_parallel)
    ]
    whole, along = (choices_of(p.subject, p.best) for p in plans)
    assert weights(graph, whole) == weights(graph, along)
    norms = [op for op in graph.operations if op.operator in ("aten.layer_norm.default", "aten.add.Tensor")]
    assert len(norms) == 18
    for op in norms:
        assert not isinstance(whole[op.name], Split)
        assert along[op.name] == Split("b")  # [batch a, sequence b, hidden]
    assert plans[1].best.stages[0].kept < plans[0].best.stages[0].kept


@pytest.mark.long
@pytest.mark.parametrize("kind", [megatron, sequence_parallel])
@pytest.mark.parametrize("name", ["gpt", "llama_hf"])
def test_policies_are_verified(name: str, kind: object) -> None:
    graph = graph_of(name)
    told = found(graph, 4, kind(graph, signatures(graph)), sizes(dp=2, tp=2))  # type: ignore[operator]
    model = loaded(name)
    report = verify.verify_plan(model.build, model.inputs, ranks=4, plan=told.plan, micro_batches=None)
    assert report.verdict.passes


def test_over_all_devices() -> None:
    graph = graph_of("gpt")
    known = signatures(graph)
    told = found(graph, 4, over_all_devices(graph, known, ["wte", "head"]))
    assert told.best.configuration.tp == 4
    (vocabulary,) = named(graph, "head.weight") - named(graph, "wte.weight") or {"linear_16"}
    for name in ("embedding", vocabulary):
        choice = choices_of(told.subject, told.best)[name]
        assert isinstance(choice, Split) and choice.identifier in ("v", "d", "n", "k")
    with pytest.raises(NnscalerError, match="no parameter that is read there can be split"):
        over_all_devices(graph, known, ["gelu"])
    with pytest.raises(NnscalerError, match="'wte over all devices', 'pp=2' together permit none"):
        found(graph, 4, over_all_devices(graph, known, ["wte"]), sizes(pp=2))


def test_interlaced_holds_a_part_of_the_table_on_each_rank() -> None:
    graph = graph_of("gpt")
    known = signatures(graph)
    kept = interlaced(graph, known, ["wte", "head"])
    for wanted in ({"pp": 4}, {"tp": 2, "pp": 2, "zero": 3, "dp": 2}):
        ranks = 8 if "dp" in wanted else 4
        told = found(graph, ranks, kept, sizes(**wanted))
        assert told.plan.schedule == "interlaced" and told.plan.stage_devices[0] == tuple(range(wanted["pp"]))
        assert 0 < told.certificate.bound <= told.certificate.seconds
        partitioned = apply_plan(graph, dict(known), told.plan)
        first, last = (partitioned.placements[name] for name in ("embedding", "linear_16"))
        assert (first.stages, last.stages) == ((0,), (wanted["pp"] + 1,))
        assert partitioned.stages[0].mesh.axes[-1] == Axis("tp", 4)
        splits = [first.choices[0][-2], last.choices[-1][-2]]
        assert all(isinstance(choice, Split) for choice in splits)
    assert told.subject.tables(2, 4).columns[0].resting.max() == 0.0  # the table is no part of the layers' problem
    for operations, message in (
        (["gelu"], "gelu over all pipeline devices: no parameter that is read there can be split"),
        (["blocks.1.mlp"], "blocks.1.mlp over all pipeline devices: linear_6 lies in a layer"),
    ):
        with pytest.raises(NnscalerError) as error:
            interlaced(graph, known, operations)
        assert message in error.value.message and error.value.help
    with pytest.raises(NnscalerError, match="are both of a pipeline"):
        all_of((kept, interlaced(graph, known)))
    with pytest.raises(NnscalerError, match="'wte, head interlaced', 'pp=1' together permit none"):
        found(graph, 4, kept, sizes(pp=1))


@pytest.mark.long
def test_together_means_one_choice_and_one_device() -> None:
    graph = graph_of("gpt")
    tp = sizes(tp=2, micro_batches=1)
    column = require(graph, ["linear_2"], "n")
    free = found(graph, 2, tp, column)
    assert choices_of(free.subject, free.best)["linear_3"] != Split("n")
    told = found(graph, 2, tp, column, together(graph, ["linear_2", "linear_3"]))
    assert choices_of(told.subject, told.best)["linear_3"] == Split("n")
    both = found(graph, 2, tp, require(graph, ["linear_2", "linear_3"], "n"))
    assert free.best.seconds < told.best.seconds == both.best.seconds
    assert told.certificate.gap < CLOSE
    every = found(graph, 2, tp, column, together(graph, ["blocks.*.mlp.up", "blocks.*.mlp.down"]))  # over layers
    assert {choices_of(every.subject, every.best)[f"linear_{i}"] for i in (2, 3, 6, 7, 10, 11, 14, 15)} == {Split("n")}
    halves = sizes(pp=2, micro_batches=2)
    group = together(graph, ["blocks.0", "blocks.2.ln_1"])
    plans = [found(graph, 2, halves, *kept).plan for kept in ((), (group,))]
    ends = {op.name for op in graph.operations if op.module.startswith("blocks.0") or op.module == "blocks.2.ln_1"}
    stages = [[set(step.operations) for step in plan.steps if isinstance(step, AssignStep)] for plan in plans]
    assert [any(ends <= stage for stage in made) for made in stages] == [False, True]
    with pytest.raises(NnscalerError, match="no pipeline stages keep to"):
        found(graph, 2, halves, together(graph, ["*"]))
    with pytest.raises(NnscalerError, match="these are 1 operations with a gradient"):
        together(graph, ["linear_2"])


def test_constraints_that_exclude_each_other_are_an_error() -> None:
    graph = graph_of("gpt")
    apart = all_of([require(graph, ["linear_2"], "n"), require(graph, ["linear_3"], "k")])
    with pytest.raises(NnscalerError, match=r"no choices of all operations that keep to .* go together"):
        found(graph, 2, sizes(tp=2), apart, together(graph, ["linear_2", "linear_3"]))


def test_operations_run_on_the_device_they_are_put_on() -> None:
    graph = graph_of("gpt")
    kept = (sizes(dp=1, tp=1, micro_batches=4), on_device(graph, ["blocks.2"], -1))
    assert found(graph, 2, *kept).best.stages[-1].items[0] <= 3
    first = "embedding"
    with pytest.raises(NnscalerError, match=rf"no pipeline stages keep to .*, '{first} on device -1'"):
        found(graph, 4, *kept, on_device(graph, [first], -1))
    with pytest.raises(NnscalerError, match=r"'blocks\.2 on device 4' permits none"):
        found(graph, 4, on_device(graph, ["blocks.2"], 4))
    with pytest.raises(NnscalerError, match="runs where it is read"):
        on_device(graph, ["arange"], 0)


@pytest.mark.long
def test_operations_are_named_by_module_and_by_operator() -> None:
    graph = graph_of("gpt")
    linears = {op.name for op in graph.operations if op.operator == "aten.linear.default"}
    tp = sizes(tp=2, micro_batches=1)
    told = found(graph, 2, tp, forbid(graph, ["aten.linear.default"], "n"))
    assert Split("n") not in {choices_of(told.subject, told.best)[name] for name in linears}
    told = found(graph, 2, tp, replicate(graph, ["blocks.*.mlp"]))
    inside = {op.name for op in graph.operations if ".mlp" in op.module}
    assert inside and not any(isinstance(choices_of(told.subject, told.best)[name], Split) for name in inside)
    told = found(graph, 2, tp, require(graph, ["aten.linear.d*"], "k"))
    assert {choices_of(told.subject, told.best)[name] for name in linears} == {Split("k")}


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "given"),
    every(
        2,
        [
            ("gpt", {"dp": 2, "tp": 2}),
            ("gpt", {"tp": 2, "pp": 2}),
            ("moe", {"dp": 2, "pp": 2}),
            ("moe", {"tp": 4}),
            pytest.param("llama_hf", {"tp": 4}, marks=pytest.mark.long),
            pytest.param("t5_hf", {"dp": 2, "tp": 2}, marks=pytest.mark.long),
        ],
    ),
)
def test_all_constraints_of_a_policy_give_its_plan(name: str, given: dict[str, int]) -> None:
    """Also where it splits what needs no gradient, which the planner does not search by itself."""
    graph = graph_of(name)
    plan = make_plan(graph, signatures(graph), given)
    told = found(graph, 4, constraints_of(plan, graph, signatures(graph)))
    assert told.plan == plan
    free = found(graph, 4, sizes(micro_batches=plan.micro_batches))
    assert free.best.seconds <= told.best.seconds * (1 + CLOSE)


@pytest.mark.parametrize("seed", range(2))
def test_all_constraints_of_any_choices_give_them(seed: int) -> None:
    """Of a plan that nobody would make."""
    graph = graph_of("gpt")
    drawn = random_plan(graph, signatures(graph), Mesh((("tp", 4),)), seed)
    whole = tuple(step for step in drawn.steps if not isinstance(step, RestStep))  # shards over tp are not searched
    drawn = replace(drawn, steps=whole, data_axes=("dp",))
    told = found(graph, 4, constraints_of(drawn, graph, signatures(graph)))
    wanted = choices_on_tp(graph, drawn)
    assert choices_of(told.subject, told.best) == wanted
    assert told.plan == Plan((("tp", 4),), steps_of(graph, "tp", wanted))
    free = found(graph, 4, sizes(tp=4, micro_batches=1, recompute=False))
    assert free.best.seconds < told.best.seconds


@pytest.mark.long
def test_other_stages_than_the_most_even_ones_are_kept() -> None:
    graph = graph_of("gpt")
    plan = found(graph, 2, sizes(pp=2, micro_batches=2, recompute=False)).plan
    even = [set(step.operations) for step in plan.steps if isinstance(step, AssignStep)]
    moved = on_device(graph, ["blocks.1"], 1)
    told = found(graph, 2, sizes(pp=2, micro_batches=2, recompute=False), moved)
    uneven = [set(step.operations) for step in told.plan.steps if isinstance(step, AssignStep)]
    layer = {op.name for op in graph.operations if op.module.startswith("blocks.1")}
    assert not layer <= even[1] and layer <= uneven[1]
    assert all(stage.forward > 0 for stage in told.best.stages)
    again = found(graph, 2, constraints_of(told.plan, graph, signatures(graph)))
    assert again.plan == told.plan and again.best.seconds == told.best.seconds


@pytest.mark.long
@pytest.mark.parametrize("name", every(2, ["gpt", "moe"]))
@pytest.mark.parametrize("seed", range(2))
def test_all_constraints_of_a_random_plan_give_that_plan(name: str, seed: int) -> None:
    """One that draws from what is searched: sizes, then a choice per operation."""
    graph = graph_of(name)
    random = Random(seed)
    shape = random.choice([(1, 4, 1), (2, 2, 1), (1, 2, 2), (2, 2, 2)])
    kept = sizes(
        **dict(zip(("dp", "tp", "pp"), shape, strict=True)),
        micro_batches=shape[2],
        recompute=seed == 1,
        schedule="1f1b",
    )
    subject = subject_of(name, 8)
    tables = subject.tables(shape[1], shape[0] * shape[2])
    drawn = {n: random.choice(strategies).choices[0] for n, strategies in sorted(tables.strategies.items())}

    def only(op: Operation, choice: Choice) -> bool:
        return choice == drawn[op.name]

    ranks = shape[0] * shape[1] * shape[2]
    told = found(graph, ranks, kept, Constraint("drawn", allows=only))
    again = found(graph, ranks, constraints_of(told.plan, graph, signatures(graph)))
    assert choices_of(told.subject, told.best) == drawn
    assert again.plan == told.plan and again.best.seconds == told.best.seconds
    free = found(graph, ranks, kept)
    assert free.best.seconds <= told.best.seconds


def test_plans_outside_of_the_space_are_refused() -> None:
    graph = graph_of("gpt")
    plan = Plan((("dp", 2), ("tp", 2)))
    for steps, more in (
        ((OrderStep(("add",), ("linear",)),), {}),
        ((), {"schedule": "3f1b"}),
        ((), {"data_axes": ()}),
    ):
        other = Plan(plan.mesh, steps, **more)  # type: ignore[arg-type]
        with pytest.raises(NnscalerError, match="the planner does not search plans with"):
            constraints_of(other, graph, signatures(graph))


def test_the_constraint_that_cannot_hold_is_named() -> None:
    graph = graph_of("gpt")
    tp = sizes(tp=2)
    with pytest.raises(NnscalerError, match=r"the constraint 'require z of linear' leaves linear .* no choice on tp=2"):
        found(graph, 2, tp, replicate(graph, ["wte"]), require(graph, ["linear"], "z"))
    with pytest.raises(NnscalerError, match="'replicate linear', 'require n of linear' together leave linear"):
        found(graph, 2, tp, all_of([replicate(graph, ["linear"]), require(graph, ["linear"], "n")]))
    with pytest.raises(NnscalerError, match=r"is permitted .*: the constraint 'dp=3' permits none"):
        found(graph, 4, tp, sizes(dp=3))


def test_files_have_all_kinds(tmp_path: Path) -> None:
    graph = graph_of("gpt")
    file = tmp_path / "constraints.toml"
    expected = {
        "kind = 'megatron'": "megatron",
        "kind = 'sequence_parallel'": "sequence parallel",
        "kind = 'over_all_devices'\noperations = 'wte'": "wte over all devices",
        "kind = 'interlaced'": "interlaced",
        "kind = 'together'\noperations = ['blocks.0.mlp', 'blocks.1.mlp']": "blocks.0.mlp, blocks.1.mlp together",
        "kind = 'on_device'\noperations = 'head'\ndevice = -1": "head on device -1",
        "kind = 'sizes'\ntp = 2\nrecompute = false": "tp=2, recompute=False",
        "kind = 'forbid'\noperations = ['aten.linear.*']\nidentifier = 'n'": "forbid n of aten.linear.*",
    }
    file.write_text("".join(f"[[constraint]]\n{text}\n" for text in expected))
    read = read_constraints(file, graph)
    assert [c.text for c in read.each] == list(expected.values())
    for text, said in (
        ("kind = 'megatron'\ntp = 2", r"constraint 1 (megatron) has ['tp']"),
        ("kind = 'sequence'", "did you mean 'sequence_parallel'?"),
        ("kind = 'on_device'\noperations = 'head'\ndevice = '0'", "device is '0'"),
        ("kind = 'over_all_devices'", "(over_all_devices): operations are None"),
        ("kind = 'sizes'\nschedule = '3f1b'", "(sizes): schedule '3f1b': the planner has no figures"),
        ("kind = 'sizes'\nschedule = 'zb-h9'", "zb-h9"),
    ):
        file.write_text(f"[[constraint]]\n{text}\n")
        with pytest.raises(NnscalerError) as error:
            read_constraints(file, graph)
        assert said in str(error.value), text
