"""Bugs that only one kind of case shows: each is planted, and seen caught; without it, the operator passes."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from op_registry.spec import OperatorSpec

import nnscaler
import verify
from tests.sampling import every
from verify.evidence.oracle.check_by_cases import TargetOutcome, as_check
from verify.evidence.oracle.enumerate_cases import enumerate_cases
from verify.evidence.verify_op_options import OpOptions, Safeguards
from verify.operators.report_on_operator import verify_spec
from verify.results.finding import Finding
from verify.results.report import Report
from verify.results.verdict import Verdict


def only_finding(function: Callable[..., Any], annotation: str, **more: Any) -> Finding:
    report = verify_spec(OperatorSpec(function.__name__, annotation, target=function, **more))
    assert report.exit_code == 1, report.to_json()
    return report.findings[0]


def even_only(x: Tensor) -> Tensor:
    """Halves that it swaps: right wherever a shard is a whole number of pairs."""
    return x.flip(0) if x.shape[0] % 2 else x


def test_odd_shards() -> None:
    assert only_finding(even_only, "a b -> a b").counter_example["identifier"] == "a"


def four_parts(x: Tensor) -> Tensor:
    """Wrong on shards of three rows: a quarter of twelve."""
    return x * 2 if x.shape[0] != 3 else x


def test_four_parts() -> None:
    finding = only_finding(four_parts, "a b^ -> a b^")
    assert finding.counter_example["identifier"] == "a"


def both_axes(x: Tensor) -> Tensor:
    """Wrong only where both dims are cut."""
    return x * 2 if tuple(x.shape) == (4, 9) else x


def test_two_axes_at_once() -> None:
    safeguards = Safeguards(parts=(2,), uneven=False, small=False)
    report = verify_spec(OperatorSpec("both_axes", "a b -> a b", target=both_axes), OpOptions(safeguards=safeguards))
    assert report.exit_code == 1
    assert report.findings[0].counter_example["parts"] == "3 x 2"
    assert "mesh of two axes" in report.findings[0].message


def squeezed(x: Tensor) -> Tensor:
    return x.squeeze()


def test_shards_of_one_element() -> None:
    finding = only_finding(squeezed, "a b -> a b")
    assert finding.counter_example["shapes"] == "(2, 2)"  # in two shards of one element


def rounded(x: Tensor) -> Tensor:
    """Right in float64, and wrong on narrow shards in bfloat16."""
    return x * 2 if x.dtype != torch.bfloat16 or x.shape[1] > 6 else x


def test_bfloat16() -> None:
    finding = only_finding(rounded, "a^ b -> a^ b")
    assert finding.counter_example["dtype"] == "bfloat16"
    assert finding.cause is not None
    assert "float64 agrees" in finding.cause


def negative_only(x: Tensor) -> Tensor:
    """`relu` that sums: right on positive inputs."""
    return x.sum(1).relu()


@pytest.mark.long
def test_sign_varying_inputs() -> None:
    assert only_finding(negative_only, "a k+ -> a").counter_example["identifier"] == "k"


class Scale(torch.autograd.Function):
    """Looks at whether the other input asks for a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return gradient * w * (1 if ctx.needs_input_grad[1] else 2), gradient * x


@pytest.mark.long
def test_subsets_of_inputs_that_ask_for_gradients() -> None:
    def scale(x: Tensor, w: Tensor) -> Tensor:
        return Scale.apply(x, w)  # type: ignore[no-any-return, no-untyped-call]

    finding = only_finding(scale, "a b, a b -> a b")
    assert finding.code == "gradient_is_not_derivative"
    assert "only input 0 asks" in finding.message


def strided_only(x: Tensor) -> Tensor:
    """Takes every second element: contiguous blocks of even length are right."""
    return x.unflatten(0, (-1, 2)).flip(1).flatten(0, 1)


