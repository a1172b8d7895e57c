"""Totals over all reports of a run: one verdict, counts, seed and time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from verify.results.report import Report
from verify.results.verdict import Verdict, merge

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
    noun          what a report is about: operators, plans or reports
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
    noun = {"verify-op": "operator", "verify-plan": "plan"}.get("".join(tools), "report")
    return noun + "s" * (number != 1)


def _shared(environments: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Return the entries on which the environments of all reports agree."""
    first = dict(environments[0]) if environments else {}
    return {key: text for key, text in first.items() if all(other.get(key) == text for other in environments)}
