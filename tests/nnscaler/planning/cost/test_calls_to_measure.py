"""The shards that are measured: what they are, and that their calls run and give the shapes that they say."""

from __future__ import annotations

import pytest
import torch

from op_registry.call import Call, DType, TensorArgument

from nnscaler.ir.derive_operand_layouts import input_layouts, output_layouts
from nnscaler.ir.graph import Graph
from nnscaler.ir.operation_annotations import signatures
from nnscaler.layout import local_shape
from nnscaler.performance.measure_operators_and_collectives import time_call
from nnscaler.planning.cluster.description import load_cluster
from nnscaler.planning.cost.build_machine_profile import measure
from nnscaler.planning.cost.calls_to_measure import meshes, shard_calls, signature_text
from nnscaler.planning.cost.flops_and_memory_traffic import shard_work
from nnscaler.planning.cost.profile_cost import TableCost
from nnscaler.planning.plan_from_axes import make_plan
from nnscaler.tracing import trace
from nnscaler.transform.apply import apply_plan


class Small(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(20, 12)
        self.first = torch.nn.Linear(12, 24)
        self.second = torch.nn.Linear(24, 8)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = torch.nn.functional.gelu(self.first(self.table(x)))
        return torch.nn.functional.cross_entropy(self.second(h).flatten(0, 1), y.flatten())


@pytest.fixture(scope="module")
def graph() -> Graph:
    torch.manual_seed(0)
    inputs = {"x": torch.randint(0, 20, (6, 4)), "y": torch.randint(0, 8, (6, 4))}
    return trace(Small(), inputs, self_check=False).graph


def test_meshes() -> None:
    assert meshes(1) == ((),)
    assert meshes(6) == ((), (2,), (3,), (6,), (2, 3), (3, 2))
    assert meshes(4) == ((), (2,), (4,), (2, 2))


def test_shards_of_a_linear(graph: Graph) -> None:
    calls = shard_calls(graph, signatures(graph), 4)
    found = [c for c in calls if c.call.operator == "aten.linear.default" and c.signature.bound is not None]
    first = {(c.shapes_in[0], c.shapes_in[1], c.shapes_out[0]) for c in found if 12 in c.shapes_in[1][1:]}
    assert ((6, 4, 12), (24, 12), (6, 4, 24)) in first
    assert ((3, 4, 12), (24, 12), (3, 4, 24)) in first  # rows
    assert ((6, 4, 12), (12, 12), (6, 4, 12)) in first  # columns
    assert ((3, 4, 12), (12, 12), (3, 4, 12)) in first  # both
    assert ((6, 1, 12), (24, 12), (6, 1, 24)) in first  # four of one
    assert not [s for s in first if s[0][0] == 1], "six rows do not divide by four"
    half = next(c for c in found if c.shapes_in[0] == (6, 4, 6))
    assert half.shapes_in[1] == (24, 6) and half.shapes_out == ((6, 4, 24),)
    assert all(c.needs_grad == (True, True, True) for c in found)


def test_keys_are_distinct_and_work_shrinks(graph: Graph) -> None:
    calls = shard_calls(graph, signatures(graph), 4)
    assert len({c.key for c in calls}) == len(calls) > 30
    assert calls == shard_calls(graph, signatures(graph), 4)
    whole = {id(c.signature): c for c in reversed(calls)}
    for call in calls:
        flops = shard_work(call.signature, call.shapes_in, call.shapes_out, call.dtype)[0].flops
        of_whole = whole[id(call.signature)]
        assert flops <= shard_work(call.signature, of_whole.shapes_in, of_whole.shapes_out, call.dtype)[0].flops


def test_every_shard_runs(graph: Graph) -> None:
    calls = shard_calls(graph, signatures(graph), 2)
    assert len(calls) > 30
    for call in calls:
        forward, backward = time_call(call.call, call.needs_grad)
        assert forward > 0
        assert (backward > 0) == any(call.needs_grad), call.call.operator


def test_texts_of_signatures() -> None:
    x = TensorArgument(0, (2, 3), "float32")
    assert signature_text(Call("aten.softmax.int", (x, -1), {"dtype": DType("float64")})) == (
        "aten.softmax.int(float32, -1, dtype=float64)"
    )
    assert signature_text(Call("aten.cat.default", ([x, x],))) == "aten.cat.default([float32, float32])"


@pytest.mark.parametrize(
    ("sizes", "micro_batches"),
    [({"dp": 2, "tp": 2}, 1), ({"tp": 4}, 1), ({"dp": 2}, 1), ({"dp": 2, "tp": 2}, 3), ({"tp": 2}, 2)],
)
def test_a_profile_has_every_shard_of_a_plan(graph: Graph, sizes: dict[str, int], micro_batches: int) -> None:
    found = dict(signatures(graph))
    cluster = load_cluster("cpu").scaled(4)
    profile = measure(graph, found, cluster, lambda c: (1e-3, 1e-3 * any(c.needs_grad)), micro_batches=micro_batches)
    cost = TableCost(profile)
    plan = make_plan(graph, found, sizes, micro_batches=micro_batches)
    partitioned = apply_plan(graph, found, plan)
    of = partitioned.graph  # what is done once a step was taken out of micro-batches
    for op in of.operations:
        placement = partitioned.placements[op.name]
        stage, choices = partitioned.stages[placement.stages[0]], placement.choices[placement.stages[0]]
        needed = input_layouts(of, op, found[op.name], choices)
        made = output_layouts(of, op, found[op.name], choices)
        shapes_in = [local_shape(v, stage.sizes, of.tensors[n].shape) for v, n in zip(needed, op.inputs, strict=True)]
        shapes_out = [
            None if n is None else local_shape(v, stage.sizes, of.tensors[n].shape)
            for v, n in zip(made, op.outputs, strict=True)
        ]
        seconds = cost.compute(found[op.name], shapes_in, shapes_out, "float32")
        assert seconds[0] in (0.0, 1e-3)
    assert cost.coverage().asked > 5 and not cost.coverage().missing
