"""Splits whose other operands go around the axis, as the oracle tests them: all ranks of a case run at once."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from op_registry.call import Call
from op_registry.registry import default_registry
from op_registry.samples import samples_of
from op_registry.spec import OperatorSpec, Shards

from nnscaler.ir.operation_placement import Split
from verify.evidence.oracle.case_runner import CaseResult, OperatorRunner
from verify.evidence.split_case import Inputs, SplitCase
from verify.evidence.verify_op_options import OpOptions

NAME = "aten.scaled_dot_product_attention.default"


@cache
def attention() -> OperatorSpec:
    spec = default_registry().lookup(NAME)
    assert spec is not None
    return spec


def run(runner: OperatorRunner, sample: int, parts: int, outer: int = 1, uneven: bool = False) -> CaseResult:
    bound = runner.prepare(Inputs(sample, (), "normal", 1)).signature.bound
    assert bound is not None
    rows = "q" if "q" in bound.sizes else "l"
    size = 13 if uneven else 12
    inputs = Inputs(sample, ((rows, size), ("s", size)), "normal", 1)
    return runner.run(SplitCase(inputs, (Split(rows, outer, circulating="s"),), (parts,), uneven))


@pytest.mark.parametrize("sample", range(len(samples_of(NAME))))
def test_attention_passes_its_keys_around(sample: int) -> None:
    runner = OperatorRunner(attention(), OpOptions())
    for found in (run(runner, sample, 3, 2), run(runner, sample, 4, uneven=True)):
        assert found.compared is not None, found.refused or found.raised
        assert found.compared.count >= 4 and not found.compared.mismatches


def forgets(name: str) -> OperatorSpec:
    """Attention whose hook leaves an argument of the ring out."""
    spec = attention()
    assert spec.localize is not None
    right = spec.localize

    def localize(call: Call, shards: Shards) -> Call:
        made = right(call, shards)
        return Call(made.operator, made.args, {k: v for k, v in made.kwargs.items() if k != name}, made.outputs)

    return replace(spec, localize=localize)


@pytest.mark.parametrize(("name", "sample"), [("causal", 1), ("outer", 1), ("mask_of_keys", 10), ("enable_gqa", 14)])
def test_a_hook_that_forgets_is_found_out(name: str, sample: int) -> None:
    found = run(OperatorRunner(forgets(name), OpOptions()), sample, 3, 2)
    assert found.failed


def test_what_does_not_go_around_is_refused() -> None:
    runner = OperatorRunner(attention(), OpOptions())
    inputs = Inputs(0, (), "normal", 1)
    found = runner.run(SplitCase(inputs, (Split("b", circulating="s"),), (2,)))
    assert found.compared is None and "does not circulate" in found.refused
