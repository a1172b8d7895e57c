"""Temporary: `verify_spec` with a case-aware `reproduce`."""

from __future__ import annotations

from collections.abc import Callable

from op_registry.spec import OperatorSpec

import verify.operators as operators
from verify.finding import Finding
from verify.op_checks.options import OpOptions
from verify.op_checks.runner import CaseResult
from verify.op_checks.verification import Verification
from verify.report import Report


def verify_spec(spec: OperatorSpec, options: OpOptions, reproduce, progress: Callable[[str], None]) -> Report:
    class Recorded(Verification):
        def wrong(self, result: CaseResult) -> Finding:
            finding = super().wrong(result)
            return finding.with_reproduce(reproduce(finding.code, result.case))

    before = operators.Verification
    operators.Verification = Recorded
    try:
        report = operators.verify_spec(spec, options, None, progress)
    finally:
        operators.Verification = before
    from dataclasses import replace

    return replace(report, findings=tuple(f.with_reproduce(reproduce(f.code, None)) for f in report.findings))
