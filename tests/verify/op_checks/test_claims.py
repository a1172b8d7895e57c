"""Every claim of an annotation is tested, whatever the samples list; one that no sample exercises is INCONCLUSIVE."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from op_registry.call import Call
from op_registry.rank_expression import block_start, index
from op_registry.registry import default_registry
from op_registry.samples.sample import F, I, S, U
from op_registry.spec import OperatorSpec, Refusal, Shards

from nnscaler.ir.operation_placement import RunPartial, Split
from tests.sampling import every
from verify.evidence.inputs.draw_values import varied
from verify.evidence.oracle.annotation_claims import SAID, claims_of, exercised_by
from verify.evidence.oracle.case_runner import OperatorRunner
from verify.evidence.oracle.enumerate_cases import enumerate_cases
from verify.evidence.split_case import Inputs, SplitCase
from verify.evidence.verify_op_options import Kind, OpOptions, Safeguards
from verify.operators.report_on_operator import verify_spec
from verify.results.report import Report
from verify.results.verdict import Verdict
from verify.self_test.operators.mutants.mutant import Hook, spec_of

OPTIONS = OpOptions(prove=False, explain=False)


def _unfrozen(name: str) -> OperatorSpec:
    """A built-in operator whose annotation has lost its `^` and `<`."""
    spec = default_registry().lookup(name)
    assert spec is not None
    annotation = spec.annotation

    def unfrozen(call: Call) -> Any:
        found = annotation(call) if callable(annotation) else annotation
        text, sizes = (found, {}) if isinstance(found, str) else found
        return re.sub(r"\^|<\w*", "", text), sizes

    return replace(spec, annotation=unfrozen)


@pytest.mark.parametrize(
    "name", ["aten.roll.default", "aten.softmax.int", "aten.cumsum.default", "aten.flip.default", "aten.tril.default"]
)
def test_an_identifier_is_split_whatever_the_samples_list(name: str) -> None:
    report = verify_spec(_unfrozen(name), replace(OPTIONS, fail_fast=True))
    assert report.verdict is Verdict.REFUTED
    assert {f.code for f in report.findings} <= {"annotation_wrong", "shard_raises"}


def _report(annotation: str, function: Callable[..., Tensor], *samples: Any, **options: Any) -> Report:
    return verify_spec(_sampled(annotation, function, samples), replace(OPTIONS, **options))


def _sampled(annotation: str, function: Callable[..., Tensor], samples: Any) -> OperatorSpec:
    spec = spec_of("an operator", annotation, function)
    return replace(spec, sample_inputs=lambda: list(samples)) if samples else spec


def _only_of(size: int) -> Callable[[Tensor], Tensor]:
    def function(x: Tensor) -> Tensor:
        """Runs on all shards of rows, and as a whole on `size` columns only."""
        if x.shape[1] > size:
            raise ValueError("too many columns")
        return x * 2

    return function


def test_a_size_of_one_leaves_the_claim_open() -> None:
    report = _report("a b -> a b", _only_of(1), (torch.randn(6, 1),))
    assert report.verdict is Verdict.INCONCLUSIVE
    (finding,) = report.findings
    assert finding.code == "claim_not_tested"
    assert finding.message == "no inputs of `an operator` test all of what `a b -> a b` says of `b`"
    said = finding.counter_example["not tested under `a b -> a b`"]
    assert said == "; ".join(f"`b` in {SAID[form]}" for form in ("contiguous", "strided", "unequal", "sections"))
    assert finding.help is not None and "a sample in which `b` is 12" in finding.help and "`b^`" in finding.help
    open_ = [check for check in report.checks if not check.verdict.passes]
    assert [check.name for check in open_] == ["split `b` (spatial)"]


@pytest.mark.parametrize(
    ("size", "left"), [(2, {"strided", "unequal"}), (3, {"strided"}), (5, {"strided"}), (6, set())]
)
def test_sizes_that_show_a_part_of_the_claims(size: int, left: set[str]) -> None:
    report = _report("a b -> a b", _only_of(size), (torch.randn(6, size),))
    found = "; ".join(finding.counter_example["not tested under `a b -> a b`"] for finding in report.findings)
    missing = {form for form, said in SAID.items() if f"`b` in {said}" in found}
    assert missing - {"sections"} == left
    assert ("sections" in missing) == (size in (2, 3, 5))
    assert report.verdict is (Verdict.INCONCLUSIVE if size < 6 else Verdict.TESTED_EXACT)


@pytest.mark.long
def test_other_sizes_are_tried_where_the_sample_s_own_do_not_divide() -> None:
    assert _report("a b -> a b", lambda x: x * 2, (torch.randn(1, 5),)).verdict is Verdict.TESTED_EXACT
    wrong = _report("a b -> a b", lambda x: x.flip(1), (torch.randn(6, 1),))
    assert wrong.verdict is Verdict.REFUTED


def test_a_second_sample_exercises_what_the_first_does_not() -> None:
    assert _report("a b -> a b", _only_of(6), (torch.randn(6, 1),), (torch.randn(4, 6),)).verdict.passes


def test_a_sample_on_which_the_operator_raises_is_said() -> None:
    report = _report("a b -> a b", _only_of(12), (torch.randn(6, 12),), (torch.randn(6, 18),))
    assert report.verdict is Verdict.INCONCLUSIVE
    assert report.findings[0].message == "on sample call 1 `an operator` raises ValueError: too many columns"


def _positions(x: Tensor, start: int = 0) -> Tensor:
    return x + torch.arange(start, start + x.shape[0], dtype=x.dtype)[:, None]


def _from_block(call: Call, shards: Shards) -> Call:
    size = call.tensors()[0].shape[0]
    return call.replace(1, "start", block_start("a", size, shards["a"])) if "a" in shards else call


def _never(call: Call, shards: Shards) -> Call:
    if "a" in shards:
        raise Refusal("not yet")
    return call


def _of_sections_too(call: Call, shards: Shards) -> Call:
    """Takes a shard of each section for one block."""
    if shards.get("a") and shards["a"][0].sections:
        return call.replace(1, "start", index(shards["a"][0].axis) * (call.tensors()[0].shape[0] // 2))
    return _from_block(call, shards)


@pytest.mark.parametrize(
    ("hook", "verdict"),
    [
        (_from_block, Verdict.TESTED_EXACT),
        (_never, Verdict.INCONCLUSIVE),
        (_of_sections_too, Verdict.REFUTED),
        (None, Verdict.REFUTED),
    ],
)
def test_what_the_hook_refuses_is_not_claimed(hook: Hook | None, verdict: Verdict) -> None:
    spec = spec_of("an operator", "a b -> a b", _positions, lambda: (torch.randn(12, 6),), hook)
    assert verify_spec(spec, OPTIONS).verdict is verdict


def _shifted(x: Tensor, flip: bool = False) -> Tensor:
    return x.flip(1) if flip else x * 2


@pytest.mark.long
def test_one_kind_of_call_shows_nothing_of_another() -> None:
    """The second call is wrong, and has nothing to split: it is asked with other sizes."""
    right = _report("a b -> a b", _shifted, (torch.randn(6, 12),))
    assert right.verdict is Verdict.TESTED_EXACT
    assert "`flip` was False in all calls: `sample_inputs` gives others" in right.notes
    both = _report("a b -> a b", _shifted, (torch.randn(6, 12),), (torch.randn(6, 1), True))
    assert both.verdict is Verdict.REFUTED
    same = _report("a b -> a b", _shifted, (torch.randn(6, 12),), (torch.randn(6, 1),))
    assert same.verdict is Verdict.TESTED_EXACT


@pytest.mark.long
def test_what_is_proved_of_one_kind_of_call_is_only_tested_of_another() -> None:
    def scaled(x: Tensor, sign: int = 1) -> Tensor:
        return x * 2 * sign

    one, two = (torch.randn(6, 12),), (torch.randn(6, 1), -1)
    assert _report("a b -> a b", scaled, one, prove=True).verdict is Verdict.PROVED_ALL_SIZES
    found = _report("a b -> a b", scaled, one, two, prove=True)
    assert {c.name: c.verdict for c in found.checks}["split `b` (spatial)"] is Verdict.TESTED_EXACT


def _masked(x: Tensor, mask: bool = False) -> Tensor:
    first = torch.arange(x.shape[1]) == 0
    return x.flip(1).masked_fill(first, float("-inf")) if mask else x * 2


def test_infinities_are_compared() -> None:
    """A call whose every output has some is no reason to look at the other call only."""
    report = _report("a b -> a b", _masked, (torch.randn(6, 12),), (torch.randn(6, 12), True))
    assert report.verdict is Verdict.REFUTED
    causal = _report("a s^ t^ -> a s^ t^", lambda x: x.masked_fill(torch.ones(x.shape[-2:]).triu(1) > 0, -math.inf))
    assert causal.verdict is Verdict.TESTED_EXACT


def of_four(x: Tensor, d: int = 4) -> Tensor:
    return x.unflatten(1, (-1, d)).softmax(-1).flatten(1)


@pytest.mark.parametrize(
    ("annotation", "function", "samples"),
    [
        ("a b^ -> a k^", lambda x: x.topk(3, -1)[0], ()),
        ("a (2 b) -> a b", lambda x: x.chunk(2, 1)[0] * x.chunk(2, 1)[1], ((torch.randn(4, 6),),)),
        ("b (h d^) -> b (h d^)", of_four, ((torch.randn(4, 8),),)),
    ],
)
def test_sizes_that_depend_on_each_other(annotation: str, function: Callable[..., Tensor], samples: Any) -> None:
    assert verify_spec(_sampled(annotation, function, samples), OPTIONS).verdict is Verdict.TESTED_EXACT


def heads(x: Tensor, h: int) -> Tensor:
    return x.unflatten(1, (h, -1)).softmax(-1).flatten(1)


def all_heads(x: Tensor, h: int) -> Tensor:
    return x.unflatten(1, (h, -1)).softmax(1).flatten(1)


@pytest.mark.long
def test_a_size_among_the_arguments_goes_with_it() -> None:
    """Two heads show no unequal shards: there are more, and the number says so."""
    sample = (torch.randn(4, 8), 2)
    assert _report("b (h d^) -> b (h d^)", heads, sample).verdict is Verdict.TESTED_EXACT
    assert _report("b (h d^) -> b (h d^)", all_heads, sample).verdict is Verdict.REFUTED


def test_strided_blocks_in_every_number_of_parts() -> None:
    cases = {
        (case.parts[0], case.choices[0].outer)
        for _, case in enumerate_cases(spec_of("an operator", "a b -> a b", lambda x: x * 2), OPTIONS)
        if len(case.choices) == 1 and isinstance(case.choices[0], Split) and case.choices[0].outer > 1
    }
    assert {parts for parts, _ in cases} == {2, 3, 4}


@pytest.mark.parametrize("dims", every(3, [5, 6, 7]))
def test_one_identifier_over_two_axes_is_always_tried(dims: int) -> None:
    names = " ".join("abcdefg"[:dims])
    spec = spec_of("an operator", f"{names} -> {names}", lambda x: x * 2)
    twice = {
        case.choices[0].identifier
        for _, case in enumerate_cases(spec, OPTIONS)
        if len(case.choices) == 2
        and isinstance(case.choices[0], Split)
        and isinstance(case.choices[1], Split)
        and case.choices[0].identifier == case.choices[1].identifier
    }
    assert twice == set(names.split())


def test_a_budget_of_one_case_leaves_no_claim_out() -> None:
    report = _report("a b -> a b", lambda x: x * 2, (torch.randn(6, 12),), cases=1)
    assert report.verdict.passes
    # four claims of each, a case beyond the number that stands in the operator's code, and one on other values
    assert [check.detail for check in report.checks if check.name.startswith("split")] == ["6 cases"] * 2


def test_what_is_claimed_is_read_off_the_annotation() -> None:
    spec = spec_of("an operator", "(a b) [c d] e^ -> (a b) [c d] e^", lambda x, a, c: x * 2)
    runner = OperatorRunner(replace(spec, linear=(frozenset({0}),)), OPTIONS)
    sizes = (("a", 1), ("b", 1), ("c", 1), ("d", 1), ("e", 1))
    signature = runner.prepare(Inputs(None, sizes, "normal")).signature
    targets = ["a", "c", frozenset({0})]
    found = {(claim.target, claim.form) for claim in claims_of(signature, targets, Safeguards())}
    assert found == {("a", f) for f in ("contiguous", "strided", "unequal")} | {
        ("c", "contiguous"),
        (frozenset({0}), "partial"),
    }
    without = Safeguards(outers=False, uneven=False, sections=False)
    assert {claim.form for claim in claims_of(signature, ["a"], without)} == {"contiguous"}


def test_which_claim_a_case_is_about() -> None:
    runner = OperatorRunner(spec_of("an operator", "a b -> a b", lambda x: x * 2), OPTIONS)
    inputs = Inputs(None, (("a", 12), ("b", 5)), "normal")
    signature = runner.prepare(inputs).signature

    def form(*choices: Any, uneven: bool = False, dtype: str = "float64") -> str | None:
        case = SplitCase(replace(inputs, dtype=dtype), choices, (2,) * len(choices), uneven)
        claim = exercised_by(case, signature)
        return None if claim is None else claim.form

    assert form(Split("a")) == "contiguous" and form(Split("a", 2)) == "strided"
    assert form(Split("a"), uneven=True) == "unequal" and form(Split("a", sections=(4, 8))) == "sections"
    assert form(RunPartial(frozenset({0}))) == "partial"
    assert form(Split("a"), Split("b")) is None and form(Split("a"), dtype="bfloat16") is None


def test_a_sample_that_is_made_larger_gets_values_that_differ_along_the_dim() -> None:
    """Elements that are only repeated are the same in each order."""
    spec = default_registry().lookup("aten.flip.default")
    assert spec is not None
    wrong = replace(spec, annotation="a b -> a b")
    for row in (S("flip", F(6, 1), [1]), S("flip", U(6, 1), [1]), S("flip", I(6, 1), [1])):
        runner = OperatorRunner(wrong, OPTIONS)
        runner.rows = (row,)
        report = verify_spec(wrong, OPTIONS, runner=runner)
        assert report.verdict is Verdict.REFUTED, str(row)


@pytest.mark.parametrize("kind", ["normal", "integers", "given"])
def test_values_of_a_tensor_that_is_made_larger(kind: Kind) -> None:
    def larger(before: Tensor) -> Tensor:
        resized = before.index_select(-1, torch.arange(12) % before.shape[-1])
        return varied(before, resized, kind, torch.Generator().manual_seed(0))

    positive = torch.rand(6, 1) + 0.5
    assert larger(positive).min() >= 0.5 and len(set(larger(positive)[0].tolist())) > 1
    rising = torch.tensor([-1.0, 0.5, 2.0])
    assert torch.equal(larger(rising), larger(rising).sort().values)
    signed = torch.randn(6, 1)
    assert len(set(larger(signed)[0].tolist())) > 1
    same = torch.randn(3, 4)
    assert varied(same, same, kind, torch.Generator()) is same


def _chaotic(unit: float) -> Callable[[Tensor], Tensor]:
    """Make what doubles an error in each of 32 steps; kernels round otherwise for another number of rows."""

    def function(x: Tensor) -> Tensor:
        h = torch.sigmoid(x * (1 + unit * x.shape[0]))
        for _ in range(32):
            h = 3.99 * h * (1 - h)
        return h

    return function


@pytest.mark.long
def test_what_rounding_makes_as_large_as_a_wrong_result_decides_nothing() -> None:
    right, wrong = (_report("a b -> a b", _chaotic(unit), (torch.randn(6, 4),)) for unit in (2.0**-53, 2.0**-12))
    assert right.verdict is Verdict.INCONCLUSIVE
    assert wrong.verdict is Verdict.REFUTED
