"""Transfer rules of the prover against torch. By default 10 claims are compared of each rule that a 36th of them
reaches; `-m long` takes all samples, and compares 60 claims of each rule."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import pytest

from op_registry.samples import SAMPLES
from op_registry.samples.sample import Sample

from tests.sampling import every
from tests.verify.op_proof_fuzz.cover import COVER
from tests.verify.op_proofs.test_registry import TESTED
from verify.evidence.dimension_types.rules import RULES, conclude, rule_of
from verify.self_test.transfer_rules.draw_calls_and_states import DrawnCall, DrawnCalls, drawn_calls
from verify.self_test.transfer_rules.handwritten_calls import direct_calls
from verify.self_test.transfer_rules.rule_fuzz import QUICK, by_overload
from verify.self_test.transfer_rules.run import ENOUGH, PLANTED, fuzz_in_children, fuzz_rules, missed_plants

# torch's own kernels do not run on symbolic sizes, or their results' sizes depend on values.
UNTRACED = {
    *("pad", "one_hot", "__lshift__.Tensor", "__rshift__.Tensor", "addbmm", "bilinear", "trace", "multi_margin_loss"),
    *("multilabel_margin_loss", "ctc_loss.Tensor", "ctc_loss.IntList", "affine_grid_generator"),
    *("lstm.data", "gru.data", "rnn_tanh.data", "rnn_relu.data", "lstm.input", "gru.input", "lstm_cell", "gru_cell"),
    *("fft_fftn", "fft_hfft", "fft_hfft2", "fft_hfftn", "fft_ifft2", "fft_ihfft", "fft_ihfft2", "fft_ihfftn"),
    *("fft_irfft", "fft_irfft2", "fft_irfftn", "fft_rfft", "fft_rfft2", "fft_rfftn", "stft", "stft.center", "istft"),
    "_upsample_bicubic2d_aa",
}


def _all() -> list[Sample]:
    return [s for s in SAMPLES if s.operator not in TESTED]


PARTS = 36


@cache
def _drawn(part: int) -> DrawnCalls:
    """Of each 36th of the samples that lead to every rule: to draw their calls takes longest."""
    return drawn_calls([s for s in _all() if str(s).partition("(")[0] in COVER][part::PARTS])


@cache
def _calls(*parts: int) -> dict[str, list[DrawnCall]]:
    return by_overload([*(call for part in parts for call in _drawn(part).calls), *direct_calls()])


@pytest.mark.long
def test_samples_lead_to_every_rule() -> None:
    calls = _calls(*range(PARTS))
    reached = set(calls)
    assert not set(RULES) - reached
    assert sum(rule_of(found[0].overload) is not None for found in calls.values()) > 330
    assert sum("backward" in name for name in reached) > 50
    assert not COVER - {str(s).partition("(")[0] for s in _all()}
    untraced = {text.partition("(")[0] for part in range(PARTS) for text in _drawn(part).untraced}
    assert untraced <= UNTRACED, untraced


@pytest.mark.long
@pytest.mark.parametrize("part", every(PARTS, range(PARTS)))
def test_no_rule_is_unsound(part: int) -> None:
    ruled = {name: found for name, found in _calls(part).items() if rule_of(found[0].overload) is not None}
    results = fuzz_in_children(ruled, conclude, seed=1, effort=QUICK)
    assert [unsound for result in results.values() for unsound in result.unsound] == []
    assert sum(result.verified for result in results.values()) > 800


@pytest.mark.parametrize(("parts", "least"), every(2, [((13,), 14), (range(PARTS), len(PLANTED))]))
def test_planted_wrong_rules_are_found(parts: Sequence[int], least: int) -> None:
    """All of them on the calls of all samples; few calls of an overload do not show each mistake."""
    calls = _calls(*parts)
    planted = [wrong for wrong in PLANTED if wrong.overload in calls]
    assert len(PLANTED) >= 40 and len(planted) - len(missed_plants(calls, planted)) >= least


@pytest.mark.long
def test_all_samples_reach_more_and_what_is_not_traced_is_known() -> None:
    drawn = drawn_calls(_all())
    assert {text.partition("(")[0] for text in drawn.untraced} == UNTRACED
    calls = by_overload([*drawn.calls, *direct_calls()])
    assert sum(rule_of(found[0].overload) is not None for found in calls.values()) > 350


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(3))
def test_every_rule_thoroughly(seed: int) -> None:
    report = fuzz_rules(seed)
    assert report.passed, "\n".join(report.lines())
    assert min(result.verified for result in report.results.values()) >= ENOUGH
