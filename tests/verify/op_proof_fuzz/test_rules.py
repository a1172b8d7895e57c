"""Every transfer rule of the prover against torch. `-m long` compares 60 claims of each; the default compares 10."""

from __future__ import annotations

from functools import cache

import pytest

from op_registry.samples import SAMPLES
from op_registry.samples.sample import Sample

from tests.sampling import every
from tests.verify.op_proof_fuzz.cover import COVER
from tests.verify.op_proofs.test_registry import TESTED
from verify.evidence.dimension_types.rules import RULES, conclude, rule_of
from verify.self_test.rules.calls import DrawnCall, DrawnCalls, drawn_calls
from verify.self_test.rules.direct import direct_calls
from verify.self_test.rules.planted import PLANTED
from verify.self_test.rules.rule_fuzz import QUICK, by_overload
from verify.self_test.rules.run import ENOUGH, fuzz_in_children, fuzz_rules, missed_plants

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


@cache
def _drawn() -> DrawnCalls:
    return drawn_calls([s for s in _all() if str(s).partition("(")[0] in COVER])


@cache
def _calls() -> dict[str, list[DrawnCall]]:
    return by_overload([*_drawn().calls, *direct_calls()])


@pytest.mark.long
def test_samples_lead_to_every_rule() -> None:
    reached = set(_calls())
    assert not set(RULES) - reached
    assert sum(rule_of(found[0].overload) is not None for found in _calls().values()) > 330
    assert sum("backward" in name for name in reached) > 50
    assert not COVER - {str(s).partition("(")[0] for s in _all()}
    assert {text.partition("(")[0] for text in _drawn().untraced} <= UNTRACED, _drawn().untraced


@pytest.mark.parametrize("first", every(6, range(6)))
def test_no_rule_is_unsound(first: int) -> None:
    ruled = {name: found for name, found in list(_calls().items())[first::6] if rule_of(found[0].overload) is not None}
    results = fuzz_in_children(ruled, conclude, seed=1, effort=QUICK)
    assert [unsound for result in results.values() for unsound in result.unsound] == []
    assert sum(result.verified for result in results.values()) > 800


def test_every_planted_wrong_rule_is_found() -> None:
    assert len(PLANTED) >= 40
    assert missed_plants(_calls(), PLANTED) == []


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
