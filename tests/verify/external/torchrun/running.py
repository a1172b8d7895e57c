"""Scripts as others write them, and how tests run them."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from verify.external.torchrun.verify import verify_script
from verify.results.report import Report

SCRIPTS = Path(__file__).parent / "scripts"


@cache
def verified(command: str, ranks: int, **options: float | str) -> Report:
    """Verify one of the scripts of this folder, once in a process: "by_hand.py --loss sum"."""
    script, *rest = command.split()
    return verify_script([str(SCRIPTS / script), *rest], ranks=ranks, **options)  # type: ignore[arg-type]


def told(report: Report) -> str:
    """Return all that a report says, for the message of a test that fails."""
    lines = [f"{check.name}: {check.verdict} {check.count} {check.detail}" for check in report.checks]
    lines += [f"{finding.code}: {finding.message}; {finding.cause}" for finding in report.findings]
    return "\n".join([str(report.verdict), *lines, *report.notes])
