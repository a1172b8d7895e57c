"""Passes by their text: before and after."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from nnscaler.ir.graph import Graph
from nnscaler.ir.print_graph import print_graph
from nnscaler.tracing.passes.decompositions import lower_attention_dropout, lower_picks
from nnscaler.tracing.passes.lower_cross_entropy import lower_cross_entropy
from nnscaler.tracing.passes.needs_grad_and_liveness import mark_needs_grad, remove_dead_code
from nnscaler.tracing.passes.normal_forms import drop_identities, spell_shapes, tile_slices
from tests.graph_invariants import check_graph
from tests.graph_text import parse_graph


def after(graph_pass: Callable[[Graph], Graph], body: str, loss: str = "loss") -> str:
    """The operations (and updates) of a small graph after a pass."""
    leaves = """graph G
        parameter %w: float32[6, 4] grad = "w"
        buffer %count: int64[] = "count"
        constant %nothing: float32[0] = "_constants.0"
        input %x: float32[6, 4] = "x"
        input %labels: int64[6] = "labels"
    """
    graph = graph_pass(parse_graph(leaves + body + f"\nloss %{loss}"))
    check_graph(graph)
    lines = print_graph(graph).splitlines()
    return "\n".join(line for line in lines if line.startswith(("%", "_", "update", "loss %")))


def text(body: str) -> str:
    return "\n".join(line.strip() for line in body.strip().splitlines())


def test_identities() -> None:
    found = after(
        drop_identities,
        """
        %alias: float32[6, 4] = aten.alias.default(%x)
        %same: float32[6, 4] = aten.to.dtype(%alias, float32)
        %cast: float64[6, 4] = aten.to.dtype_layout(%same, dtype=float64)
        %whole: float64[6, 4] = aten.slice.Tensor(%cast, 0, 0, 9223372036854775807)
        %part: float64[6, 3] = aten.slice.Tensor(%whole, -1, 1, 9223372036854775807)
        %one: float64[6, 3] = aten.mul.Tensor(%part, 1.0)
        %kept: float64[6, 3] = aten.dropout.default(%one, 0.5, False)
        %never: float64[6, 3] = aten.dropout.default(%kept, 0.0, True)
        %some: float64[6, 3] = aten.dropout.default(%never, 0.5, True)
        %view: float64[6, 3] = aten.view.default(%some, (6, -1))
        %loss: float64[] = aten.sum.default(%view)
        """,
    )
    assert found == text(
        """
        %cast: float64[6, 4] = aten.to.dtype(%x, float64)
        %part: float64[6, 3] = aten.slice.Tensor(%cast, -1, 1, 4)
        %some: float64[6, 3] = nnscaler.dropout(%part, 0.5)
        %loss: float64[] = aten.sum.default(%some)
        loss %loss
        """
    )


def test_detaching_matters_only_where_there_is_a_gradient() -> None:
    found = after(
        drop_identities,
        """
        %a: float32[6, 4] = aten.detach_.default(%x)
        %b: float32[6, 4] = aten.detach_.default(%w)
        %c: float32[6, 4] = aten.add.Tensor(%a, %b)
        %loss: float32[] = aten.sum.default(%c)
        """,
    )
    assert found.startswith("%b: float32[6, 4] = aten.detach.default(%w)\n%c: float32[6, 4] = aten.add.Tensor(%x, %b)")


def test_concatenation_with_nothing() -> None:
    found = after(
        drop_identities,
        """
        %a: float32[6, 4] = aten.cat.default((%nothing, %x), -2)
        %b: float32[12, 4] = aten.cat.default((%nothing, %a, %x), 0)
        %loss: float32[] = aten.sum.default(%b)
        """,
    )
    assert found.startswith("%b: float32[12, 4] = aten.cat.default((%x, %x), 0)\n%loss")


def test_shapes_are_explicit() -> None:
    found = after(
        spell_shapes,
        """
        %a: float32[2, 3, 4] grad = aten.view.default(%w, (2, -1, 4))
        %b: float32[2, 12] grad = aten.flatten.using_ints(%a, 1)
        %c: float32[5, 2, 12] grad = aten.expand.default(%b, (5, -1, -1))
        %d: int64[3] = aten.arange.default(3)
        %e: float32[4, 4] = aten.new_full.default(%x, (4, 4), 1.0)
        %f: float32[6, 4] = aten.new_zeros.default(%x, (6, 4))
        %loss: float32[] grad = aten.sum.default(%c)
        """,
    )
    assert found == text(
        """
        %a: float32[2, 3, 4] grad = aten.reshape.default(%w, (2, 3, 4))
        %b: float32[2, 12] grad = aten.reshape.default(%a, (2, 12))
        %c: float32[5, 2, 12] grad = aten.expand.default(%b, (5, 2, 12))
        %d: int64[3] = aten.arange.default(3, dtype=int64)
        %e: float32[4, 4] = aten.full.default((4, 4), 1.0, dtype=float32)
        %f: float32[6, 4] = aten.new_zeros.default(%x, (6, 4))
        %loss: float32[] grad = aten.sum.default(%c)
        loss %loss
        """
    )


def test_what_each_row_names_is_picked_there() -> None:
    found = after(
        lower_picks,
        """
        %rows: int64[6] = aten.arange.default(6)
        %first: float32[6] = aten.index.Tensor(%w, (%rows, %labels))
        %column: int64[6, 1] = aten.reshape.default(%rows, (6, 1))
        %several: int64[6, 1] = aten.reshape.default(%labels, (6, 1))
        %second: float32[6, 1] = aten.index.Tensor(%w, (%column, %several))
        %others: int64[6] = aten.arange.start(1, 7)
        %third: float32[6] = aten.index.Tensor(%w, (%others, %labels))
        %table: float32[6, 6] = aten.index.Tensor(%w, (%column, %labels))
        %loss: float32[] = aten.sum.default(%third)
        """,
    ).splitlines()
    assert [line.partition(" = ")[2] for line in found if "%w" in line] == [
        "nnscaler.pick(%w, %labels)",
        "nnscaler.pick(%w, %several)",
        "aten.index.Tensor(%w, (%others, %labels))",
        "aten.index.Tensor(%w, (%column, %labels))",
    ]


def test_cross_entropy_is_a_sum_and_a_count() -> None:
    found = after(
        lower_cross_entropy,
        "%loss: float32[] = aten.cross_entropy_loss.default(%w, %labels, None, 1, 3)",
    )
    assert found == text(
        """
        %loss_max: float32[6] = nnscaler.ce_max(%w)  | no_grad
        %loss_pick: float32[6] = nnscaler.ce_pick(%w, %labels, 3)
        %loss_sumexp: float32[6] = nnscaler.ce_sumexp(%w, %loss_max)
        %loss_tail: float32[] = nnscaler.ce_tail(%loss_sumexp, %loss_max, %loss_pick, %labels, 3)
        %loss_count: int64[] = nnscaler.ce_count(%labels, 3)  | no_grad
        %loss: float32[] = aten.div.Tensor(%loss_tail, %loss_count)
        loss %loss
        """
    )


@pytest.mark.parametrize(
    ("arguments", "count"),
    [("%w, %labels, %w", "float32[] = nnscaler.ce_weight(%labels, %w, -100)"),
     ("%w, %labels, None, 1, 3, 0.1", "int64[] = nnscaler.ce_count(%labels, 3)")],
    ids=["weights", "label smoothing"],
)  # fmt: skip
def test_other_means_are_a_sum_and_a_division(arguments: str, count: str) -> None:
    found = after(lower_cross_entropy, f"%loss: float32[] = aten.cross_entropy_loss.default({arguments})").splitlines()
    assert found[0].startswith("%loss_sum: float32[] = aten.cross_entropy_loss.default(%w, %labels, ")
    assert ", 2, " in found[0]
    assert found[1:3] == [f"%loss_count: {count}", "%loss: float32[] = aten.div.Tensor(%loss_sum, %loss_count)"]


@pytest.mark.parametrize(
    "arguments",
    ["%w, %labels, None, 0", "%w, %labels, %w, 2", "%w, %x"],
    ids=["no reduction", "weighted sum", "probabilities"],
)
def test_other_cross_entropy_stays(arguments: str) -> None:
    body = f"%loss: float32[] = aten.cross_entropy_loss.default({arguments})"
    assert after(lower_cross_entropy, body).startswith(body)


def _named_after_outputs(graph: Graph) -> Graph:
    return graph.replace(operations=tuple(replace(op, name=op.outputs[0] or op.name) for op in graph.operations))


def test_slices_that_tile_become_a_split() -> None:
    found = after(
        lambda graph: _named_after_outputs(tile_slices(graph)),
        """
        %a: float32[6, 1] = aten.slice.Tensor(%x, 1, 0, 1)
        %b: float32[6, 2] = aten.slice.Tensor(%x, 1, 2, 4)
        %odd: float32[6, 3] = aten.slice.Tensor(%x, 1, 0, 3)
        %again: float32[6, 1] = aten.slice.Tensor(%x, -1, 0, 1)
        %c: float32[6, 1] = aten.slice.Tensor(%x, 1, 1, 2)
        %rows: float32[3, 4] = aten.slice.Tensor(%x, 0, 0, 3)
        %d: float32[6, 8] = aten.cat.default((%a, %b, %odd, %again, %c), 1)
        %e: float32[9, 4] = aten.cat.default((%rows, %x), 0)
        %loss: float32[] = aten.sum.default(%d)
        """,
    )
    assert found == text(
        """
        %a: float32[6, 1], %c: float32[6, 1], %b: float32[6, 2] = aten.split_with_sizes.default(%x, (1, 1, 2), 1)
        %odd: float32[6, 3] = aten.slice.Tensor(%x, 1, 0, 3)
        %rows: float32[3, 4] = aten.slice.Tensor(%x, 0, 0, 3)
        %d: float32[6, 8] = aten.cat.default((%a, %b, %odd, %a, %c), 1)
        %e: float32[9, 4] = aten.cat.default((%rows, %x), 0)
        %loss: float32[] = aten.sum.default(%d)
        loss %loss
        """
    )


def test_dead_code_goes_and_parameters_stay() -> None:
    def both(graph: Graph) -> Graph:
        smaller = remove_dead_code(graph)
        assert {t.name for t in smaller.tensors.values()} == {"w", "count", "x", "labels", "b", "loss", "new"}
        return smaller

    found = after(
        both,
        """
        %dead: float32[6, 4] = aten.relu.default(%x)
        %a: float32[3, 4], %b: float32[3, 4] = aten.split.Tensor(%x, 3)
        %deader: float32[6, 4] = aten.relu.default(%dead)
        %new: int64[] = aten.add.Tensor(%count, 1)
        %loss: float32[] = aten.sum.default(%b)
        update %count = %new
        """,
    )
    assert found == text(
        """
        _, %b: float32[3, 4] = aten.split.Tensor(%x, 3)  | name="a"
        %new: int64[] = aten.add.Tensor(%count, 1)
        %loss: float32[] = aten.sum.default(%b)
        update %count = %new
        loss %loss
        """
    )


def test_gradients_by_dataflow() -> None:
    found = after(
        mark_needs_grad,
        """
        %a: float32[6, 4] = aten.relu.default(%x)  | no_grad
        %b: float32[6, 4] = aten.relu.default(%w)  | no_grad
        %c: float32[6, 4] = aten.mul.Tensor(%w, %b)
        %d: int64[6] = aten.argmax.default(%c, 1)
        %e: float32[6, 4] = aten.zeros_like.default(%c)
        %loss: float32[] = aten.sum.default(%c)
        """,
    )
    assert found == text(
        """
        %a: float32[6, 4] = aten.relu.default(%x)
        %b: float32[6, 4] = aten.relu.default(%w)  | no_grad
        %c: float32[6, 4] grad = aten.mul.Tensor(%w, %b)
        %d: int64[6] = aten.argmax.default(%c, 1)
        %e: float32[6, 4] = aten.zeros_like.default(%c)
        %loss: float32[] grad = aten.sum.default(%c)
        loss %loss
        """
    )


def test_attention_without_dropout_stays() -> None:
    body = "%loss: float32[] = aten.scaled_dot_product_attention.default(%x, %x, %x, None, 0.0, True)"
    assert after(lower_attention_dropout, body).startswith(body)
