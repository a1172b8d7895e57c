"""Choices among nearly equal values are noise of the model, and bugs beside them are still found."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from nnscaler.runtime.program.import_role_and_user_files import load_user_module
from tests.verify.low_precision.conftest import Case, make_case
from verify import verify_plan
from verify.programs.low_precision import run as level
from verify.programs.low_precision.judge_against_noise import FIRST_DRAWS, Measured
from verify.programs.low_precision.noise_statistics import NearTies, Noise, NoisyModel, Statistics, Target, draw_noise
from verify.results.float64_tolerance import Key
from verify.results.verdict import Verdict, merge
from verify.self_test.programs.right_programs import BATCH, shorten

ONE = 1.0
NEXT = 1 + torch.finfo(torch.bfloat16).eps  # the least number above 1
Choose = Callable[[Tensor], tuple[Tensor, Tensor]]
CHOICES: dict[str, Choose] = {
    "topk": lambda x: x.topk(1, -1),
    "topk along another dim": lambda x: _turned(*x.t().topk(1, 0)),
    "sort": lambda x: _first(*x.sort(-1, descending=True)),
    "stable sort": lambda x: _first(*x.sort(dim=-1, descending=True, stable=True)),
    "maximum": lambda x: x.max(-1, keepdim=True),
    "maximum without its dim": lambda x: _first(*(t[:, None] for t in x.max(-1))),
    "minimum": lambda x: _negative(*(-x).min(-1, keepdim=True)),
    "argmin": lambda x: (x.max(-1, keepdim=True).values, (-x).argmin(-1, keepdim=True)),
    "argmax": lambda x: (x.max(-1, keepdim=True).values, x.argmax(-1, keepdim=True)),
}
ALONE = ("argmin", "argmax")  # values and indices are of two choices


def _turned(values: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    return values.t(), indices.t()


def _negative(values: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    return -values, indices


def _first(values: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    return values[:, :1], indices[:, :1]


def chosen(choose: Choose, x: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    with NearTies(torch.Generator().manual_seed(seed)):
        return choose(x)


@pytest.mark.parametrize("name", CHOICES)
def test_a_near_tie_falls_either_way_and_what_is_chosen_keeps_its_value(name: str) -> None:
    choose = CHOICES[name]
    x = torch.tensor([[ONE, NEXT, 0.5], [2 * ONE, ONE, 0.5], [0.0, 0.0, -1.0]]).bfloat16()
    plain = choose(x)[1]
    found = [chosen(choose, x, seed) for seed in range(40)]
    assert {int(indices[0]) for _, indices in found} == {0, 1}
    for values, indices in found:
        assert torch.equal(indices[1:], plain[1:])  # of clear choices, and of exact zeros
        if name not in ALONE:
            assert torch.equal(values, x.gather(1, indices))


def test_float64_and_whole_numbers_are_left_alone() -> None:
    for x in (torch.tensor([[1.0, 1 + 1e-16 * 4, 0.0]]).double(), torch.tensor([[3, 3, 1]])):
        assert all(torch.equal(chosen(CHOICES["topk"], x, s)[1], x.topk(1, -1).indices) for s in range(9))


def test_gradients_flow_to_what_is_chosen() -> None:
    x = torch.tensor([[ONE, NEXT, 0.5]]).bfloat16().requires_grad_()
    for seed in range(9):
        values, indices = chosen(CHOICES["topk"], x, seed)
        (gradient,) = torch.autograd.grad(values.sum(), x)
        assert torch.equal(gradient, torch.zeros_like(x).scatter(1, indices, 1.0))


class Routed(nn.Module):
    """Each token is scaled by one of three experts, whichever scores best. The scores are fixed: only a choice among
    nearly equal ones can change."""

    scores: Tensor

    def __init__(self, second: float) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.ones(3, 8))
        self.inner = nn.Linear(8, 8)
        self.register_buffer("scores", torch.tensor([ONE, second, 0.25]))

    def forward(self, x: Tensor) -> Tensor:
        best = (self.scores * torch.ones_like(x[..., :3])).topk(1, -1).indices
        taken = torch.zeros_like(x[..., :3]).scatter(-1, best, 1.0)
        return (self.inner(x) * (taken @ self.experts)).square().mean()


def routed(second: float, folder: Path) -> Case:
    x = torch.randn(6, 4, 8, generator=torch.Generator().manual_seed(0))
    model = Routed(second)
    case = make_case(model, {"x": x}, folder, ranks=2, plan="dp=2")
    with torch.no_grad():
        model.scores.copy_(torch.tensor([ONE, second, 0.25]))
    return case


def noises(second: float, folder: Path) -> tuple[float, float]:
    """Of the gradient of the experts, in the norm: over the first draws, and over twice as many."""
    case = routed(second, folder)
    first = level.calibrate(case.seed, case, case.reference, "bfloat16")
    assert first.noise.draws == FIRST_DRAWS
    key = ("gradient", 0, "experts")
    return first.noise.largest[key][1], first.with_more_draws().noise.largest[key][1]


@pytest.mark.long
def test_more_draws_show_what_a_flip_does(tmp_path: Path) -> None:
    """Where there is none to flip, and in the first draws, the noise is that of rounding."""
    clear = noises(0.5, tmp_path / "clear")
    near = noises(NEXT, tmp_path / "near")
    assert max(*clear, near[0]) < 0.02 and clear[1] < 2 * clear[0]
    assert near[1] > 5 * near[0]


@pytest.mark.long
def test_an_error_that_the_model_makes_now_and_then_is_not_refuted(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is in none of the first draws, and in one of the next."""
    monkeypatch.setattr(level, "MOST_DRAWS", 2 * FIRST_DRAWS)
    calibration = level.calibrate(case.seed, case, case.reference, "bfloat16")
    key = ("gradient", 0, "layers.0.up.weight")
    greatest, norm, factor = calibration.noise.largest[key]
    rare = (100 * greatest, 100 * norm, 100 * factor)
    comparison = case.run("bfloat16", 1.0)
    real = level.measured
    monkeypatch.setattr(
        level, "measured", lambda *a: tuple(m if m.key != key else _with_error(m, rare) for m in real(*a))
    )
    refuted = level.compare(calibration, comparison)
    assert merge(o.check.verdict for o in refuted.outcomes) is Verdict.REFUTED and refuted.draws == 2 * FIRST_DRAWS

    def draws(subject: NoisyModel, targets: Mapping[Key, Target], first: int, count: int) -> Noise:
        return draw_noise(subject, targets, first, count).joined(Noise(0, {key: rare}))

    monkeypatch.setattr(level, "draw_noise", draws)
    explained = level.compare(calibration, comparison)
    assert merge(o.check.verdict for o in explained.outcomes).passes and explained.draws == 2 * FIRST_DRAWS


def _with_error(one: Measured, error: Statistics) -> Measured:
    return replace(one, error=error)


@pytest.mark.long
@pytest.mark.parametrize("seed", [407, 0, 1])
def test_a_right_mixture_of_experts_passes(examples: Path, seed: int) -> None:
    """At seed 407, a token's experts flip at the second step in the program, and in few of the model's own runs."""
    module = load_user_module(examples / "moe.py")
    model = module.build_model()
    shorten(model)
    sample, dtype = module.sample_inputs(BATCH), torch.float16
    shape = {"ranks": 4, "plan": "tp=2,pp=2", "schedule": "1f1b", "micro_batches": 2}
    report = verify_plan(model, sample, **shape, seed=seed, dtype=dtype, depth="quick")
    assert report.verdict.passes, [finding.message for finding in report.findings]
