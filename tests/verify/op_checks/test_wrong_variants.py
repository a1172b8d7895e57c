"""Wrong variants: killed where the inputs tell, void where the result is constant, survived otherwise."""

from __future__ import annotations

import pytest
import torch

from op_registry.registry import default_registry

from nnscaler.layout import PARTIAL, Sharded
from nnscaler.runtime.cut_tensors import pieces_of
from verify.evidence.inputs.cut_and_join_operands import lay_of
from verify.evidence.oracle.deliberately_wrong_results import variants_of
from verify.evidence.verify_op_options import OpOptions
from verify.operators.report_on_operator import verify_spec


def of(expected: torch.Tensor, dim: int = 0, outer: int = 1) -> dict[str, tuple[bool, bool]]:
    lay = lay_of((Sharded(dim, outer),), (2,))
    cut = lay.held[0]
    assert not isinstance(cut, str)
    pieces = pieces_of(expected, cut, 2)
    return {v.name: (v.killed, v.void) for v in variants_of("output 0", pieces, expected, lay)}


def test_distinct_values_kill() -> None:
    found = of(torch.arange(12.0).reshape(4, 3))
    assert found["swapped"][0]
    assert found["strided"][0]


def test_a_constant_result_is_void() -> None:
    assert of(torch.ones(4, 3)) == {"swapped": (False, True), "strided": (False, True)}


def test_an_unlucky_result_is_not_void() -> None:
    """Swapping its middle does not change it, and it is not constant."""
    assert of(torch.tensor([1.0, 2.0, 2.0, 3.0]))["strided"] == (False, False)


def test_dropping_the_other_terms() -> None:
    lay = lay_of((PARTIAL,), (2,))
    total = torch.tensor([3.0, 4.0])
    (killed,) = variants_of("output 0", [torch.tensor([1.0, 1.0]), torch.tensor([2.0, 3.0])], total, lay)
    assert killed.killed
    (unlucky,) = variants_of("output 0", [total, torch.zeros(2)], total, lay)
    assert (unlucky.killed, unlucky.void) == (False, False)
    (nothing,) = variants_of("output 0", [torch.zeros(2), torch.zeros(2)], torch.zeros(2), lay)
    assert (nothing.killed, nothing.void) == (False, True)


@pytest.mark.parametrize("seed", range(12))
def test_other_inputs_are_drawn_where_a_wrong_result_looks_right(seed: int) -> None:
    """`any` is nearly constant: on half of all seeds, its shards interleaved looked right on all of the first draws."""
    report = verify_spec(default_registry().lookup("aten.any.dim"), OpOptions(seed=seed, prove=False, explain=False))
    assert report.verdict.passes, [check.detail for check in report.checks]
