"""Checks and findings from the rows of one dtype."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from nnscaler.errors import SourceLocation
from verify.programs.checks.context import Comparison, Outcome, Tally
from verify.programs.low_precision.measure import KINDS, Measured
from verify.programs.low_precision.measures import NAMES
from verify.programs.low_precision.noise import Noise, Target
from verify.programs.low_precision.rows import PASS_RATIO, REFUTE_RATIO, NoiseRow, judged
from verify.results.finding import Finding
from verify.results.tolerance import Key
from verify.results.verdict import Verdict

_TITLES = {"loss": "loss", "gradient": "gradients", "parameter": "parameters", "buffer": "buffers"}


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
) -> list[Outcome]:
    """Return one check per kind of tensor."""
    compared = iter(rows)
    pairs = [(one, None if one.problem else next(compared)) for one in tensors]
    kinds = [kind for kind in KINDS if any(one.key[0] == kind for one in tensors)]
    return [_check(comparison, kind, [p for p in pairs if p[0].key[0] == kind], draws, dtype) for kind in kinds]


def _check(
    comparison: Comparison, kind: str, pairs: Sequence[tuple[Measured, NoiseRow | None]], draws: int, dtype: str
) -> Outcome:
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


def _all_drowned(kind: str, dtype: str) -> Finding:
    message = f"in {dtype}, the noise of the model itself is as large as every one of its {_TITLES[kind]}"
    return Finding("near_threshold", message, help="the model cannot be compared in this dtype: use a wider one")
