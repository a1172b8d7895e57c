"""The result of a verification: checks with counts, findings, and one verdict."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from verify.results.finding import Finding
from verify.results.typed_attachments import Attachments
from verify.results.verdict import Verdict, merge

# Versions and machine, for reports: what a reader needs to know before comparing two of them.


def environment() -> dict[str, str]:
    """Return the versions of nnscaler, torch and Python, and the platform."""
    return {
        "nnscaler": version_of("nnscaler"),
        "torch": version_of("torch"),
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
    }


@cache
def version_of(package: str) -> str:
    """Return the version of an installed package, or "not installed"."""
    from importlib.metadata import PackageNotFoundError, version  # it reads mail headers: short commands need none

    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class Check:
    """One kind of comparison.

    count       comparisons that were made
    refuted     comparisons that failed
    seconds     that it took
    detail      a remark for people ("worst difference 3e-15")
    supporting  an audit rather than a claim of its own: it lowers the verdict only where it fails
    failures    a digest of all its findings, where it has more than are shown
    """

    name: str
    verdict: Verdict
    count: int
    refuted: int = 0
    seconds: float = 0.0
    detail: str = ""
    supporting: bool = False
    failures: str = ""

    def with_other(self, other: Check) -> Check:
        """Return the same check of both subjects, such as two sample calls."""
        return replace(
            self,
            verdict=merge([self.verdict, other.verdict]),
            count=self.count + other.count,
            refuted=self.refuted + other.refuted,
            seconds=self.seconds + other.seconds,
            detail=self.detail or other.detail,
            failures=" ".join(filter(None, (self.failures, other.failures))),
        )

    def undecided(self) -> Check:
        """Return the check, one that decides nothing where it refutes."""
        return replace(self, verdict=Verdict.INCONCLUSIVE, refuted=0) if self.verdict is Verdict.REFUTED else self


@dataclass(frozen=True)
class Report:
    """The result of one verification: what was verified, how, and with which outcome.

    tool         "verify-plan", "verify-op" or "verify-external"
    subject      what was verified, short: "gpt.py"
    setting      how: "on 8 ranks (dp=2 tp=2 pp=2, 1F1B, 4 micro-batches)"; may be empty
    notes        what the reader must know: dropout was off, an operator was replicated
    environment  versions, backend, dtype, tolerance
    attachments  what else was measured
    """

    tool: str
    subject: str
    setting: str
    seed: int
    checks: tuple[Check, ...]
    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    attachments: Attachments = field(default_factory=Attachments)

    @property
    def verdict(self) -> Verdict:
        """The weakest verdict of all checks; INCONCLUSIVE where nothing was counted."""
        counted = [check for check in self.checks if check.count or not check.verdict.passes]
        claims = [check for check in counted if not check.supporting or not check.verdict.passes]
        return merge(check.verdict for check in (claims or counted))

    @property
    def exit_code(self) -> int:
        """Of a command that shows this report: that of its verdict."""
        return self.verdict.exit_code

    @property
    def total(self) -> int:
        """Comparisons made."""
        return sum(check.count for check in self.checks)

    @property
    def refuted(self) -> int:
        """Comparisons that failed."""
        return sum(check.refuted for check in self.checks)

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON document; fields are only ever added under one `schema_version`."""
        return {
            "schema_version": SCHEMA_VERSION,
            "tool": self.tool,
            "subject": self.subject,
            "setting": self.setting,
            "verdict": self.verdict.word,
            "level": self.verdict.value,
            "exit_code": self.exit_code,
            "seed": self.seed,
            "seconds": round(self.seconds, 3),
            "environment": dict(self.environment),
            "notes": list(self.notes),
            "counts": {"checks": self.total, "refuted": self.refuted},
            "checks": [_check(check) for check in self.checks],
            "findings": [_finding(finding) for finding in self.findings],
            "attachments": plain_json(self.attachments.as_dict()),
        }

    def to_json(self) -> str:
        """Return the report as a JSON text."""
        return json.dumps(self.as_dict(), indent=2, ensure_ascii=False)


def plain_json(value: Any) -> Any:
    """Return the value made of what JSON has: NaN and infinity, which it lacks, are the texts "nan",
    "inf" and "-inf"."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): plain_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_json(item) for item in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def _check(check: Check) -> dict[str, Any]:
    return {
        "name": check.name,
        "verdict": check.verdict.value,
        "count": check.count,
        "refuted": check.refuted,
        "seconds": round(check.seconds, 3),
        "detail": check.detail,
        "supporting": check.supporting,
    }


def _finding(finding: Finding) -> dict[str, Any]:
    where = finding.where
    return {
        "code": finding.code,
        "message": finding.message,
        "where": None if where is None else {"file": where.file, "line": where.line, "text": where.text},
        "counter_example": dict(finding.counter_example),
        "cause": finding.cause,
        "help": finding.help,
        "reproduce": finding.reproduce,
        "related": [{"what": what, "file": place.file, "line": place.line} for what, place in finding.related],
    }


# Totals over all reports of a run: one verdict, counts, seed and time.

_WORDS = ("REFUTED", "INCONCLUSIVE", "VERIFIED")  # worst first


@dataclass(frozen=True)
class Totals:
    """
    verdict       the weakest of all reports; INCONCLUSIVE where there are none
    words         how many reports are REFUTED, INCONCLUSIVE and VERIFIED, in this order
    levels        how many reports have which verdict, strongest first, without those that none has
    checks        comparisons made; `refuted` of them failed
    seconds       the time that all took together
    seed          the seed, or the seeds where they differ: "0, 7"; "none" without reports
    noun          what a report is about: operators, plans, programs or reports
    """

    tool: str
    verdict: Verdict
    words: Mapping[str, int]
    levels: Mapping[Verdict, int]
    checks: int
    refuted: int
    seconds: float
    seed: str
    noun: str
    environment: Mapping[str, str]


def totals(reports: Sequence[Report], seconds: float = 0.0) -> Totals:
    """Return the totals; `seconds` of 0 stands for the sum of the reports' own."""
    verdicts = [report.verdict for report in reports]
    tools = sorted({report.tool for report in reports})
    words = {word: sum(verdict.word == word for verdict in verdicts) for word in _WORDS}
    seeds = sorted({report.seed for report in reports})
    return Totals(
        tool=", ".join(tools),
        verdict=merge(verdicts),
        words=words,
        levels={level: verdicts.count(level) for level in Verdict if level in verdicts},
        checks=sum(report.total for report in reports),
        refuted=sum(report.refuted for report in reports),
        seconds=seconds or sum(report.seconds for report in reports),
        seed=", ".join(map(str, seeds)) or "none",
        noun=_noun(tools, len(reports)),
        environment=_shared([report.environment for report in reports]),
    )


def _noun(tools: Sequence[str], number: int) -> str:
    noun = {"verify-op": "operator", "verify-plan": "plan", "verify-external": "program"}.get("".join(tools), "report")
    return noun + "s" * (number != 1)


def _shared(environments: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Return the entries on which the environments of all reports agree."""
    first = dict(environments[0]) if environments else {}
    return {key: text for key, text in first.items() if all(other.get(key) == text for other in environments)}
