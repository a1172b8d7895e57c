"""Graphs as text: what is printed is read back as the same graph."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from op_registry.call import DType
from op_registry.source_location import SourceLocation

from nnscaler.ir.graph import Graph, LogicalTensor, Operation, Region, Slot
from nnscaler.ir.print_graph import print_graph
from tests.graph_text import parse_graph

TEXT = """graph Tiny
parameter %weight: float32[8, 4] grad = "embed.weight", "head.weight"
buffer %count: int64[] = "norm.count"
input %x: float32[2, 4] = "x"
%linear: float32[2, 8] grad = aten.linear.default(%x, %weight)  | module="head" at="tiny.py":7 text="self.head(x)"
%a: float32[2, 4] grad, _ = aten.split_with_sizes.default(%linear, (4, 4), 1)  | name="split"
%mean: float32[] grad = aten.mean.default(%a)
%add: int64[] = aten.add.Tensor(%count, 1)  | no_grad autocast="bfloat16"
update %count = %add
loss %mean
"""


def test_text_is_stable() -> None:
    assert print_graph(parse_graph(TEXT)) == TEXT


def test_comments_and_empty_lines_are_skipped() -> None:
    assert parse_graph("# a comment\n\n" + TEXT.replace("\n%mean", "\n  # another\n%mean")) == parse_graph(TEXT)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("%y: float32[2 = aten.relu.default(%x)", "number"),
        ("%y: float32[2] = aten.relu.default(%x", "ends too early"),
        ("%y: float32[2] = aten.relu.default(%x) nonsense", "not expected"),
        ("%y: float32[2] = aten.relu.default(%x)  | colour=red", "no field"),
        ("%y: float32[2] ! aten.relu.default(%x)", "not expected"),
    ],
)
def test_errors_name_the_line(line: str, reason: str) -> None:
    with pytest.raises(ValueError, match=rf"line 2: .*{reason}"):
        parse_graph("graph Bad\n" + line)


LEAVES = st.one_of(
    st.integers(),
    st.booleans(),
    st.none(),
    st.floats(allow_nan=False),
    st.complex_numbers(allow_nan=False),
    st.text(),
    st.sampled_from([DType("float32"), DType("bool"), "TENSOR"]),
)
VALUES = st.recursive(
    LEAVES, lambda inner: st.one_of(st.lists(inner, max_size=3).map(tuple), st.lists(inner, max_size=3))
)


def _with_slots(value: object, inputs: list[str], choose: random.Random) -> object:
    if value == "TENSOR" and isinstance(value, str):
        inputs.append(choose.choice(["x", "weight"]))
        return Slot(len(inputs) - 1)
    if isinstance(value, list | tuple):
        return type(value)(_with_slots(v, inputs, choose) for v in value)
    return value


@pytest.mark.long
@settings(deadline=None, max_examples=150)
@given(
    st.lists(VALUES, max_size=4),
    st.lists(VALUES, max_size=2),
    st.text(),
    st.text(),
    st.randoms(use_true_random=False),
)
def test_round_trip(
    args: list[object], keywords: list[object], text: str, operator: str, choose: random.Random
) -> None:
    inputs: list[str] = []
    made = tuple(_with_slots(a, inputs, choose) for a in args)
    named = tuple((f"k{i}", _with_slots(v, inputs, choose)) for i, v in enumerate(keywords))
    where = SourceLocation(text, 3, text) if choose.random() < 0.5 else None
    region = Region(choose.random() < 0.5, choose.choice([None, "off", "bfloat16"]))
    call = Operation("op", operator, tuple(inputs), made, named, ("y", None), region, where, text, operator)
    tensors = [
        LogicalTensor("x", (2, 3), "float32", "input", fqns=("x",)),
        LogicalTensor("weight", (), "bfloat16", "parameter", True, ("a.b", text)),
        LogicalTensor("y", (0, 1), "float32", needs_grad=True),
    ]
    graph = Graph("G", {t.name: t for t in tensors}, (call,), "y", (("x", "y"),))
    assert parse_graph(print_graph(graph)) == graph


def test_not_a_number_has_text() -> None:
    graph = parse_graph(TEXT.replace("aten.mean.default(%a)", "aten.mul.Scalar(%a, nan)"))
    assert math.isnan(graph.by_name["mean"].args[1])
    assert "nan" in print_graph(graph)
