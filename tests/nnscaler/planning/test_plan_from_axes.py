"""Policies: what they find from annotations alone, in models whose names mean nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nnscaler.errors import NnscalerError
from nnscaler.ir.graph import Graph
from nnscaler.ir.operation_annotations import signatures
from nnscaler.ir.operation_placement import Choice, RunInvariant, RunReplicated, Split
from nnscaler.planning.parse_axes import parse_spec
from nnscaler.planning.plan_from_axes import make_plan
from nnscaler.scheduling.given_orders import GivenOrder, kind_of_orders
from nnscaler.scheduling.registry import schedule_of
from nnscaler.tracing import trace
from nnscaler.transform.apply import apply_plan


class Block(nn.Module):
    """Attention over six heads of 8 with a packed projection, and an MLP; nothing is called so."""

    def __init__(self) -> None:
        super().__init__()
        self.n0, self.n1 = nn.LayerNorm(48), nn.LayerNorm(48)
        self.a0 = nn.Linear(48, 144)
        self.a1 = nn.Linear(48, 48)
        self.a2 = nn.Linear(48, 180)
        self.a3 = nn.Linear(180, 48)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = (z.view(b, t, 6, 8).transpose(1, 2) for z in self.a0(self.n0(x)).split(48, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.a1(y.transpose(1, 2).reshape(b, t, 48))
        return x + self.a3(F.gelu(self.a2(self.n1(x))))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.z = nn.ModuleList(Block() for _ in range(3))
        self.w = nn.Linear(48, 60, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.z:
            x = block(x)
        return F.cross_entropy(self.w(x).flatten(0, 1), y.flatten())


@pytest.fixture(scope="module")
def graph() -> Graph:
    torch.manual_seed(0)
    return trace(Stack(), {"x": torch.randn(12, 10, 48), "y": torch.arange(120).view(12, 10) % 60}).graph


def choices_of(graph: Graph, **options: Any) -> dict[str, Choice]:
    """module of each linear (and operator of others) -> its choice on tp; tp is 2 unless `sizes` says more."""
    known = dict(signatures(graph))
    plan = make_plan(graph, known, options.pop("sizes", {"tp": 2}), **options)
    made = apply_plan(graph, known, plan)
    names = made.stages[0].names
    return {
        op.module if op.operator == "aten.linear.default" else f"{op.module}:{op.operator}": (
            made.placements[op.name].choices[0][names.index("tp")]
        )
        for op in made.graph.operations
    }


@pytest.mark.parametrize("tp", [2, 3])
def test_column_then_row_and_parallel_heads(graph: Graph, tp: int) -> None:
    found = choices_of(graph, sizes={"tp": tp})
    for i in range(3):
        assert found[f"z.{i}.a0"] == Split("n", 3)
        assert found[f"z.{i}.a1"] == Split("k")
        assert found[f"z.{i}.a2"] == Split("n")
        assert found[f"z.{i}.a3"] == Split("k")
        attention = found[f"z.{i}:aten.scaled_dot_product_attention.default"]
        assert isinstance(attention, Split)
        assert isinstance(found[f"z.{i}.n0:aten.layer_norm.default"], RunInvariant | RunReplicated)


def test_it_is_the_same_beside_data_parallelism(graph: Graph) -> None:
    alone, beside = choices_of(graph), choices_of(graph, sizes={"dp": 2, "tp": 2})
    linears = [f"z.{i}.a{j}" for i in range(3) for j in range(4)]
    assert [alone[n] for n in linears] == [beside[n] for n in linears]


def test_the_batch_and_the_sequence_are_left_to_other_axes(graph: Graph) -> None:
    linears = {n: c for n, c in choices_of(graph).items() if ":" not in n}
    assert len(linears) == 13
    assert not {Split("*0"), Split("*1")}.intersection(linears.values())


def test_replicate_leaves_modules_whole(graph: Graph) -> None:
    found = choices_of(graph, replicate=("z.1", "w"))
    whole = (RunInvariant(), RunReplicated())
    assert all(c in whole for n, c in found.items() if n.startswith("z.1") or n == "w")
    assert found["z.0.a2"] == Split("n")
    with pytest.raises(NnscalerError, match="pattern 'lm_head' matches no module"):
        choices_of(graph, replicate=("lm_head",))


def test_a_pipeline_is_cut_between_layers(graph: Graph) -> None:
    known = dict(signatures(graph))
    plan = make_plan(graph, known, {"pp": 3})
    made = apply_plan(graph, known, plan)
    assert plan.micro_batches == 6
    for op in made.graph.operations:
        if op.module.startswith("z."):
            assert made.placements[op.name].stages == (int(op.module.split(".")[1]),)


def test_interleaved_has_two_chunks_per_device(graph: Graph) -> None:
    plan = make_plan(graph, signatures(graph), {"pp": 2}, schedule="interleaved", micro_batches=4)
    assert (plan.chunks, plan.stages) == (2, 4)


def test_a_v_has_its_stages_where_the_schedule_has_them(graph: Graph) -> None:
    plan = make_plan(graph, signatures(graph), {"pp": 2}, schedule="zb-v", micro_batches=4)
    assert (plan.schedule, plan.chunks, plan.stages, plan.orders) == ("zb-v", 1, 4, ())
    assert plan.stage_devices == ((0,), (1,), (1,), (0,))
    assert [s.devices for s in apply_plan(graph, dict(signatures(graph)), plan).stages] == [(0,), (1,), (1,), (0,)]
    round_again = make_plan(graph, signatures(graph), {"pp": 3}, schedule="zb-h1")
    assert (round_again.stage_devices, round_again.stages) == ((), 3)
    more = make_plan(graph, signatures(graph), {"pp": 2}, schedule="interleaved:3", micro_batches=4)
    assert (more.schedule, more.chunks, more.stages) == ("interleaved", 3, 6)
    with pytest.raises(NnscalerError, match="schedule zb-v runs 2 stages on each device, not 1"):
        make_plan(graph, signatures(graph), {"dp": 2}, schedule="zb-v")


def test_orders_that_are_given_are_in_the_plan(graph: Graph) -> None:
    """As many micro-batches and stages as they have: three stages on two devices."""
    texts = ("F0.0 F0.1 F2.0 B2.0 F2.1 B2.1 B0.0 B0.1", "F1.0 F1.1 B1.0 B1.1")
    kind = kind_of_orders([GivenOrder.of_text(text, f"row {i}") for i, text in enumerate(texts)], "mine", "mine")
    plan = make_plan(graph, signatures(graph), {"pp": 2}, schedule=kind)
    assert (plan.schedule, plan.micro_batches, plan.stages) == ("mine", 2, 3)
    assert (plan.stage_devices, plan.orders) == (((0,), (1,), (0,)), texts)
    assert schedule_of(plan).orders == kind(2, 1, 2).orders
    assert schedule_of(plan, range(3)).text(1) == "F1.0 F1.1"
    for sizes, micro_batches in (({"pp": 3}, None), ({"pp": 2}, 4)):
        with pytest.raises(NnscalerError, match="mine is for 2 devices and 2 micro-batches, and there are") as error:
            make_plan(graph, signatures(graph), sizes, schedule=kind, micro_batches=micro_batches)
        assert error.value.help == "--plan pp=2 --micro-batches 2"


def test_more_stages_than_operations_is_illegal(graph: Graph) -> None:
    known = signatures(graph)
    plan = make_plan(graph, known, {"pp": 4})  # three layers: cut inside of them
    (told, *_) = plan.notes
    assert told.count("|") == 3 and "(part)" in told
    count = len(graph.operations)
    with pytest.raises(NnscalerError, match=f"cannot be cut into {count + 1} pipeline stages") as raised:
        make_plan(graph, known, {"pp": count + 1})
    assert raised.value.where is not None and "legal here is" in (raised.value.help or "")


def test_a_plan_between_layers_has_no_notes(graph: Graph) -> None:
    assert make_plan(graph, signatures(graph), {"pp": 3}).notes == ()
    assert make_plan(graph, signatures(graph), {"pp": 3}, schedule="interleaved:2", micro_batches=3).notes == ()


# -- specifications -----------------------------------------------------------------------------------------------


def test_parse_spec() -> None:
    assert parse_spec("dp=2, tp=4", 8) == {"dp": 2, "tp": 4}
    assert parse_spec("pp=1", 1) == {"pp": 1}
    assert parse_spec("dp=2,tp=2,zero=3", 4) == {"dp": 2, "tp": 2, "zero": 3}
    assert parse_spec("dp=4,zero=1", 4) == {"dp": 4, "zero": 1}
    assert parse_spec("dp=1,zero=3", 1) == {"dp": 1}  # a script names as many as there are


@pytest.mark.parametrize("text", ["tp=4,zero=1", "tp=4,zero=3", "zero=3", "dp=1,tp=4,zero=2"])
def test_zero_needs_ranks_of_dp(text: str) -> None:
    with pytest.raises(NnscalerError, match=r"zero=[123] with dp=1") as raised:
        parse_spec(text, 4)
    assert "dp=2,zero=1" in (raised.value.help or "")


@pytest.mark.parametrize(("text", "wrong"), [("dp=0", "'dp=0' is for no ranks"), ("dp=2,dp=2", "dp is named twice")])
def test_a_number_that_no_axis_has(text: str, wrong: str) -> None:
    with pytest.raises(NnscalerError, match=wrong):
        parse_spec(text, 4)


@pytest.mark.parametrize("text", ["dp", "dp=", "dp=two", "dp=²", "xp=2", "dp:2", "dp=-2"])
def test_what_is_no_specification_is_refused(text: str) -> None:
    with pytest.raises(NnscalerError, match=r"is not one of dp=N, shard=N, cp=N, tp=N, pp=N, zero=1\|2\|3"):
        parse_spec(text, 4)


def test_the_product_must_be_the_ranks() -> None:
    with pytest.raises(NnscalerError, match="is for 4 ranks, and there are 6") as raised:
        parse_spec("dp=2,tp=2", 6)
    assert "dp=2,tp=3" in (raised.value.help or "")