def test_shards_that_are_not_a_whole_number_of_pairs_raise() -> None:
    finding = only_finding(strided_only, "a b -> a b")
    assert finding.code in ("shard_raises", "annotation_wrong")


def counted(x: Tensor) -> tuple[Tensor, int]:
    return x * 2, x.shape[0]


def test_outputs_that_are_no_tensors_must_not_depend_on_the_split() -> None:
    finding = only_finding(counted, "a b^ -> a b^, ?")
    assert finding.counter_example["tensor"] == "outputs that are no tensors"


def constant(x: Tensor) -> Tensor:
    return torch.ones_like(x)


def test_a_constant_result_is_void_and_said_so() -> None:
    report = verify_spec(OperatorSpec("constant", "a b -> a b", target=constant))
    assert report.exit_code == 0
    assert any("constant along the split" in check.detail for check in report.checks)


def test_what_a_wrong_variant_survives_is_open() -> None:
    outcome = TargetOutcome(cases=3, count=6)
    outcome.variants["output 0", "swapped"] = (True, True, frozenset({0, 1, 2}))
    outcome.variants["output 0", "strided"] = (False, False, frozenset({0, 1, 2}))
    assert as_check("split `a`", outcome, 0.0).verdict is Verdict.INCONCLUSIVE
    outcome.variants["output 0", "strided"] = (False, True, frozenset({0, 1}))  # constant, but on two draws only
    assert as_check("split `a`", outcome, 0.0).verdict is Verdict.INCONCLUSIVE
    outcome.variants["output 0", "strided"] = (False, True, frozenset({0, 1, 2}))
    assert as_check("split `a`", outcome, 0.0).verdict is Verdict.TESTED_EXACT


@pytest.mark.long
def test_the_counter_example_is_small() -> None:
    def total(x: Tensor, w: Tensor) -> Tensor:
        return torch.tanh(x @ w)

    finding = only_finding(total, "m k+, k+ n -> m n")
    assert finding.counter_example["shapes"] == "(1, 2), (2, 1)"
    assert finding.counter_example["parts"] == "2"
    assert {"expected", "found"} <= set(finding.counter_example)


def test_cases_follow_from_the_seed() -> None:
    spec = OperatorSpec("double", "a b -> a b", target=lambda x: x * 2)
    one, two = ([case for _, case in enumerate_cases(spec, OpOptions(seed=4))] for _ in range(2))
    assert one == two
    assert len(one) > 40


def test_a_budget_of_cases() -> None:
    spec = OperatorSpec("double", "a b -> a b", target=lambda x: x * 2)
    report = verify_spec(spec, OpOptions(cases=5))
    split = [check for check in report.checks if check.name.startswith("split")]
    assert all(check.count <= 10 for check in split)
    assert json.loads(report.to_json())["verdict"] == "VERIFIED"


def sizes_that_crash(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """CPU attention does not check that keys and values are equally many; meta does."""
    return torch.nn.functional.scaled_dot_product_attention(q, k, v)


def test_shapes_are_tried_on_the_meta_device_first() -> None:
    finding = only_finding(sizes_that_crash, "b h l^ e^, b h s^ e^, b h t^ v -> b h l^ v")
    assert finding.code == "annotation_does_not_fit"


@pytest.mark.long
@pytest.mark.parametrize("seed", every(5, range(20)))
def test_right_operators_pass_under_many_seeds(seed: int) -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT / 8).softmax(-1) @ v

    report = verify_spec(
        OperatorSpec("attention", "b l e^, b s^ e^, b s^ v -> b l v", target=attention),
        OpOptions(seed=seed, prove=False),
    )
    assert report.exit_code == 0, report.to_json()


def test_ids_are_drawn_below_the_size_of_their_table() -> None:
    def look_up(ids: Tensor, table: Tensor) -> Tensor:
        return table[ids]

    report = verify_spec(OperatorSpec("look_up", "b t, v^ d -> b t d", target=look_up))
    assert report.exit_code == 0, report.to_json()
    assert any("integers below `v`" in note for note in report.notes)
    assert only_finding(look_up, "b t, v+ d -> b t d").counter_example["identifier"] == "v"


