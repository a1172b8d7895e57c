"""The level on programs, right and wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import inf
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.sampling import every
from tests.verify.low_precision.conftest import Case, make_case
from verify.programs.checks.input_and_outcome import CheckOutcome
from verify.programs.low_precision import run as level
from verify.programs.low_precision.judge_against_noise import FIRST_DRAWS, MOST_DRAWS, PASS_RATIO
from verify.programs.low_precision.noise_statistics import (
    Noise,
    choose_loss_scale,
    draw,
    parts_of,
    subject_of,
    targets_of,
)
from verify.results.finding import Finding
from verify.results.finding_codes import CODES
from verify.results.report import Check
from verify.results.verdict import Verdict, merge

Batch = dict[str, Tensor]
DTYPES = ("bfloat16", "float16")


def verdict_of(outcomes: list[CheckOutcome]) -> Verdict:
    codes = {finding.code for outcome in outcomes for finding in outcome.findings}
    assert codes <= set(CODES)
    return merge(outcome.check.verdict for outcome in outcomes)


@pytest.mark.long
def test_a_right_program_passes_in_both(case: Case) -> None:
    outcomes, rows = case.outcomes(*DTYPES)
    assert verdict_of(outcomes) is Verdict.TESTED_CALIBRATED
    assert {outcome.check.name for outcome in outcomes} == {
        f"{what} in {dtype}"
        for what in ("loss", "gradients", "parameters", "buffers", "replicas bitwise equal")
        for dtype in DTYPES
    }
    assert {row.dtype for row in rows} == set(DTYPES)
    assert all(row.ratio <= PASS_RATIO for row in rows)
    gradients = next(o.check for o in outcomes if o.check.name == "gradients in bfloat16")
    assert "worst ratio to noise" in gradients.detail
    assert not any(row.drowned for row in rows if row.kind != "gradient")


WRONG = {
    "all_reduce missing": ("comm.all_reduce(linear_1, self.tp)", "linear_1"),
    "averaged": ("comm.all_reduce(linear_1, self.tp)", "comm.all_reduce(linear_1, self.tp) / 2"),
    "bias on every rank": ("comm.keep_first(self.layers_0_down_bias, self.tp)", "self.layers_0_down_bias"),
    "gradient not summed": (
        '"layers.0.norm.weight", (8,), "float32", {}, reduce=("dp",)',
        '"layers.0.norm.weight", (8,), "float32", {}, reduce=()',
    ),
    "backward all_reduce missing": ("comm.replicate(layer_norm, self.tp)", "layer_norm"),
    "sum in float8": (
        "comm.all_reduce(linear_1, self.tp)",
        "comm.all_reduce(linear_1.to(torch.float8_e5m2).to(linear_1.dtype), self.tp)",
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("name", every(2, WRONG))
def test_a_wrong_program_is_refuted(case: Case, name: str) -> None:
    outcomes, rows = case.edited(*WRONG[name]).outcomes("float16")
    assert verdict_of(outcomes) is Verdict.REFUTED
    assert max(row.ratio for row in rows) > 16
    finding = next(f for o in outcomes if o.check.verdict is Verdict.REFUTED for f in o.findings)
    assert finding.counter_example["tensor"] and ("float16" in finding.message or finding.code == "replicas_differ")


@pytest.mark.long
@pytest.mark.parametrize("name", every(3, ["all_reduce missing", "averaged", "gradient not summed"]))
def test_in_bfloat16_too(case: Case, name: str) -> None:
    outcomes, _ = case.edited(*WRONG[name]).outcomes("bfloat16")
    assert verdict_of(outcomes) is Verdict.REFUTED


@pytest.mark.long
def test_what_overflows_in_float16_alone_is_seen_there(case: Case) -> None:
    wrong = case.edited("comm.all_reduce(linear_1, self.tp)", "comm.all_reduce(linear_1 * 1e6, self.tp) / 1e6")
    assert verdict_of(wrong.outcomes("bfloat16")[0]).passes
    outcomes, _ = wrong.outcomes("float16")
    assert verdict_of(outcomes) is Verdict.REFUTED
    assert any(finding.code == "not_finite" for outcome in outcomes for finding in outcome.findings)


def test_gradients_missing_and_extra_are_refuted(case: Case) -> None:
    def lost(precision: str | None, scale: float) -> object:
        comparison = case.run(precision, scale)
        results = tuple(
            replace(
                result,
                gradients=tuple(
                    tuple((s, a, n, None if n == "layers.0.up.bias" else t) for s, a, n, t in step)
                    for step in result.gradients
                ),
            )
            for result in comparison.results
        )
        return replace(comparison, results=results)

    outcomes, _ = level.low_precision_outcomes(case.seed, case, case.reference, ["bfloat16"], lost)  # type: ignore[arg-type]
    found = [f for outcome in outcomes for f in outcome.findings]
    assert [f.code for f in found] == ["gradient_missing"] * 2
    assert {f.counter_example["tensor"] for f in found} == {"layers.0.up.bias"}


def test_a_program_that_does_not_run_says_so(case: Case) -> None:
    failed = CheckOutcome(Check("program ran", Verdict.REFUTED, 1, 1), (Finding("rank_raises", "rank 0 raises"),))
    outcomes, rows = level.low_precision_outcomes(case.seed, case, case.reference, ["float16"], lambda p, s: failed)
    assert [o.check.name for o in outcomes] == ["program ran in float16"] and rows == ()
    assert verdict_of(outcomes) is Verdict.REFUTED and outcomes[0].findings == failed.findings


@pytest.mark.long
def test_near_the_threshold_more_draws_then_inconclusive(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    most = 2 * FIRST_DRAWS
    assert most < MOST_DRAWS
    monkeypatch.setattr(level, "MOST_DRAWS", most)
    calibration = level.calibrate(case.seed, case, case.reference, "bfloat16")
    comparison = case.run("bfloat16", 1.0)
    # a program whose errors are 4 to 16 times its noise, however often it is drawn
    exact = level.draw_noise(calibration.subject, calibration.targets, 0, most)
    key = ("gradient", 0, "layers.0.up.weight")
    right = calibration.targets[key].value
    shifted = right * (1 + 8 * exact.largest[key][2])
    real = level.measured

    def near(*args: object) -> object:
        found = real(*args)  # type: ignore[arg-type]
        from verify.programs.low_precision.judge_against_noise import _error

        return tuple(replace(m, error=_error(shifted, calibration.targets[key])) if m.key == key else m for m in found)

    monkeypatch.setattr(level, "measured", near)
    result = level.compare(calibration, comparison)
    assert result.draws == most
    assert merge(o.check.verdict for o in result.outcomes) is Verdict.INCONCLUSIVE
    (finding,) = [f for o in result.outcomes for f in o.findings]
    assert finding.code == "near_threshold" and "layers.0.up.weight" in finding.message


class Steep(nn.Module):
    """Finite in float64, infinite in float16."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return (self.inner(x) * 1e5).square().mean() * 1e-10


