"""Each invariant of graphs, broken once."""

from __future__ import annotations

import pytest

from nnscaler.ir.graph import Graph, Operation, Slot
from tests.graph_invariants import InternalError, check_graph, violations
from tests.graph_text import parse_graph

GOOD = """graph Good
parameter %weight: float32[8, 4] grad = "weight"
buffer %count: int64[] = "count"
input %x: float32[2, 4] = "x"
%linear: float32[2, 8] grad = aten.linear.default(%x, %weight)
%mean: float32[] grad = aten.mean.default(%linear)
%add: int64[] = aten.add.Tensor(%count, 1)
%both: bool[] = aten.__and__.Tensor(%add, %add)
update %count = %add
loss %mean
"""


def test_a_good_graph_passes() -> None:
    check_graph(parse_graph(GOOD))


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("aten.mean.default(%linear)", "aten.mean.default(%both)", "reads both before it is made"),
        ("aten.mean.default(%linear)", "aten.mean.default(%nothing)", "which is not a tensor of the graph"),
        ("aten.__and__", "aten.__iand__", "changes its input in place"),
        ("aten.add.Tensor(", "aten.add_.Tensor(", "changes its input in place"),
        ("update %count", "update %weight", "which is not a buffer"),
        ("update %count = %add", "update %count = %both", "another shape or dtype"),
        ("update %count = %add", "update %count = %nothing", "which is not a tensor"),
        ("loss %mean", "loss %linear", "not a floating scalar"),
        ("loss %mean", "loss %nothing", "is not a tensor of the graph"),
        ("%both: bool[]", "%both: bool[] grad", "needs a gradient, and no input"),
        ("%add: int64[]", "%add: float32[] grad", "needs a gradient, and no input"),
        ("%mean: float32[] grad", "%mean: int64[] grad", "of dtype int64 needs a gradient"),
        ('= "weight"', "", "has no name in the model"),
        (
            "%both: bool[] = aten.__and__.Tensor(%add, %add)",
            "%mean: bool[] = aten.lt.Scalar(%x, 1)",
            "makes mean again",
        ),
    ],
)
def test_a_broken_graph_is_refused(old: str, new: str, expected: str) -> None:
    assert old in GOOD
    with pytest.raises(InternalError, match=expected):
        check_graph(parse_graph(GOOD.replace(old, new)))


def test_slots_are_numbered_in_order_of_the_arguments() -> None:
    graph = parse_graph(GOOD)
    linear = graph.operations[0]
    turned = Operation(linear.name, linear.operator, linear.inputs, (Slot(1), Slot(0)), (), linear.outputs)
    found = list(violations(graph.replace(operations=(turned, *graph.operations[1:]))))
    assert found == ["linear has slots [1, 0] for 2 inputs"]


def test_names() -> None:
    graph = parse_graph(GOOD)
    tensors = dict(graph.tensors)
    tensors["y"] = tensors.pop("both")
    found = "\n".join(violations(graph.replace(tensors=tensors)))
    assert "both is listed as y" in found
    assert "nothing makes y" in found
    twice = Graph(graph.name, graph.tensors, (*graph.operations, graph.operations[0]), graph.loss)
    assert "two operations are called linear" in "\n".join(violations(twice))
