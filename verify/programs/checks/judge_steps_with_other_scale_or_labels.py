"""Check the single steps that run beside the trajectory, with another loss scale or other labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from nnscaler.runtime.tensor_bits_and_differences import real_numbers
from verify.programs.checks import compare_gradients_and_state, losses
from verify.programs.checks.input_and_outcome import CheckOutcome, Comparison, merge_outcomes
from verify.programs.eager_reference import Trajectory
from verify.programs.execution.record_rank_steps import Entry
from verify.programs.rerun_with_other_scale_or_labels import SingleStep
from verify.results.finding import Finding
from verify.results.report import Check
from verify.results.verdict import Verdict

TINY = 1e-290  # below, float64 has fewer digits, and scaling rounds


def check(comparison: Comparison, trial: SingleStep) -> CheckOutcome:
    """Loss and gradients against the trial's own reference; under another loss scale also the bits of the gradients
    against those of the trajectory's first step, where the model's own do not change."""
    results = tuple(
        replace(r, losses=(r.trials[trial.name].loss,), gradients=(r.trials[trial.name].gradients,), norm=None)
        for r in comparison.results
        if trial.name in r.trials
    )
    other = replace(comparison, reference=trial.reference, results=results, steps=1)
    outcomes = [losses.check(other), compare_gradients_and_state.check_gradients(other)]
    if trial.scaled and _unchanged(comparison.reference, trial.reference):
        outcomes.append(_same_bits(comparison, trial))
    return merge_outcomes(trial.name, f"with {_with(trial)}: ", outcomes)


def _with(trial: SingleStep) -> str:
    return f"a loss scale of {trial.loss_scale:g}" if trial.scaled else "unequal numbers of labels"


def _unchanged(one: Trajectory, other: Trajectory) -> bool:
    """Return whether the model's own gradients have equal bits under both scales: backward is linear, here exactly."""
    pairs = ((one.gradients[0][name], gradient) for name, gradient in other.gradients[0].items())
    return all(_same(a, b) for a, b in pairs)


def _same_bits(comparison: Comparison, trial: SingleStep) -> CheckOutcome:
    count, wrong = 0, dict[str, tuple[int, Tensor, Tensor]]()
    for result in comparison.results:
        if trial.name not in result.trials:
            continue
        before = _by_place(result.gradients[0])
        for stage, attribute, name, scaled in result.trials[trial.name].gradients:
            plain = before.get((stage, attribute))
            count += 1
            if not _same(plain, scaled):
                assert plain is not None and scaled is not None
                wrong.setdefault(name, (result.rank, plain, scaled))
    findings = tuple(_finding(comparison, trial, name, *found) for name, found in list(wrong.items())[:3])
    verdict = Verdict.REFUTED if wrong else Verdict.TESTED_EXACT
    return CheckOutcome(Check("", verdict, count, len(wrong)), findings)


def _finding(comparison: Comparison, trial: SingleStep, name: str, rank: int, plain: Tensor, scaled: Tensor) -> Finding:
    plain, scaled = real_numbers(plain), real_numbers(scaled)
    gap = (plain - scaled).abs()
    place = int(gap.argmax())
    return Finding(
        "loss_scale_matters",
        f"the gradient of `{name}` on rank {rank} is not that of a loss scale of 1: "
        f"{float(scaled.flatten()[place]):.10g} instead of {float(plain.flatten()[place]):.10g}",
        comparison.place(name),
        {"tensor": name, "step": "0", "rank": str(rank), "loss scale": f"{trial.loss_scale:g}"},
        _cause(plain, scaled, trial.loss_scale),
    )


def _cause(plain: Tensor, scaled: Tensor, scale: float) -> str:
    if torch.equal(scaled, plain * scale):
        return "it still has the scale: it is not divided out"
    if torch.equal(scaled, plain / scale):
        return "the scale is divided out twice"
    return "backward adds something that does not grow with the loss"


def _by_place(entries: Sequence[Entry]) -> Mapping[tuple[int, str], Tensor | None]:
    return {(stage, attribute): tensor for stage, attribute, _, tensor in entries}


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return True  # that one has a gradient and the other none is for the comparison with the model
    return a.shape == b.shape and bool(((a == b) | ((a - b).abs() < TINY)).all())
