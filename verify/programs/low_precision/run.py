"""The level of low precision: a program in bfloat16 and float16 against the noise of its model in these dtypes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Protocol

import torch
from torch import nn

from nnscaler.compile import Progress
from nnscaler.tracing.sample_inputs import SampleInputs
from verify.programs.checks import replicas
from verify.programs.checks.context import Comparison, Outcome
from verify.programs.low_precision.measure import measured
from verify.programs.low_precision.noise import (
    Noise,
    Subject,
    Target,
    choose_loss_scale,
    draw_noise,
    parts_of,
    subject_of,
    targets_of,
)
from verify.programs.low_precision.outcomes import outcomes_of, rows_of
from verify.programs.low_precision.rows import FIRST_DRAWS, MOST_DRAWS, NoiseRow
from verify.programs.program_directory import ProgramDirectory
from verify.programs.reference.eager import Trajectory
from verify.results.finding import Finding
from verify.results.report import Check
from verify.results.tolerance import Key
from verify.results.verdict import Verdict

# (the precision of the executor: a dtype's name, or None for the dtypes as written; the scale of the loss)
# -> what the ranks computed so, or why they did not
Run = Callable[[str | None, float], Comparison | Outcome]


class Requested(Protocol):
    """The part of a `PlanRequest` that is used here."""

    @property
    def seed(self) -> int: ...


class Built(Protocol):
    """The part of a `Prepared` that is used here: `model` has its random parameters, in its own dtypes."""

    @property
    def model(self) -> nn.Module: ...
    @property
    def sample(self) -> SampleInputs: ...
    @property
    def program(self) -> ProgramDirectory: ...


@dataclass(frozen=True)
class Calibration:
    """The noise of one dtype on one model, which serves every program of it under the same axes."""

    subject: Subject
    targets: Mapping[Key, Target]
    noise: Noise

    @property
    def dtype(self) -> str:
        return str(self.subject.dtype).removeprefix("torch.")

    @property
    def precision(self) -> str | None:
        """Of the executor."""
        return self.dtype if self.subject.replaced else None

    def with_more_draws(self) -> Calibration:
        """Double the number of draws, up to the most."""
        count = min(self.noise.draws, MOST_DRAWS - self.noise.draws)
        more = draw_noise(self.subject, self.targets, self.noise.draws, count)
        return replace(self, noise=self.noise.joined(more))


@dataclass(frozen=True)
class Result:
    outcomes: tuple[Outcome, ...]
    rows: tuple[NoiseRow, ...] = ()
    draws: int = 0


def low_precision_outcomes(
    request: Requested,
    prepared: Built,
    reference: Trajectory,
    dtypes: Sequence[str],
    run: Run,
    progress: Progress = lambda phase, seconds, text: None,
) -> tuple[list[Outcome], tuple[NoiseRow, ...]]:
    """Return the checks of every dtype, and the rows behind them.

    `reference`: the float64 run of the model; its number of steps, learning rate and settings are used. `run` runs the
    program from the state and batch of `prepared` with the same; what its Comparison compares with is not looked at.
    """
    outcomes: list[Outcome] = []
    rows: list[NoiseRow] = []
    for name in dtypes:
        started = time.perf_counter()
        result = _one_dtype(request, prepared, reference, name, run)
        seconds = time.perf_counter() - started
        first, *others = result.outcomes
        outcomes += [replace(first, check=replace(first.check, seconds=seconds)), *others]
        rows += result.rows
        worst = max((row.ratio for row in result.rows), default=0.0)
        text = f"{name}: {len(result.rows)} tensors, {result.draws} draws, worst ratio to noise {worst:.2g}"
        progress("low precision", seconds, text)
    return outcomes, tuple(rows)


def _one_dtype(request: Requested, prepared: Built, reference: Trajectory, name: str, run: Run) -> Result:
    calibration = calibrate(request, prepared, reference, name)
    if calibration.noise.overflowed is not None:
        return Result((_overflows(calibration),), draws=calibration.noise.draws)
    comparison = run(calibration.precision, calibration.subject.loss_scale)
    if isinstance(comparison, Outcome):
        check = replace(comparison.check, name=f"program ran in {name}")
        return Result((replace(comparison, check=check),), draws=calibration.noise.draws)
    return compare(calibration, comparison)


def calibrate(request: Requested, prepared: Built, reference: Trajectory, name: str) -> Calibration:
    """Return the noise of the dtype called `name`, from the first draws."""
    program = prepared.program
    parts = parts_of(program.axes, int(program.manifest["micro_batches"]))
    subject = subject_of(prepared.model, prepared.sample, getattr(torch, name), reference, parts, request.seed)
    targets = targets_of(subject.truth)
    subject = replace(subject, loss_scale=choose_loss_scale(subject, targets))
    return Calibration(subject, targets, draw_noise(subject, targets, 0, FIRST_DRAWS))


def compare(calibration: Calibration, comparison: Comparison) -> Result:
    """Return the checks of one run of a program.

    Draws again while a tensor disagrees, unless no draw can explain it.
    """
    tensors = measured(comparison, calibration.targets)
    while True:
        noise = calibration.noise
        if noise.overflowed is not None:
            return Result((_overflows(calibration),), draws=noise.draws)
        rows = rows_of(tensors, calibration.targets, noise, calibration.dtype)
        certain = any(one.problem for one in tensors) or any(row.ratio == inf for row in rows)
        if certain or all(row.verdict.passes for row in rows) or noise.draws >= MOST_DRAWS:
            break
        calibration = calibration.with_more_draws()
    outcomes = outcomes_of(comparison, tensors, rows, noise.draws, calibration.dtype)
    copies = replicas.check(comparison)
    if copies.check.count:
        name = f"{copies.check.name} in {calibration.dtype}"
        outcomes.append(replace(copies, check=replace(copies.check, name=name)))
    return Result(tuple(outcomes), rows, noise.draws)


def _overflows(calibration: Calibration) -> Outcome:
    assert calibration.noise.overflowed is not None
    dtype, (kind, step, name) = calibration.dtype, calibration.noise.overflowed
    what = f"the loss of step {step}" if kind == "loss" else f"the {kind} of `{name}` at step {step}"
    message = f"the model itself computes NaN or infinity in {dtype}, though not in float64: {what}"
    help = "a model that was built in the dtype (`.half()`) keeps what its code does in float32; or use bfloat16"
    finding = Finding("reference_not_finite", message, counter_example={"tensor": name, "dtype": dtype}, help=help)
    return Outcome(Check(f"reference in {dtype}", Verdict.INCONCLUSIVE, 0), (finding,))
