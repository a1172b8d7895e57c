"""Compare the losses and the norms of gradients of every rank with the plain model's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from verify.external.comparison.comparison_records import ComparisonResult, Difference, ProgramRun
from verify.external.comparison.micro_batch_reference import MEAN_OF_MEANS, cause_by_micro_batches
from verify.external.reference import data_part, mean_of
from verify.programs.causes.table import cause_of
from verify.programs.causes.wrong_tensor import VAGUE, Cause
from verify.results.tolerance import difference
from verify.results.verdict import Verdict

# Losses.


def compare_losses(run: ProgramRun, last: int) -> ComparisonResult:
    """Compare each rank's loss up to step `last`, the first one in which a gradient is wrong.

    It may be that of the whole batch, that of the rank's rows, or a part of the mean; where all gradients agree, also a
    part of the sum over the data parts, as where the loss of a part is divided by the number of terms of all parts.
    """
    found: list[Difference] = []
    count, worst = 0, 0.0
    for number, step in enumerate(run.reference.steps[: last + 1]):
        own = {record.rank: record.steps[number].loss for record in run.records}
        values = {rank: loss.double() for rank, loss in own.items() if loss is not None}
        if not values:
            if not bool(step.loss.isnan()):  # else nothing computes one: a second optimizer makes its step
                found.append(Difference("loss_missing", "loss", -1, number, Verdict.INCONCLUSIVE))
            continue
        expected = _expected_losses(run, number)
        for rank, value in sorted(values.items()):
            count += 1
            gap = min(difference(value, right).relative for right in expected[rank])
            mean = _agreeing_mean(run, rank, values, step.loss.double())
            gap = min(gap, mean)
            if last == len(run.reference.steps):
                gap = min(gap, _agreeing_sum(run, rank, values, step.loss.double()))
            worst = max(worst, gap)
            verdict = run.tolerance.judge(("loss", number, ""), gap)
            if not verdict.passes:
                cause = _cause_of_loss(run, number, rank, values, expected[rank][0])
                numbers = (f"{float(expected[rank][0]):.10g}", f"{float(value):.10g}")
                found.append(Difference("loss_differs", "loss", rank, number, verdict, gap, *numbers, cause))
    return ComparisonResult("losses", count, tuple(found), worst)


def _expected_losses(run: ProgramRun, number: int) -> Mapping[int, tuple[Tensor, ...]]:
    """Return, by rank, the losses that are right: of the whole batch, and of its own rows."""
    step = run.reference.steps[number]
    parts = [data_part(run.program, coordinate) for coordinate in run.at.values()]
    losses = step.part_losses
    # a mean over unequal parts is another number than the loss of the whole batch
    right = [step.loss.double()]
    return {
        rank: (*right, *([losses[index].double()] if count > 1 and index < len(losses) else []))
        for rank, (index, count) in zip(run.at, parts, strict=True)
    }


def _agreeing_mean(run: ProgramRun, rank: int, values: Mapping[int, Tensor], whole: Tensor) -> float:
    """Return how far the mean over the ranks of some axis is from the whole loss: each may have a part of the mean."""
    best, here = float("inf"), run.at[rank]
    for axis, size in run.sizes.items():
        group = [r for r, c in run.at.items() if all(c[a] == here[a] for a in run.sizes if a != axis)]
        if size > 1 and all(r in values for r in group):
            best = min(best, difference(mean_of([values[r] for r in group]), whole).relative)
    return best


def _agreeing_sum(run: ProgramRun, rank: int, values: Mapping[int, Tensor], whole: Tensor) -> float:
    """Return how far the sum over the data parts is from the whole loss."""
    here, others = run.at[rank], [axis for axis in run.sizes if axis not in run.program.data_axes]
    group = [r for r, c in run.at.items() if all(c[axis] == here[axis] for axis in others)]
    if len(group) == 1 or any(r not in values for r in group):
        return float("inf")
    return difference(torch.stack([values[r] for r in group]).sum(), whole).relative


def _cause_of_loss(run: ProgramRun, number: int, rank: int, values: Mapping[int, Tensor], expected: Tensor) -> Cause:
    losses = run.reference.steps[number].part_losses
    mean = mean_of(losses) if losses else expected
    if len(losses) > 1 and run.tolerance.judge(("loss", number, ""), difference(values[rank], mean).relative).passes:
        return MEAN_OF_MEANS
    before = run.reference.steps[number - 1].loss.double() if number else None
    found = cause_of(replace(run.wrong_tensor("loss", rank, values, expected), before=before))
    if found.kind not in VAGUE:
        return found

    def agrees(loss: Tensor, _gradients: Tensor) -> bool:
        return run.tolerance.judge(("loss", number, ""), difference(values[rank], loss).relative).passes

    return cause_by_micro_batches(run.micro_means, number, agrees) or found


# Norms of gradients.


def compare_norms(run: ProgramRun) -> ComparisonResult:
    """Compare the norm on each rank where gradients are clipped: squares of norms add up, as gradients do."""
    found: list[Difference] = []
    count, worst = 0, 0.0
    for number, step in enumerate(run.reference.steps):
        if step.norm is None:
            continue
        norms = {record.rank: n for record in run.records if (n := record.steps[number].norm) is not None}
        values = {rank: norm.double() for rank, norm in norms.items()}
        for rank, value in values.items():
            count += 1
            gap = difference(value, step.norm.double()).relative
            worst = max(worst, gap)
            verdict = run.tolerance.judge(("norm", number, ""), gap)
            if not verdict.passes:
                squares = {r: v.square() for r, v in values.items()}
                wrong = run.wrong_tensor("square", rank, squares, step.norm.double().square())
                numbers = (f"{float(step.norm):.10g}", f"{float(value):.10g}")
                cause = _of_root(cause_of(wrong), float(value) / float(step.norm))
                found.append(Difference("gradient_norm_differs", "norm", rank, number, verdict, gap, *numbers, cause))
        if found:
            break
    return ComparisonResult("gradient norm", count, tuple(found), worst)


def _of_root(cause: Cause, factor: float) -> Cause:
    """Say of the norm what is known of its square."""
    if cause.kind != "scaled":
        return replace(cause, text=cause.text.replace("squares", "squares of the norms"))
    return Cause("scaled", f"it is {factor:.6g} times the model's", cause.axis, factor)
