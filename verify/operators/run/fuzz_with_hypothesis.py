"""`--profile deep`: hundreds of cases that hypothesis draws, after everything else has passed.

Sizes, parts, draws and dtypes vary together; a counter-example is shrunk by hypothesis.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

from nnscaler.errors import NnscalerError
from nnscaler.ir.operation_placement import Choice, RunPartial, Split
from verify.child_processes import Note
from verify.evidence.oracle.case_runner import CaseResult, OperatorRunner, WholeRaised
from verify.evidence.oracle.enumerate_cases import Base, Target, Unusable, bases
from verify.evidence.split_case import SplitCase
from verify.evidence.verify_op_options import KINDS, OpOptions
from verify.operators.report_on_operator import refutation
from verify.operators.run.job import Job
from verify.operators.run.run_job import Reproduce, verify_job
from verify.results.report import Check, Report
from verify.results.verdict import Verdict

EXAMPLES = 500
DTYPES = ("float64", "float64", "float64", "float32", "bfloat16")
NAME = "drawn by hypothesis"


class CounterExample(Exception):
    """A drawn case that fails."""


@dataclass(slots=True)
class DrawTally:
    """Counts over the drawn cases; `failed` is the smallest counter-example once hypothesis has shrunk it."""

    cases: int = 0
    count: int = 0
    refused: int = 0
    failed: CaseResult | None = None


def require_hypothesis() -> None:
    """Raise NnscalerError where hypothesis is not installed."""
    if find_spec("hypothesis") is None:
        raise NnscalerError(
            "not_installed", "--profile deep draws cases with hypothesis", help="pip install hypothesis"
        )


def verify_deep(job: Job, options: OpOptions, reproduce: Reproduce, note: Note) -> Report:
    """Verify as `verify_job` does; where that passes, with drawn cases too."""
    report = verify_job(job, options, reproduce, note)
    if not report.verdict.passes or job.error is not None:
        return report
    started = time.perf_counter()
    runner = OperatorRunner(job.spec, options, note)
    found = [base for base in bases(runner) if base.leaders or base.linear]
    if not found:
        return report
    tally = draw_cases(runner, found, options.seed, EXAMPLES)
    seconds = time.perf_counter() - started
    refuted = int(tally.failed is not None)
    verdict = Verdict.REFUTED if refuted else Verdict.TESTED_EXACT if tally.count else Verdict.INCONCLUSIVE
    check = Check(NAME, verdict, tally.count, refuted, seconds, f"{tally.cases} cases", supporting=True)
    findings = report.findings
    if tally.failed is not None:
        finding = refutation(job.spec, tally.failed, options)
        findings = (*findings, finding.with_reproduce(reproduce(finding.code, tally.failed.case)))
    return replace(
        report,
        checks=(*report.checks, check),
        findings=findings,
        seconds=report.seconds + time.perf_counter() - started,
    )


def draw_cases(runner: OperatorRunner, found: list[Base], seed: int, examples: int) -> DrawTally:
    """Draw and run cases until one fails; shrink that. The same seed draws the same cases."""
    import hypothesis
    from hypothesis import strategies

    tally = DrawTally()

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=False,  # or the seed would not count
        report_multiple_bugs=False,
        suppress_health_check=list(hypothesis.HealthCheck),
        phases=(hypothesis.Phase.generate, hypothesis.Phase.shrink),
    )
    @hypothesis.given(strategies.data())
    def examine(data: Any) -> None:
        base = data.draw(strategies.sampled_from(found))
        case = _case(data, base)
        try:
            whole = runner.prepare(case.inputs).whole
            if not whole.finite:
                tally.refused += 1
                return
            result = runner.run(case)
        except (WholeRaised, NnscalerError, Unusable):
            tally.refused += 1
            return
        if result.refused:
            tally.refused += 1
            return
        tally.cases += 1
        tally.count += result.compared.count if result.compared is not None else 1
        if result.failed:
            tally.failed = result
            raise CounterExample

    with suppress(CounterExample):
        examine()
    return tally


def _case(data: Any, base: Base) -> SplitCase:
    from hypothesis import strategies

    targets: list[Target] = [*base.leaders, *base.linear]
    target = data.draw(strategies.sampled_from(targets))
    parts = data.draw(strategies.integers(2, 5))
    outer = data.draw(strategies.sampled_from((1, 1, 2, 3)))
    wants_uneven = data.draw(strategies.booleans())  # drawn whether it matters or not: shrinking needs that
    choice: Choice = Split(target, outer) if isinstance(target, str) else RunPartial(target)
    sizes = _sizes(data, base, target, parts * outer)
    inputs = replace(
        base.inputs,
        sizes=sizes,
        kind=data.draw(strategies.sampled_from(KINDS)) if base.inputs.kind in KINDS else base.inputs.kind,
        seed=data.draw(strategies.integers(0, 2**16)),
        dtype=data.draw(strategies.sampled_from(DTYPES)),
    )
    return SplitCase(inputs, (choice,), (parts,), wants_uneven and outer == 1 and isinstance(target, str))


def _sizes(data: Any, base: Base, target: Target, divisor: int) -> tuple[tuple[str, int], ...]:
    """Draw sizes for all identifiers of drawn inputs; a sample keeps its own."""
    from hypothesis import strategies

    bound = base.signature.bound
    if base.inputs.sample is not None or bound is None:
        return base.inputs.sizes
    together = bound.tied.get(target, (target,)) if isinstance(target, str) else ()
    sizes: dict[str, int] = {}
    for name, _ in base.inputs.sizes:
        if name in together:
            sizes[name] = divisor * data.draw(strategies.integers(1, 4))
        else:
            sizes[name] = data.draw(strategies.integers(1, 13))
    return tuple(sizes.items())