@pytest.mark.long
def test_masks_are_drawn_as_booleans() -> None:
    def masked(x: Tensor, mask: Tensor) -> Tensor:
        return x.masked_fill(mask, 0.0)

    report = verify_spec(OperatorSpec("masked", "a b, a b -> a b", target=masked))
    assert report.exit_code == 0, report.to_json()
    assert any("booleans" in note for note in report.notes)


def test_an_operator_that_keeps_tensors_between_calls() -> None:
    """Its tables must not be left on the meta device by the trial of shapes."""
    tables: dict[int, Tensor] = {}

    def rotate(x: Tensor) -> Tensor:
        size = x.shape[-1]
        if size not in tables:
            tables[size] = torch.arange(size, dtype=torch.float64, device=x.device).cos()
        return x * tables[size].to(x.dtype)

    report = verify_spec(OperatorSpec("rotate", "a b^ -> a b^", target=rotate), OpOptions(prove=False))
    assert report.exit_code == 0, report.to_json()
    assert all(table.device.type == "cpu" for table in tables.values())


@pytest.mark.long
def test_partial_sums_that_pass_through_are_derived_and_tested() -> None:
    def mix(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
        return (x + y) * w

    def shift(x: Tensor) -> Tensor:
        return x + 1

    report = verify_spec(OperatorSpec("mix", "a b, a b, b -> a b", target=mix), OpOptions(prove=False))
    assert any("inputs [0, 1]" in note for note in report.notes), report.notes
    assert any("inputs [2]" in note for note in report.notes), report.notes
    report = verify_spec(OperatorSpec("shift", "a b -> a b", target=shift), OpOptions(prove=False))
    assert not any("partial sums" in note for note in report.notes)


def test_frozen_identifiers_that_could_be_split_are_said() -> None:
    def double(x: Tensor) -> Tensor:
        return x * 2

    report = verify_spec(OperatorSpec("double", "a b^ -> a b^", target=double), OpOptions(prove=False, suggest=True))
    assert report.exit_code == 0
    assert any('"a b -> a b" holds (tested)' in note for note in report.notes), report.notes


def test_values_that_no_draw_hits_are_found_by_the_attempt_at_a_proof() -> None:
    def rare(x: Tensor) -> Tensor:
        """The first element of a shard counts twice, if it is 41.5."""
        return torch.where((x == 41.5) & (torch.arange(x.shape[1]) == 0), 2 * x, x)

    report = verify_spec(OperatorSpec("rare", "a^ b -> a^ b", target=rare))
    assert report.exit_code == 1, report.to_json()
    assert "41.5" in str(report.findings[0].counter_example) or "83/2" in str(report.findings[0].counter_example)


class Scaled(torch.autograd.Function):
    """Its backward has gradients for the tensors only, as is usual where the rest has defaults."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, factor: float = 2.0) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.factor = factor
        return x * w * factor

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return gradient * w * ctx.factor, gradient * x * ctx.factor


@pytest.mark.long
def test_arguments_of_an_autograd_function_that_have_defaults_are_left_out() -> None:
    registered: Any = nnscaler.register_op("a b, a b -> a b", name="safeguards_scaled")(Scaled)
    report = verify.verify_op(registered, isolate=False)
    assert report.exit_code == 0, report.to_json()


def test_offsets_keep_their_order() -> None:
    def segments(x: Tensor, ends: Tensor) -> Tensor:
        starts = torch.cat([ends.new_zeros(1), ends[:-1]])
        assert bool((ends > starts).all()), "offsets out of order"
        return torch.stack([x[int(a) : int(b)].sum(0) for a, b in zip(starts, ends, strict=True)])

    def sample() -> tuple[Tensor, Tensor]:
        return torch.randn(12, 6, dtype=torch.float64), torch.tensor([3, 5, 12])

    report = verify_spec(
        OperatorSpec("segments", "n^ d, s^ -> s^ d", target=segments, sample_inputs=sample), OpOptions(prove=False)
    )
    assert report.exit_code == 0, report.to_json()


@pytest.mark.long
def test_ids_that_are_all_alike_show_nothing() -> None:
    """Every wrong variant equals the right result, because the sample's ids are constant: that is no proof. An id of -1
    among them shows what is wrong, where the operator takes it."""

    def reverse(w: Tensor, ids: Tensor) -> Tensor:
        return w[ids.flip(0)]

    def from_zero(w: Tensor, ids: Tensor) -> Tensor:
        if int(ids.min()) < 0:
            raise ValueError("ids begin at zero")
        return reverse(w, ids)

    def sample() -> tuple[Tensor, Tensor]:
        return torch.randn(9, 5, dtype=torch.float64), torch.full((12,), 3)

    def found(target: Callable[..., Tensor], **safeguards: Any) -> Report:
        spec = OperatorSpec("reverse", "v^ d, t -> t d", target=target, sample_inputs=sample)
        return verify_spec(spec, OpOptions(prove=False, safeguards=Safeguards(**safeguards)))

    report = found(from_zero)
    assert report.verdict is Verdict.INCONCLUSIVE
    assert [f.code for f in report.findings] == ["mutant_survived"]
    assert found(from_zero, mutants=False).exit_code == 0  # what the wrong variants are for
    assert [f.code for f in found(reverse, mutants=False).findings] == ["annotation_wrong"]


def turned_pairs(x: Tensor) -> Tensor:
    """Positions turn the halves of each vector: of an odd size it would make another one."""
    half = x.shape[-1] // 2
    first, second = x.chunk(2, -1)
    angles = torch.arange(x.shape[1], dtype=x.dtype)[:, None] * 100 ** (-torch.arange(half, dtype=x.dtype) / half)
    return torch.cat([first * angles.cos() - second * angles.sin(), first * angles.sin() + second * angles.cos()], -1)


@pytest.mark.long
def test_what_halves_a_size_is_tried_on_even_ones() -> None:
    report = verify_spec(OperatorSpec("turned_pairs", "b s^ d^ -> b s^ d^", target=turned_pairs))
    assert report.exit_code == 0, report.to_json()
    assert "all sizes were even: it raises on others, or gives other shapes than its annotation" in report.notes
    assert only_finding(turned_pairs, "b s d^ -> b s d^").counter_example["identifier"] == "s"
    assert only_finding(turned_pairs, "b s^ d^ -> b d^ s^").code == "annotation_does_not_fit"


def scaled_in_float16(x: Tensor) -> Tensor:
    if x.dtype == torch.float16:
        x = x / (x.abs().amax() / 1e4).clamp(min=1.0)
    return x * 2


def normed_in_float32(x: Tensor) -> Tensor:
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def test_a_proof_in_float64_says_where_another_dtype_goes_another_way() -> None:
    found = [
        verify_spec(OperatorSpec(operator.__name__, "a b^ -> a b^", target=operator))
        for operator in (scaled_in_float16, normed_in_float32)
    ]
    assert [report.verdict for report in found] == [Verdict.PROVED_BOUNDED, Verdict.PROVED_ALL_SIZES]
    (split,) = (check for check in found[0].checks if check.name.startswith("split `a`"))
    assert "calls other functions in float16" in split.detail


def centred_frames(x: Tensor) -> Tensor:
    return x - x.mean(1, keepdim=True) if x.dim() == 5 else x * 2


def test_a_wildcard_stands_for_as_many_dims_as_the_code_asks_for() -> None:
    assert only_finding(centred_frames, "* -> *").counter_example["shapes"].count(",") >= 4
