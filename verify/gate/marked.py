"""Known findings in machine formats: suppressed in SARIF, skipped in JUnit, a notice on GitHub, named in JSON.

The reports themselves stay as they are: what is known is still refuted.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any
from xml.etree import ElementTree

from verify.gate.outcome import KNOWN, GateOutcome
from verify.report_formats import FORMATS
from verify.report_formats.github import escape_data
from verify.report_formats.junit import legal


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
        run["invocations"][0]["exitCode"] = outcome.exit_code
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
    document = json.loads(text)
    document["gate"] = {
        "exit_code": outcome.exit_code,
        "verdict": outcome.word,
        "items": [{"name": judged.result.name, "verdict": judged.word} for judged in outcome.judged],
        "known": [
            {"item": e.item, "code": e.code, "owner": e.owner, "expires": e.expires.isoformat(), "reason": e.reason}
            for judged in outcome.judged
            for e in judged.entries
        ],
    }
    return _json(document)


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
    {"sarif": _sarif, "junit": _junit, "json": _document}
)
