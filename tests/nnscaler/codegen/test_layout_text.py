"""Layouts in comments, the layers of a model, arguments, and names."""

from __future__ import annotations

import pytest

from op_registry.call import DType
from op_registry.rank_expression import Expression, by_index

from nnscaler.codegen.python_text_of_calls import expression, layout_text, literal
from nnscaler.codegen.stage_writer import layer_of
from nnscaler.ir.graph import is_free_name
from nnscaler.layout import INVARIANT, PARTIAL, REPLICATED, Axis, Layout, Partial, Sharded

AXES = (Axis("dp", 2), Axis("tp", 3), Axis("micro", 4))


@pytest.mark.parametrize(
    ("layout", "text"),
    [
        ((INVARIANT, INVARIANT, INVARIANT), "(48, 36)"),
        ((Sharded(0), Sharded(1), Sharded(0, 2)), "(48/dp/micro, 36/tp)"),
        ((Sharded(0), INVARIANT, Sharded(0, 6)), "(48/dp/3*micro, 36)"),
        ((INVARIANT, Sharded(1, 4), INVARIANT), "(48, 36/4*tp)"),
        ((INVARIANT, Sharded(1, sections=(24, 6, 6)), INVARIANT), "(48, 36/tp[24 6 6])"),
        ((INVARIANT, Sharded(1, sizes=(11, 12, 13)), INVARIANT), "(48, 36/tp{11 12 13})"),
        ((Sharded(0, 3, sizes=(9, 7)), INVARIANT, INVARIANT), "(48/3*dp{9 7}, 36)"),
        ((PARTIAL, REPLICATED, PARTIAL), "(48, 36), sum over dp micro, gradient: sum over tp"),
        ((INVARIANT, Partial("max"), INVARIANT), "(48, 36), max over tp"),
    ],
)
def test_layout_text(layout: Layout, text: str) -> None:
    assert layout_text((48, 36), layout, AXES) == text


def test_axes_of_one_rank_are_left_out() -> None:
    assert layout_text((48,), (Sharded(0),), (Axis("micro", 1),)) == "(48)"
    assert layout_text((), (PARTIAL,), (Axis("dp", 2),)) == "(), sum over dp"


def test_a_layer_is_a_module_path_up_to_its_number() -> None:
    assert [layer_of(m) for m in ("blocks.0.attn.qkv", "blocks.11", "encoder.block.0.layer.1.x", "head", "")] == [
        "blocks.0",
        "blocks.11",
        "encoder.block.0",
        "",
        "",
    ]


def test_arguments() -> None:
    value = [1, 2.5, True, None, "tanh", DType("float32"), (3,), float("-inf")]
    assert literal(value, []) == "[1, 2.5, True, None, 'tanh', dtypes.float32, (3,), float(\"-inf\")]"
    assert expression(Expression(5, (("tp", 20), ("dp", 1)))) == "5 + 20 * self.tp.index + self.dp.index"
    assert expression(Expression(0, ())) == "0"
    assert expression(by_index("tp", (7, 7, 6)) + 5) == "5 + (7, 7, 6)[self.tp.index]"


def test_names_that_programs_use_are_not_free() -> None:
    assert [n for n in ("x", "micro", "class", "self", "a b", "3d", "torch", "größe") if is_free_name(n)] == [
        "x",
        "größe",
    ]
