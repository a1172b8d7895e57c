"""Combine the results of all items: new findings, errors of the baseline, and one exit code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from typing import Any, Literal

from verify.gate.accepted_findings_with_owners import KnownFinding, entries_of, failing_checks, fingerprints, named
from verify.gate.items import OpItem
from verify.results.finding import Finding
from verify.results.finding_codes import UNFINISHED
from verify.results.report import Check, Report, environment
from verify.results.verdict import Verdict

Word = Literal["INTERNAL ERROR", "COULD NOT RUN", "REFUTED", "INCONCLUSIVE", "NOT RUN", "KNOWN", "VERIFIED"]
KNOWN = "known"  # the fact that a known finding has, with its owner and date
_PRIORITY = (101, 2, 1, 3, 0)  # of exit codes: a bug of ours hides nothing; a counter-example goes before "undecided"
_WORST: tuple[Word, ...] = (
    "INTERNAL ERROR",
    "COULD NOT RUN",
    "REFUTED",
    "INCONCLUSIVE",
    "NOT RUN",
    "KNOWN",
    "VERIFIED",
)


@dataclass(frozen=True)
class ItemResult:
    """The result of one item.

    stop       2: it could not be run; 101: nnScaler failed on it; 0: the report's verdict counts
    finished   whether all that was asked ran: only then can a finding be missed
    operators  of a plan, where the operators of the models are asked for: all that the user's code had registered when
               it was verified
    """

    name: str
    report: Report
    stop: int = 0
    finished: bool = True
    cached: bool = False
    operators: tuple[OpItem, ...] = ()


@dataclass(frozen=True)
class JudgedItem:
    """A result beside the baseline. `known`: all that is wrong with it is known. `entries`: those that were found."""

    result: ItemResult
    known: bool
    new: tuple[Finding, ...]
    entries: tuple[KnownFinding, ...] = ()

    @property
    def exit_code(self) -> int:
        return self.result.stop or (0 if self.known else self.result.report.exit_code)

    @property
    def word(self) -> Word:
        """The verdict in a word or two."""
        if self.result.stop:
            return "INTERNAL ERROR" if self.result.stop == 101 else "COULD NOT RUN"
        if self.known:
            return "KNOWN"
        report = self.result.report
        if report.verdict is Verdict.INCONCLUSIVE:
            return "NOT RUN" if any(f.code == "not_run" for f in report.findings) else "INCONCLUSIVE"
        return "VERIFIED" if report.verdict.passes else "REFUTED"


@dataclass(frozen=True)
class GateOutcome:
    """Everything, worst first.

    baseline     what is wrong with the baseline, None where nothing is
    interrupted  the exit code of the signal that ended the gate; 0 where none did
    """

    judged: tuple[JudgedItem, ...]
    baseline: Report | None = None
    interrupted: int = 0

    @property
    def exit_code(self) -> int:
        """101 > 2 > 1 > 3 > 0. Without an item, or without a comparison, it is 3."""
        codes = {judged.exit_code for judged in self.judged}
        if self.baseline is not None:
            codes.add(self.baseline.exit_code)
        if not any(judged.result.report.total for judged in self.judged):
            codes.add(3)
        return worst_code(codes)

    @property
    def ends_with(self) -> int:
        """The exit code of the command."""
        return self.interrupted or self.exit_code

    @property
    def word(self) -> str:
        """The first words of the summary."""
        code = self.exit_code
        if code == 0:
            return "VERIFIED but for known findings" if any(j.known for j in self.judged) else "VERIFIED"
        return {1: "REFUTED", 2: "COULD NOT RUN", 3: "INCONCLUSIVE"}.get(code, "INTERNAL ERROR")

    @property
    def reports(self) -> tuple[Report, ...]:
        """For report formats: each item's, under the item's name, and that on the baseline."""
        found = tuple(judged.result.report for judged in self.judged)
        return found if self.baseline is None else (*found, self.baseline)


def worst_code(codes: set[int]) -> int:
    """Return the exit code that counts; 3 where there is none."""
    return next((code for code in _PRIORITY if code in codes), 3)


def judge(
    results: Sequence[ItemResult], entries: Sequence[KnownFinding], items: set[str], today: date, baseline: str
) -> GateOutcome:
    """Compare the results with the known findings.

    `items`: the names of all items of the gate, those that were not asked for this time as well. `baseline`: the name
    of its file.
    """
    judged = sorted(
        (judge_one(r, entries, today) for r in results), key=lambda j: (_WORST.index(j.word), j.result.name)
    )
    wrong = [_expired(entry) for entry in entries if entry.expired(today)]
    wrong += [_stale(entry) for entry in stale_entries(judged, entries, items) if not entry.expired(today)]
    return GateOutcome(tuple(judged), _baseline_report(wrong, len(entries), baseline) if wrong else None)


def judge_one(result: ItemResult, entries: Sequence[KnownFinding], today: date) -> JudgedItem:
    """Judge one result. Its report is given the item's name, and its known findings say so."""
    report = replace(result.report, subject=result.name)
    if result.stop or report.verdict.passes:
        return JudgedItem(replace(result, report=report), False, report.findings)
    held: list[KnownFinding] = []
    new: list[Finding] = []
    shown: list[Finding] = []
    for finding, fingerprint in fingerprints(report):
        found = [e for e in entries if e.matches(result.name, finding, fingerprint) and not e.expired(today)]
        if found and finding.code not in UNFINISHED:
            held += found
            finding = replace(finding, counter_example={**finding.counter_example, KNOWN: found[0].told})
        else:
            new.append(finding)
        shown.append(finding)
    beyond = _beyond(report, held)
    if beyond and not new:
        new.append(beyond)
        shown.append(beyond)
    report = replace(report, findings=tuple(shown))
    return JudgedItem(replace(result, report=report), bool(held) and not new, tuple(new), tuple(dict.fromkeys(held)))


