"""Compare the losses and the norms of gradients of every rank with the plain model's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, combinations

import torch
from torch import Tensor

from nnscaler.runtime.tensor_bits_and_differences import difference
from verify.external.comparison.comparison_records import IN_STEP, ComparisonResult, Difference, ProgramRun
from verify.external.comparison.reference_in_parts_and_noise import MEAN_OF_MEANS, cause_by_micro_batches
from verify.external.parameter_mapping import taken
from verify.external.reference import data_part, mean_of
from verify.programs.causes.explain_wrong_values import cause_of
from verify.programs.causes.wrong_tensor import CLOSE, VAGUE, Cause
from verify.results.verdict import Verdict

# Losses.


def compare_losses(run: ProgramRun, last: int, gradients: ComparisonResult) -> ComparisonResult:
    """Compare each rank's loss up to step `last`.

    It may be that of the whole batch, that of the rank's rows, or a part of the mean; where some gradients agree, also
    a part of the sum over the data parts, as where the loss of a part is divided by the number of terms of all parts.
    """
    summed = _some_agree(run, gradients)
    found: list[Difference] = []
    count, worst = 0, 0.0
    for number, step in enumerate(run.reference.steps[: last + 1]):
        own = {record.rank: record.steps[number].loss for record in run.records}
        values = {rank: loss.double() for rank, loss in own.items() if loss is not None}
        if not values:
            if not bool(step.loss.isnan()):  # else nothing computes one: a second optimizer makes its step
                found.append(Difference("loss_missing", "loss", -1, number, Verdict.INCONCLUSIVE))
            continue
        for rank in sorted(values):
            count += 1
            pairs = list(_conventions(run, rank, values, number))
            if summed:
                pairs += _sum_of_parts(run, rank, values, step.loss.double())
            gap, value, right = min(((difference(*pair).relative, *pair) for pair in pairs), key=lambda found: found[0])
            worst = max(worst, gap)
            verdict = run.tolerance.judge(("loss", number, ""), gap)
            if not verdict.passes:
                # what is true of nearly right losses up to CLOSE explains nothing
                cause = Cause("differs", "") if gap <= CLOSE else _cause_of_loss(run, number, rank, values)
                numbers = (f"{float(right):.10g}", f"{float(value):.10g}")
                found.append(Difference("loss_differs", "loss", rank, number, verdict, gap, *numbers, cause))
    return ComparisonResult("losses", count, tuple(found), worst)


def _some_agree(run: ProgramRun, gradients: ComparisonResult) -> bool:
    """Return whether the gradient of some parameter is right, and not of zeros, so that the losses are: of any where
    none was found to be wrong."""
    differences = [one for one in gradients.differences if one.actual != IN_STEP]
    if not differences:
        return True
    number, wrong = min(one.step for one in differences), {one.name for one in differences}
    right = run.reference.steps[number].gradients
    pieces = ((record.steps[number], piece) for record in run.records for piece in record.pieces)
    return any(
        piece.name not in wrong and bool(taken(right, piece.addresses).nan_to_num().any())
        for step, piece in pieces
        if piece.addresses is not None and piece.local in step.gradients.keys() - step.unread
    )


def _conventions(
    run: ProgramRun, rank: int, values: Mapping[int, Tensor], number: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield what a rank's loss may stand for, and what that is where the program is right: first its own value for that
    of the whole batch. Ranks may have parts of a mean, over any axes: of the whole batch, or of their data part's."""
    step, here = run.reference.steps[number], run.at[rank]
    whole = step.loss.double()
    index, parts = data_part(run.program, here)
    # a mean over unequal parts is another number than the loss of the whole batch
    own = step.part_losses[index].double() if parts > 1 and index < len(step.part_losses) else None
    names = [axis for axis, size in run.sizes.items() if size > 1]
    for axes in chain.from_iterable(combinations(names, count) for count in range(len(names) + 1)):
        group = _beside(run, here, axes)
        if all(r in values for r in group):
            mean = mean_of([values[r] for r in group])
            yield mean, whole
            if own is not None and not set(axes) & set(run.program.data_axes):
                yield mean, own


def _sum_of_parts(
    run: ProgramRun, rank: int, values: Mapping[int, Tensor], whole: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the sum over the data parts, where there are several, and the loss of the whole batch."""
    group = _beside(run, run.at[rank], run.program.data_axes)
    if len(group) > 1 and all(r in values for r in group):
        yield torch.stack([values[r] for r in group]).sum(), whole


def _beside(run: ProgramRun, here: Mapping[str, int], axes: Sequence[str]) -> list[int]:
    """Return the ranks that differ on these axes alone."""
    return [r for r, c in run.at.items() if all(c[a] == here[a] for a in run.sizes if a not in axes)]


def _cause_of_loss(run: ProgramRun, number: int, rank: int, values: Mapping[int, Tensor]) -> Cause:
    expected, losses = run.reference.steps[number].loss.double(), run.reference.steps[number].part_losses
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
                cause = _of_own_rows(run, number, rank, value) or _of_root(cause_of(wrong), float(value / step.norm))
                found.append(Difference("gradient_norm_differs", "norm", rank, number, verdict, gap, *numbers, cause))
        if found:
            break
    return ComparisonResult("gradient norm", count, tuple(found), worst)


def _of_own_rows(run: ProgramRun, number: int, rank: int, norm: Tensor) -> Cause | None:
    """Return why a norm is that of the gradients of the rank's data part alone; None where it is not."""
    index, parts = data_part(run.program, run.at[rank])
    own = run.part_gradients(number, index).double() if parts > 1 else None
    if own is None or not run.tolerance.judge(("norm", number, ""), difference(norm, _norm(own)).relative).passes:
        return None
    axes = ",".join(axis for axis in run.program.data_axes if run.sizes[axis] > 1)
    text = f"it is the norm of the rank's own gradients: it is taken before they are averaged over {axes}"
    return Cause("missing_reduction", text, axes)


def _norm(gradients: Tensor) -> Tensor:
    """Return the norm of gradients, of which some are NaN where there are none; NaN where there are none at all."""
    there = gradients[~gradients.isnan()]
    return there.norm() if there.numel() else gradients.new_tensor(torch.nan)


def _of_root(cause: Cause, factor: float) -> Cause:
    """Say of the norm what is known of its square."""
    if cause.kind != "scaled":
        return replace(cause, text=cause.text.replace("squares", "squares of the norms"))
    return Cause("scaled", f"it is {factor:.6g} times the model's", cause.axis, factor)
