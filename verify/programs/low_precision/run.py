"""The level of low precision: a program in bfloat16 and float16 against the noise of its model in these dtypes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

import torch

from op_registry.call import dtype_name

from nnscaler.compile import Progress
from nnscaler.errors import NnscalerError, SourceLocation
from nnscaler.ir.graph import Graph, Operation
from verify.programs.checks import replicas
from verify.programs.checks.input_and_outcome import CheckOutcome, Comparison, Tally
from verify.programs.eager_reference import Trajectory
from verify.programs.low_precision.judge_against_noise import (
    FIRST_DRAWS,
    KINDS,
    MOST_DRAWS,
    PASS_RATIO,
    REFUTE_RATIO,
    Measured,
    NoiseRow,
    judged,
    measured,
)
from verify.programs.low_precision.noise_statistics import (
    NAMES,
    Noise,
    NoisyModel,
    Target,
    choose_loss_scale,
    draw_noise,
    parts_of,
    subject_of,
    targets_of,
)
from verify.programs.prepare_verification import Prepared
from verify.results.finding import Finding
from verify.results.float64_tolerance import Key
from verify.results.report import Check
from verify.results.verdict import Verdict

# Checks and findings from the rows of one dtype.

_TITLES = {kind: f"{kind}s" for kind in KINDS} | {"loss": "loss"}


def rows_of(
    tensors: Sequence[Measured], targets: Mapping[Key, Target], noise: Noise, dtype: str
) -> tuple[NoiseRow, ...]:
    """Return a row for every tensor whose values could be compared, in the order of `tensors`."""
    found = []
    for one in tensors:
        if not one.problem:
            kind, step, _ = one.key
            size = targets[one.key].size
            found.append(judged(kind, step, one.name, dtype, one.error, noise.largest[one.key], size))
    return tuple(found)


def outcomes_of(
    comparison: Comparison, tensors: Sequence[Measured], rows: Sequence[NoiseRow], draws: int, dtype: str
) -> list[CheckOutcome]:
    """Return one check per kind of tensor."""
    compared = iter(rows)
    pairs = [(one, None if one.problem else next(compared)) for one in tensors]
    kinds = [kind for kind in KINDS if any(one.key[0] == kind for one in tensors)]
    checks = [_check(comparison, kind, [p for p in pairs if p[0].key[0] == kind], draws, dtype) for kind in kinds]
    return checks if comparison.steps or "result" in kinds else [_no_result(dtype), *checks]


def _check(
    comparison: Comparison, kind: str, pairs: Sequence[tuple[Measured, NoiseRow | None]], draws: int, dtype: str
) -> CheckOutcome:
    tally = Tally(f"{_TITLES[kind]} in {dtype}", Verdict.TESTED_CALIBRATED)
    seen: set[tuple[str, int]] = set()
    drowned = 0
    for one, row in pairs:
        if row is None:
            tally.add(Verdict.REFUTED, Finding(one.code, one.problem, _place(comparison, one), _facts(one, dtype)))
        elif row.verdict.passes and row.drowned:
            drowned += 1
        elif row.verdict.passes:
            tally.add(row.verdict)
        else:
            # the ranks that return a loss mostly return the same one
            first = kind != "loss" or (_code(one, row), row.step) not in seen
            seen.add((_code(one, row), row.step))
            tally.add(row.verdict, _finding(comparison, one, row, draws) if first else None)
    if not tally.count:  # not one tensor stands out of the noise
        tally.add(Verdict.INCONCLUSIVE, _all_drowned(kind, dtype))
    return tally.outcome(_detail([row for _, row in pairs if row is not None], draws, drowned))


def _detail(rows: Sequence[NoiseRow], draws: int, drowned: int) -> str:
    if not rows:
        return ""
    worst = max(rows, key=lambda row: row.ratio)
    name = f" `{worst.name}`" if worst.kind != "loss" else ""
    text = f"worst ratio to noise {worst.ratio:.2g} of {PASS_RATIO:g}, {draws} draws ({worst.statistic}{name})"
    return text + (f"; {drowned} drown in the noise" if drowned else "")


def _finding(comparison: Comparison, one: Measured, row: NoiseRow, draws: int) -> Finding:
    noun = {
        "loss": f"the loss of step {row.step}, `{comparison.loss}`, on {one.name}",
        "gradient": f"the gradient of `{row.name}` at step {row.step}",
        "result": f"the result `{row.name}`",
    }.get(row.kind, f"the {row.kind} `{row.name}` after {comparison.steps} step{'s' * (comparison.steps > 1)}")
    verb = "is not finite" if not one.finite else f"is {row.ratio:.3g} times its noise away from the model's"
    facts = {
        **_facts(one, row.dtype),
        "statistic": row.statistic,
        "error": f"{row.error:.3g}",
        "noise": f"{row.noise:.3g} in {draws} runs of the model",
        "ratio": f"{row.ratio:.3g}; up to {PASS_RATIO:g} agrees, above {REFUTE_RATIO:g} is refuted",
        "all statistics": ", ".join(f"{n} {e:.3g}" for n, e in zip(NAMES, one.error, strict=True)),
    }
    help = None
    if row.near:
        help = "try another --seed, or a larger sample batch: an error stays, chance does not"
    return Finding(_code(one, row), f"in {row.dtype}, {noun} {verb}", _place(comparison, one), facts, help=help)


def _code(one: Measured, row: NoiseRow) -> str:
    if not one.finite:
        return "not_finite"
    return "near_threshold" if row.near else f"{row.kind}_differs"


def _facts(one: Measured, dtype: str) -> dict[str, str]:
    facts = {"tensor": one.name, "step": str(one.key[1]), "dtype": dtype}
    if one.holding is not None:
        facts |= {"stage": str(one.holding.stage), "ranks": str(one.holding.ranks)}
    return facts


def _place(comparison: Comparison, one: Measured) -> SourceLocation | None:
    return comparison.loss_place if one.holding is None else comparison.place(one.holding.name)


def _no_result(dtype: str) -> CheckOutcome:
    """Return the check of a program without a loss of which nothing that it computes was compared."""
    message = (
        f"in {dtype}, nothing that the model returns can be compared: no result is of finite floating-point numbers"
    )
    finding = Finding("nothing_checked", message, help="--dtype float64 compares the results")
    return CheckOutcome(Check(f"{_TITLES['result']} in {dtype}", Verdict.INCONCLUSIVE, 0), (finding,))


def _all_drowned(kind: str, dtype: str) -> Finding:
    message = f"in {dtype}, the noise of the model itself is as large as every one of its {_TITLES[kind]}"
    return Finding("near_threshold", message, help="the model cannot be compared in this dtype: use a wider one")


# (the precision of the executor: a dtype's name, or None for the dtypes as written; the scale of the loss)
# -> what the ranks computed so, or why they did not
Run = Callable[[str | None, float], Comparison | CheckOutcome]


@dataclass(frozen=True)
class Calibration:
    """The noise of one dtype on one model, which serves every program of it under the same axes."""

    subject: NoisyModel
    targets: Mapping[Key, Target]
    noise: Noise

    @property
    def dtype(self) -> str:
        return dtype_name(self.subject.dtype)

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
class LowPrecisionResult:
    outcomes: tuple[CheckOutcome, ...]
    rows: tuple[NoiseRow, ...] = ()
    draws: int = 0


def low_precision_outcomes(
    seed: int,
    prepared: Prepared,
    reference: Trajectory,
    dtypes: Sequence[str],
    run: Run,
    progress: Progress = lambda phase, seconds, text: None,
) -> tuple[list[CheckOutcome], tuple[NoiseRow, ...]]:
    """Return the checks of every dtype, and the rows behind them.

    `reference`: the float64 run of the model; its number of steps, learning rate and settings are used. `run` runs the
    program from the state and batch of `prepared` with the same; what its Comparison compares with is not looked at.
    """
    outcomes: list[CheckOutcome] = []
    rows: list[NoiseRow] = []
    for name in dtypes:
        started = time.perf_counter()
        result = _one_dtype(seed, prepared, reference, name, run)
        seconds = time.perf_counter() - started
        first, *others = result.outcomes
        outcomes += [replace(first, check=replace(first.check, seconds=seconds)), *others]
        rows += result.rows
        worst = max((row.ratio for row in result.rows), default=0.0)
        text = f"{name}: {len(result.rows)} tensors, {result.draws} draws, worst ratio to noise {worst:.2g}"
        progress("low precision", seconds, text)
    return outcomes, tuple(rows)


def _one_dtype(seed: int, prepared: Prepared, reference: Trajectory, name: str, run: Run) -> LowPrecisionResult:
    try:
        calibration = calibrate(seed, prepared, reference, name)
    except NnscalerError as error:
        if error.code != "model_raised":
            raise
        return LowPrecisionResult((_does_not_run(error.message, error.where, name),))
    if calibration.noise.overflowed is not None:
        return LowPrecisionResult((_overflows(calibration),), draws=calibration.noise.draws)
    complex_ = next((o for o in prepared.graph.operations if _is_complex(o, prepared.graph)), None)
    if calibration.precision in ("bfloat16", "float16") and complex_ is not None:
        # they stay, and what is made of them is float32 in a text that has no casts from float32 to float32
        message = "the model's complex numbers stay those of float32"
        return LowPrecisionResult((_does_not_run(message, complex_.where, name),))
    comparison = run(calibration.precision, calibration.subject.loss_scale)
    if isinstance(comparison, CheckOutcome):
        check = replace(comparison.check, name=f"program ran in {name}")
        return LowPrecisionResult((replace(comparison, check=check),), draws=calibration.noise.draws)
    return compare(calibration, comparison)


def calibrate(seed: int, prepared: Prepared, reference: Trajectory, name: str) -> Calibration:
    """Return the noise of the dtype called `name`, from the first draws."""
    program = prepared.program
    parts = parts_of(program.axes, program.manifest.micro_batches)
    subject = subject_of(prepared.model, prepared.sample, getattr(torch, name), reference, parts, seed)
    targets = targets_of(subject.truth)
    subject = replace(subject, loss_scale=choose_loss_scale(subject, targets))
    return Calibration(subject, targets, draw_noise(subject, targets, 0, FIRST_DRAWS))


def compare(calibration: Calibration, comparison: Comparison) -> LowPrecisionResult:
    """Return the checks of one run of a program.

    Draws again while a tensor disagrees, unless no draw can explain it.
    """
    tensors = measured(comparison, calibration.targets)
    while True:
        noise = calibration.noise
        if noise.overflowed is not None:
            return LowPrecisionResult((_overflows(calibration),), draws=noise.draws)
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
    return LowPrecisionResult(tuple(outcomes), rows, noise.draws)


def _is_complex(operation: Operation, graph: Graph) -> bool:
    return any(graph.tensors[name].dtype.startswith("complex") for name in operation.outputs if name is not None)


def _does_not_run(message: str, where: SourceLocation | None, dtype: str) -> CheckOutcome:
    """Return the check of a model that runs as it is written, and not where all its floating dtypes are this one."""
    help = f"a float32 in its code, as of `.float()`, is {dtype} here: `.to(torch.{dtype})` in build_model() keeps it; "
    finding = Finding("nothing_checked", f"in {dtype}, {message}", where, help=help + "or use another dtype")
    return CheckOutcome(Check(f"reference in {dtype}", Verdict.INCONCLUSIVE, 0), (finding,))


def _overflows(calibration: Calibration) -> CheckOutcome:
    assert calibration.noise.overflowed is not None
    dtype, (kind, step, name) = calibration.dtype, calibration.noise.overflowed
    what = f"the loss of step {step}" if kind == "loss" else f"the {kind} of `{name}` at step {step}"
    message = f"the model itself computes NaN or infinity in {dtype}, though not in float64: {what}"
    help = "a model that was built in the dtype (`.half()`) keeps what its code does in float32; or use bfloat16"
    finding = Finding("reference_not_finite", message, counter_example={"tensor": name, "dtype": dtype}, help=help)
    return CheckOutcome(Check(f"reference in {dtype}", Verdict.INCONCLUSIVE, 0), (finding,))
