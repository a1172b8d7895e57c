"""Reports and results made by hand."""

from __future__ import annotations

from datetime import date

from op_registry.source_location import SourceLocation

from verify.gate.accepted_findings_with_owners import KnownFinding
from verify.gate.outcome import ItemResult
from verify.results.finding import Finding
from verify.results.report import Check, Report
from verify.results.verdict import Verdict

TODAY = date(2026, 11, 21)
LATER = date(2027, 1, 31)
ENVIRONMENT = {"nnscaler": "0.1.0", "torch": "2.13.0", "python": "3.11.7", "platform": "Linux x86_64"}


def finding(code: str = "gradient_differs", tensor: str = "layer.weight", line: int = 3) -> Finding:
    where = SourceLocation("model.py", line, "h = self.layer(x)")
    message = f"the gradient of `{tensor}` is 0.5 and not 1.0"
    return Finding(code, message, where, {"tensor": tensor}, reproduce="nnscaler reproduce nns2:abc")


def report(*findings: Finding, verdict: Verdict | None = None, checks: tuple[str, ...] = ("gradients",)) -> Report:
    level = verdict or (Verdict.REFUTED if findings else Verdict.TESTED_EXACT)
    count = 0 if level is Verdict.INCONCLUSIVE else 4
    refuted = 4 if level is Verdict.REFUTED else 0
    made = tuple(Check(name, level, count, refuted) for name in checks)
    passed = Check("loss", Verdict.TESTED_EXACT, 2)
    return Report("verify-plan", "model.py", "on 2 ranks", 0, (passed, *made), findings, (), ENVIRONMENT, 1.5)


def result(name: str, *findings: Finding, stop: int = 0, finished: bool = True, **of: object) -> ItemResult:
    return ItemResult(name, report(*findings, **of), stop, finished)  # type: ignore[arg-type]


def entry(item: str = "a", code: str = "gradient_differs", expires: date = LATER, **more: object) -> KnownFinding:
    return KnownFinding(item, code, "ann@example.org", expires, "the fix is in review", **more)  # type: ignore[arg-type]