def test_a_model_that_overflows_is_inconclusive_and_not_a_pass(tmp_path: Path) -> None:
    case = make_case(Steep(), {"x": torch.ones(6, 4)}, tmp_path, ranks=2, plan="dp=2")
    outcomes, rows = case.outcomes("float16")
    assert [o.check.verdict for o in outcomes] == [Verdict.INCONCLUSIVE] and rows == ()
    assert outcomes[0].findings[0].code == "reference_not_finite"
    assert verdict_of(case.outcomes("bfloat16")[0]).passes


class Islands(nn.Module):
    """A model that computes in float32 where it needs more range than float16 has."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        wide = (self.inner(x) * 300).float().square().mean(-1)
        return (wide * 1e-4).to(x.dtype).mean()


def test_a_model_in_half_precision_keeps_its_islands(tmp_path: Path) -> None:
    x = torch.rand(6, 4, generator=torch.Generator().manual_seed(0)).half() + 1
    case = make_case(Islands().half(), {"x": x}, tmp_path, ranks=3, plan="dp=3")
    asked = []

    def run(precision: str | None, scale: float) -> object:
        asked.append(precision)
        return case.run(precision, scale)

    outcomes, _ = level.low_precision_outcomes(case.seed, case, case.reference, ["float16"], run)  # type: ignore[arg-type]
    assert asked == [None]
    assert verdict_of(outcomes).passes


def test_a_draw_is_repeatable_and_draws_differ(case: Case) -> None:
    subject = subject_of(case.model, case.sample, torch.bfloat16, case.reference, (2, 3), 0)
    one, again, other = draw(subject, 1), draw(subject, 1), draw(subject, 3)
    name = "layers.0.up.weight"
    gradients = [run.gradients[0][name] for run in (one, again, other)]
    assert all(g is not None for g in gradients)
    assert torch.equal(gradients[0], gradients[1])  # type: ignore[arg-type]
    assert not torch.equal(gradients[0], gradients[2])  # type: ignore[arg-type]


def test_the_scale_of_the_loss_is_for_float16(case: Case) -> None:
    for dtype, least in ((torch.bfloat16, 1.0), (torch.float16, 2.0)):
        subject = subject_of(case.model, case.sample, dtype, case.reference, (2,), 0)
        scale = choose_loss_scale(subject, targets_of(subject.truth))
        assert scale >= least and (dtype == torch.float16 or scale == 1.0)


def test_noise_that_is_not_finite_is_not_a_tolerance() -> None:
    key = ("loss", 0, "")
    joined = Noise(1, {key: (0.1, 0.2, 0.3)}).joined(Noise(1, {}, key))
    assert joined.overflowed == key and joined.draws == 2 and joined.largest[key] == (0.1, 0.2, 0.3)
    assert inf not in joined.largest[key]


@pytest.mark.parametrize(
    ("axes", "micro_batches", "parts"),
    [({"dp": 1}, 1, (2,)), ({"dp": 3, "tp": 2}, 1, (2, 3)), ({"dp": 3, "pp": 2}, 4, (3, 4, 12)), ({"pp": 2}, 2, (2,))],
)
def test_parts_are_those_of_the_plan(axes: dict[str, int], micro_batches: int, parts: tuple[int, ...]) -> None:
    assert parts_of(axes, micro_batches) == parts


@pytest.mark.long
def test_the_model_is_left_as_it_was(tiny: Callable[[], nn.Module], batch: Batch, tmp_path: Path) -> None:
    case = make_case(tiny(), batch, tmp_path, ranks=2, plan="tp=2")
    before = {name: value.clone() for name, value in case.model.state_dict().items()}
    case.outcomes("bfloat16")
    assert all(torch.equal(value, before[name]) for name, value in case.model.state_dict().items())
