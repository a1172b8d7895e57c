"""A plan for other sizes and the other mode: steps mean the same operations, and cut blocks of the same size."""

from __future__ import annotations

import re
import warnings
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import nnscaler
from nnscaler.compile import for_batch
from nnscaler.ir.graph import Graph
from nnscaler.tracing import trace
from nnscaler.transform.carry_plan_between_traces import carry, counterparts
from nnscaler.transform.plan import OrderStep, Plan, RecomputeStep, ReplicateStep, RestStep, SplitStep, Step
from tests.nnscaler.training.test_engine import on_ranks


class Raised(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 0.5 if self.training else x


class Windows(nn.Module):
    """Each sample is two windows of four places, which are one batch; training adds to them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 3)
        self.first, self.second = Raised(), Raised()

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        windows = self.first(x).view(-1, 4, 6)
        hidden = self.second(torch.tanh(self.up(windows)))
        hidden = hidden + hidden.mean(1, keepdim=True)
        return F.cross_entropy(self.down(hidden).view(x.shape[0], 8, 3).mean(1), labels)


def batch(rows: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    return {"x": torch.randn(rows, 8, 6, generator=generator), "labels": torch.randint(3, (rows,), generator=generator)}


@cache
def graph(rows: int, training: bool = True) -> Graph:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a model in evaluation mode does not train
        return trace(Windows().train(training), batch(rows)).graph


def carried(*steps: Step, rows: int, training: bool = True) -> tuple[Step, ...]:
    plan = Plan((("tp", 2),), steps)
    return carry(plan, graph(6), graph(rows, training)).steps


def split(*operations: str, identifier: str = "a", **form: Any) -> SplitStep:
    return SplitStep(operations, "tp", identifier, **form)


@pytest.mark.long
def test_names_are_those_of_the_same_lines() -> None:
    before, after = graph(6), graph(6, training=False)
    adds = {op.name: op.module for op in before.operations if op.operator == "aten.add.Tensor"}
    assert list(adds) == ["add", "add_1", "add_2"] and "add" in after.by_name
    names = counterparts(before, after)
    assert [names[name] for name in adds] == [None, None, "add"]
    for name, other in names.items():
        assert other is None or before.by_name[name].where == after.by_name[other].where
    assert counterparts(before, graph(9)) == {op.name: op.name for op in before.operations}


def test_steps_of_other_operations_are_left_out() -> None:
    rest = RestStep(("up",), "tp")
    steps: tuple[Step, ...] = (
        ReplicateStep(("add", "up"), "tp"),
        ReplicateStep(("first", "add_1"), "tp"),
        SplitStep(("add_2",), "tp", "c"),
        OrderStep(("add",), ("tanh",)),
        RecomputeStep(("tanh", "add_2")),
        rest,
    )
    assert carried(*steps, rows=9) == steps
    assert carried(*steps, rows=6, training=False) == (
        ReplicateStep(("up",), "tp"),
        SplitStep(("add",), "tp", "c"),
        RecomputeStep(("tanh", "add")),
        rest,
    )


@pytest.mark.parametrize(
    ("step", "rows", "wanted"),
    [
        (split("add_2", outer=6), 6, [split("add_2", outer=6)]),
        (split("add_1", "add_2", outer=6), 9, [split("add_1", "add_2", outer=9)]),  # a sample has two windows
        (split("add_2", outer=2), 9, [split("add_2", outer=3)]),
        (split("add", "add_2", outer=3), 9, [split("add_2", outer=3)]),  # blocks of four windows do not make up 18
        (split("add_2", outer=3), 5, []),
        (split("add_2", sizes=(5, 7)), 6, [split("add_2", sizes=(5, 7))]),
        (split("add_2", sizes=(5, 7)), 9, [split("add_2")]),
        (split("up", identifier="n", outer=5), 9, [split("linear", identifier="n", outer=5)]),
        (split("view", identifier="d"), 1, [split("view", identifier="c")]),  # a dim of size 1 has no name
        (split("view", identifier="b"), 1, [split("view")]),
        (split("view"), 1, []),
    ],
)
def test_blocks_keep_their_size(step: SplitStep, rows: int, wanted: list[Step]) -> None:
    assert list(carried(step, rows=rows)) == wanted


@pytest.mark.long
def test_the_engine_evaluates_batches_of_other_sizes() -> None:
    """Half of the windows of each sample on each rank, at every size."""
    torch.manual_seed(0)
    model = Windows()
    steps = (split("add_1", "add_2", outer=6),)
    program = nnscaler.parallelize(model, batch(6), ranks=2, plan=Plan((("tp", 2),), steps))
    made = for_batch(program, batch(9), training=False)
    assert made.plan.steps == (split("add", outer=9),)
    reference = Windows().double().eval()
    reference.load_state_dict(model.state_dict())
    with torch.no_grad():
        wanted = [float(reference(batch(rows)["x"].double(), batch(rows)["labels"])) for rows in (6, 9, 1)]
    for found in on_ranks(program, lambda engine: [float(engine.evaluate(batch(rows))) for rows in (6, 9, 1)]):
        assert found == pytest.approx(wanted, rel=1e-12)


class Strided(torch.nn.Module):
    """Of the second batch norm no operand is cut, so that only the plan says that it is."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Conv2d(3, 8, 3, 1, 1), torch.nn.Conv2d(8, 12, 3, 2, 1, bias=False)
        self.norm, self.skip = torch.nn.BatchNorm2d(12), torch.nn.Conv2d(8, 12, 1, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        return (self.norm(self.second(x)) + self.skip(x)).square().mean()


def test_a_mode_with_another_operator_has_its_parameters_in_the_same_layouts() -> None:
    given = {"x": torch.randn(4, 3, 8, 8)}
    program = nnscaler.parallelize(Strided(), given, ranks=2, plan="tp=2")
    made = for_batch(program, given, training=False)
    operators = [{op.operator for op in p.graph.operations} for p in (program, made)]
    assert "nnscaler.batch_normalise" in operators[0] - operators[1]
    declared = [
        re.findall(r'^ *"\w+": (Parameter\(.*)$', p.sources["role_0.py"], re.MULTILINE) for p in (program, made)
    ]
    assert sorted(declared[0]) == sorted(declared[1])
    assert any('"norm.weight"' in line and "Sharded(0)" in line for line in declared[0])


class Attending(nn.Module):
    """Attention that drops in training, where it is taken apart, on a line that transposes by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        p = 0.1 if self.training else 0.0
        a = F.scaled_dot_product_attention(q, k, v, dropout_p=p).transpose(0, 1).transpose(0, 1)
        return self.out(a).square().mean()


def test_attention_that_drops_in_training_alone_is_evaluated_under_its_plan() -> None:
    x = {"x": torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(0))}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        before, after = (trace(Attending().train(training), x).graph for training in (True, False))
    names = counterparts(before, after)
    assert names["scaled_dot_product_attention_key"] is None
    assert all(names[op.name] == op.name for op in before.operations if op.name.startswith("transpose"))
    assert len([op for op in before.operations if op.name.startswith("transpose")]) == 2
    torch.manual_seed(0)
    model = Attending()
    right = float(model.eval()(**x).detach())
    program = nnscaler.parallelize(model.train(), x, ranks=2, plan="tp=2")
    found = on_ranks(program, lambda engine: (engine.step(x), float(engine.evaluate(x)))[1])
    assert found == [pytest.approx(right, rel=1e-5)] * 2
