"""The gate's result in formats: Markdown for a review, and known findings marked in machine formats.
Worst first; known findings last, a line each. Nothing is left out without being counted.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any
from xml.etree import ElementTree

from verify.gate.outcome import KNOWN, GateOutcome, JudgedItem
from verify.report_formats import FORMATS
from verify.report_formats.finding_text import finding_lines
from verify.report_formats.github import cell, escape_data, fenced
from verify.report_formats.junit import legal
from verify.report_formats.machine_format_findings import findings_of, reproduce_once
from verify.results.finding import Finding
from verify.results.report import totals

ROWS = 200
FINDINGS = 30
WIDTH = 2000  # characters of one line of a finding: a token may be longer than any screen


def summary(outcome: GateOutcome, seconds: float, budget: float | None) -> str:
    """Return the text; it ends with an end of line."""
    head = f"### nnscaler gate: {outcome.word}" + (", interrupted" if outcome.interrupted else "")
    lines = [head, "", counts(outcome, seconds, budget), "", *_table(outcome.judged)]
    lines += _findings(outcome)
    lines += ["", _made_with(outcome)]
    return "\n".join(lines) + "\n"


def counts(outcome: GateOutcome, seconds: float, budget: float | None) -> str:
    """`4 items: 1 refuted, 3 verified; 312 checks, 2 refuted; 31.2 s of 120 s (seed 0)`."""
    words = Counter(judged.word for judged in outcome.judged)
    told = ", ".join(f"{number} {word.lower()}" for word, number in words.items())
    number = len(outcome.judged)
    found = totals([judged.result.report for judged in outcome.judged])
    cached = sum(judged.result.cached for judged in outcome.judged)
    limit = "" if budget is None else f" of {budget:g} s"
    return (
        f"{number} item{'s' * (number != 1)}" + (f": {told}" if told else "") + f"; {found.checks} checks, "
        f"{found.refuted} refuted; {seconds:.1f} s{limit} (seed {found.seed})"
        + (f"; {cached} unchanged since they passed" if cached else "")
    )


def _table(judged: Sequence[JudgedItem]) -> list[str]:
    lines = ["| item | verdict | level | checks | time |", "|---|---|---|---:|---:|"]
    for entry in judged[:ROWS]:
        report = entry.result.report
        taken = "cached" if entry.result.cached else f"{report.seconds:.1f} s"
        level = report.verdict.value if entry.word in ("VERIFIED", "KNOWN", "REFUTED") else "none"
        lines.append(f"| {cell(entry.result.name)} | {entry.word} | {level} | {report.total} | {taken} |")
    if len(judged) > ROWS:
        lines.append(f"| {len(judged) - ROWS} more items | | | | |")
    return lines


def _findings(outcome: GateOutcome) -> list[str]:
    """Return the lines of findings: new ones first, then those of the baseline, known ones last."""
    listed: list[tuple[str, Finding]] = []
    for entry in outcome.judged:
        if entry.word != "VERIFIED":
            listed += [(entry.result.name, finding) for finding in findings_of(entry.result.report)]
    if outcome.baseline is not None:
        listed += [(outcome.baseline.subject, finding) for finding in outcome.baseline.findings]
    listed.sort(key=lambda pair: KNOWN in pair[1].counter_example)
    lines: list[str] = []
    shown = listed[:FINDINGS]
    new = iter(reproduce_once([finding for _, finding in shown if KNOWN not in finding.counter_example]))
    for name, finding in shown:
        lines += ["", *_details(name, finding if KNOWN in finding.counter_example else next(new))]
    if len(listed) > FINDINGS:
        lines += ["", f"{len(listed) - FINDINGS} more findings are not shown here."]
    return lines


def _details(name: str, finding: Finding) -> list[str]:
    if KNOWN in finding.counter_example:
        told = f": {finding.message}, known {finding.counter_example[KNOWN]}"
        return [f"**{finding.code}** in {cell(name + told)}"]
    text = "\n".join(line.text if len(line.text) <= WIDTH else _cut(line.text) for line in finding_lines(finding))
    return [f"**{finding.code}** in {cell(name)}", "", *fenced(text)]


def _cut(text: str) -> str:
    """Shorten a line. A token that is cut cannot be replayed, so the line says so instead."""
    return f"{text[:120]}... ({len(text)} characters: see the full report)"


def _made_with(outcome: GateOutcome) -> str:
    found = next((j.result.report.environment for j in outcome.judged if "torch" in j.result.report.environment), {})
    names = ("nnscaler", "torch", "python", "platform")
    return ", ".join(found[name] if name == "platform" else f"{name} {found[name]}" for name in names if name in found)


# Known findings in machine formats: suppressed in SARIF, skipped in JUnit, a notice on GitHub, named in JSON.
# The reports themselves stay as they are: what is known is still refuted.


def render(name: str, outcome: GateOutcome, seconds: float) -> str:
    """Return the text of a format; it ends with an end of line."""
    if name == "github":
        return _github(outcome, seconds)
    text = "".join(line.text + "\n" for line in FORMATS[name](outcome.reports, seconds))
    change = _CHANGES.get(name)
    return text if change is None else change(text, outcome)


def _sarif(text: str, outcome: GateOutcome) -> str:
    log = json.loads(text)
    for run in log["runs"]:
        run["invocations"][0]["exitCode"] = outcome.ends_with
        run["invocations"][0]["exitCodeDescription"] = outcome.word
        for result in run["results"]:
            known = result.get("properties", {}).get(KNOWN)
            if known is not None:
                result["suppressions"] = [{"kind": "external", "status": "accepted", "justification": known}]
    return _json(log)


def _junit(text: str, outcome: GateOutcome) -> str:
    """Skip, in the JUnit text, the cases of items whose findings are all known, and give the reason."""
    root = ElementTree.fromstring(text)
    known = {judged.result.name: judged for judged in outcome.judged if judged.known}
    for suite in root.iter("testsuite"):
        judged = next((j for name, j in known.items() if legal(name) == suite.get("name")), None)
        if judged is None:
            continue
        told = "; ".join(dict.fromkeys(f"{entry.code}, known {entry.told}" for entry in judged.entries))
        for case in suite.iter("testcase"):
            for kind in ("failure", "error"):
                problem = case.find(kind)
                if problem is not None:
                    case.remove(problem)
                    ElementTree.SubElement(case, "skipped", message=legal(told)).text = problem.text
        _count(suite)
    _count(root)
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def _count(element: ElementTree.Element) -> None:
    for kind, name in (("failure", "failures"), ("error", "errors"), ("skipped", "skipped")):
        if element.get(name) is not None:
            element.set(name, str(sum(1 for _ in element.iter(kind))))


def _document(text: str, outcome: GateOutcome) -> str:
    return _json({**json.loads(text), "gate": _gate(outcome)})


def _lines(text: str, outcome: GateOutcome) -> str:
    """Add the gate to the last line, which has the verdict on all."""
    before, _, last = text.removesuffix("\n").rpartition("\n")
    verdict = json.dumps({**json.loads(last), "gate": _gate(outcome)}, ensure_ascii=False)
    return f"{before}\n{verdict}\n" if before else f"{verdict}\n"


def _gate(outcome: GateOutcome) -> dict[str, Any]:
    return {
        "exit_code": outcome.ends_with,
        "verdict": outcome.word,
        "items": [{"name": judged.result.name, "verdict": judged.word} for judged in outcome.judged],
        "known": [
            {"item": e.item, "code": e.code, "owner": e.owner, "expires": e.expires.isoformat(), "reason": e.reason}
            for judged in outcome.judged
            for e in judged.entries
        ],
    }


def _github(outcome: GateOutcome, seconds: float) -> str:
    """Return annotations of what fails the gate; a notice for each item that is known, beyond the ten that GitHub
    shows."""
    reports = [judged.result.report for judged in outcome.judged if not judged.known]
    reports += [] if outcome.baseline is None else [outcome.baseline]
    notices = [
        f"::notice title=nnscaler (known)::{escape_data(f'{judged.result.name}: {entry.code}, known {entry.told}')}"
        for judged in outcome.judged
        if judged.known
        for entry in judged.entries
    ]
    lines = [line.text for line in FORMATS["github"](reports, seconds)] if reports else []
    return "".join(f"{line}\n" for line in [*notices, *lines])


def _json(document: Mapping[str, Any]) -> str:
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


_CHANGES: Mapping[str, Callable[[str, GateOutcome], str]] = MappingProxyType(
    {"sarif": _sarif, "junit": _junit, "json": _document, "jsonl": _lines}
)