def _beyond(report: Report, held: Sequence[KnownFinding]) -> Finding | None:
    """Find checks that fail beside those that failed when the findings became known, or otherwise than then: new
    errors may hide behind them."""
    allowed = [set(entry.checks) for entry in held if entry.checks is not None]
    failing = failing_checks(report) if allowed else [named(check) for check in report.checks if check.failures]
    more = sorted(set(failing) - set().union(*allowed)) if held else []
    if not more:
        return None
    text = f"`{report.subject}` fails more than when its findings became known: {', '.join(more)}"
    help = "something new may hide behind what is known; nnscaler gate --update-baseline writes it as it is now"
    return Finding("baseline_stale", text, held[0].where, help=help)


def stale_entries(judged: Sequence[JudgedItem], entries: Sequence[KnownFinding], items: set[str]) -> list[KnownFinding]:
    """Return the entries of items that are gone, or that ran to their end without the finding."""
    ran = {j.result.name for j in judged if j.result.finished and not j.result.stop}
    seen = {entry for j in judged for entry in j.entries}
    return [e for e in entries if (e.item in ran or e.item not in items) and e not in seen]


def _expired(entry: KnownFinding) -> Finding:
    message = f"the known finding `{entry.code}` of {entry.item!r} has expired on {entry.expires}, owner: {entry.owner}"
    help = "correct what it is about, or write it again: nnscaler gate --update-baseline --owner NAME --expires DATE"
    return Finding("baseline_expired", message, entry.where, {"reason": entry.reason}, help=help)


def _stale(entry: KnownFinding) -> Finding:
    message = f"the known finding `{entry.code}` of {entry.item!r} does not occur any more, owner: {entry.owner}"
    help = "remove the entry: nnscaler gate --update-baseline does"
    return Finding("baseline_stale", message, entry.where, {"reason": entry.reason}, help=help)


def _baseline_report(wrong: Sequence[Finding], count: int, name: str) -> Report:
    check = Check("known findings", Verdict.REFUTED, count, len(wrong), detail="expired, or gone")
    return Report("gate", name, "", 0, (check,), tuple(wrong), (), environment())


def updated_entries(
    results: Sequence[ItemResult], old: Sequence[KnownFinding], names: set[str], today: date, blame: Mapping[str, Any]
) -> tuple[list[KnownFinding], list[Finding]]:
    """Return the entries that the baseline should hold now, and the findings that no baseline may accept.

    Entries of items that did not finish stay as they are; entries of items that no longer exist are dropped.
    """
    entries: list[KnownFinding] = []
    refused: list[Finding] = []
    ran = {r.name for r in results if r.finished and not r.stop}
    for result in sorted(results, key=lambda r: r.name):
        report = replace(result.report, subject=result.name)
        if result.name not in ran:
            refused += report.findings
        elif not report.verdict.passes:
            made, others = entries_of(result.name, report, old, today, blame)
            entries += made
            refused += others
    return [*entries, *(entry for entry in old if entry.item in names - ran)], refused
