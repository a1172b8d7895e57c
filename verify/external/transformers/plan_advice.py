"""Advice beside the verdict on a library's plan: what reads oddly in it, and rules that mend it, each of them tried."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from nnscaler.errors import NnscalerError
from verify.external.request import ExternalRequest
from verify.external.transformers.expand_requests import model_of, program_of
from verify.external.transformers.lint_and_repair_plan import PlanRepair, WrongParameter, plan_lints, plan_repairs
from verify.external.verify import Progress
from verify.external.verify_on_levels import verify_levels
from verify.results.finding import Finding
from verify.results.report import Report
from verify.results.verdict import Verdict

_GRADIENTS = "gradient_"  # begins the codes of findings about gradients; their norm is no parameter's
_NORM = "gradient_norm_differs"


def verify_plan_of_library(request: ExternalRequest, progress: Progress) -> Report:
    """Verify the one program of a request, and advise. Raises NnscalerError as `program_of`."""
    report = verify_levels(program_of(request), request, progress)
    built, sizes = model_of(request)
    notes = tuple(f"the plan: {lint.text}" for lint in plan_lints(built, sizes) if lint.kind != "unmatched_rule")
    report = replace(report, notes=(*report.notes, *notes))
    wrong = list(_wrong(report.findings))
    if report.verdict is not Verdict.REFUTED or not wrong or request.level == "static":
        return report
    repair = _first_that_mends(request, plan_repairs(built.model, wrong), progress)
    if repair is None:
        return report
    help = f"{repair.text} (tried: with it every check passes)"
    return replace(report, findings=tuple(replace(f, help=help) if _is_of_gradients(f) else f for f in report.findings))


def _is_of_gradients(finding: Finding) -> bool:
    return finding.code.startswith(_GRADIENTS) and finding.code != _NORM


def _wrong(findings: Sequence[Finding]) -> Iterator[WrongParameter]:
    for finding in findings:
        facts = finding.counter_example
        if _is_of_gradients(finding) and "tensors" in facts:
            factor = facts.get("factor", "")
            for name in facts["tensors"].split(", "):
                yield WrongParameter(name, facts.get("cause", ""), facts.get("axis", ""), _number(factor))


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0


def _first_that_mends(request: ExternalRequest, repairs: Sequence[PlanRepair], progress: Progress) -> PlanRepair | None:
    """Return the first repair with which every check of a run passes."""
    how = replace(request, level="run", executor="simulator", checkpoint=False)
    for repair in repairs:
        progress(f"trying {repair.text}")
        try:
            report = verify_levels(program_of(request, repair.changes), how, lambda text: None)
        except NnscalerError:
            continue  # the library refuses the rule
        if report.verdict.passes:
            return repair
    return None
