"""`verify_op`: is an operator's annotation true?

Every identifier is split, every shard runs as the compiler would run it, and outputs and input gradients (under random
cotangents) are compared with the whole operator's. What passes is proved where it can be. The whole and its shards run
the same backward: where that is written by hand, finite differences are a second oracle.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from op_registry.spec import OperatorSpec

from nnscaler.errors import AnnotationError
from verify.environment import environment
from verify.finding import Finding
from verify.op_checks.enumerate import Unusable
from verify.op_checks.findings import unusable
from verify.op_checks.options import OpOptions
from verify.op_checks.runner import Runner
from verify.op_checks.target import find_record
from verify.op_checks.verification import Reproduce, Verification
from verify.report import Check, Report
from verify.verdict import Verdict


def verify_op(
    operator: Any, *, annotation: str | Callable[..., Any] | None = None, seed: int = 0, isolate: bool = True
) -> Report:
    """Compare the shards of `operator` with the whole, in a child process unless `isolate` is off.

    `operator`: a registered operator, its name, `file.py::function`, `package.module:function`, or any callable with
    `annotation`. Raises NnscalerError for what cannot be run at all: an unknown name, no annotation, an annotation
    that is not in the language, a call that needs sample inputs.
    """
    from verify.op_run.job import make_job
    from verify.op_run.many import run_one

    return run_one(make_job(find_record(operator), annotation), OpOptions(seed=seed), isolate)


def verify_spec(
    spec: OperatorSpec,
    options: OpOptions | None = None,
    reproduce: Reproduce | None = None,
    progress: Callable[[str], None] | None = None,
    runner: Runner | None = None,
) -> Report:
    """As `verify_op`, for an operator's record, in this process.

    `reproduce`: gives the line that findings show. `progress` is told what runs, before it runs. `runner`: runs the
    operator on other samples than its own.
    """
    started = time.perf_counter()
    options = options or OpOptions()
    verification = Verification(spec, options, progress, reproduce, runner)
    checks: list[Check] = verification.checks
    findings: list[Finding] = verification.findings
    try:
        verification.run()
    except Unusable as problem:
        refuted = int(problem.refuted)
        checks.append(Check("whole operator", (Verdict.INCONCLUSIVE, Verdict.REFUTED)[refuted], refuted, refuted))
        findings.append(unusable(spec, problem))
    except AnnotationError as error:
        checks.append(Check("whole operator", Verdict.REFUTED, 1, 1))
        findings.append(_does_not_fit(spec, error))
    setting = f"`{verification.text}`" if verification.text else ""
    return Report(
        "verify-op",
        spec.name,
        setting,
        options.seed,
        tuple(checks),
        tuple(f.with_reproduce(reproduce(f.code, None) if reproduce is not None else None) for f in findings),
        tuple(verification.notes),
        {**environment(), "dtype": "float64"},
        time.perf_counter() - started,
    )


def _does_not_fit(spec: OperatorSpec, error: AnnotationError) -> Finding:
    first, _, rest = error.message.partition("\n")
    return Finding("annotation_does_not_fit", first, spec.where, cause=rest.strip() or None, help=error.help)
