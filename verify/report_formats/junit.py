"""JUnit XML: a suite per operator or plan and a case per check, those that pass included.

REFUTED is a `failure` and INCONCLUSIVE an `error`: readers take `skipped` for harmless, and what is not decided is not.
Only a check that passes with nothing to compare, such as the buffers of a model without any, is skipped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from xml.etree import ElementTree

from verify.report_formats.finding_text import finding_lines
from verify.report_formats.full_and_concise import check_line, one_line
from verify.report_formats.machine_format_findings import findings_by_check, findings_of
from verify.results.finding import Finding
from verify.results.report import Check, Report, totals
from verify.results.styled_line import StyledLine, last_line, plain_lines
from verify.results.verdict import Verdict


def render(reports: Sequence[Report], seconds: float = 0.0) -> list[StyledLine]:
    """Return the XML document."""
    found = totals(reports, seconds)
    root = ElementTree.Element("testsuites", name=legal(f"nnscaler {found.tool}".rstrip()))
    for report in reports:
        _suite(root, report)
    if not reports:  # an empty document would read as a pass
        suite = ElementTree.SubElement(root, "testsuite", name="nnscaler")
        case = ElementTree.SubElement(suite, "testcase", classname="nnscaler", name="verdict", time="0.000")
        ElementTree.SubElement(case, "error", type="INCONCLUSIVE", message="there was nothing to verify")
        _count(suite, 0.0)
    _count(root, found.seconds)
    del root.attrib["skipped"]  # the schema has it for suites alone
    ElementTree.indent(root)
    return plain_lines('<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(root, encoding="unicode"))


def legal(text: str) -> str:
    """Return the text without characters that XML 1.0 forbids even when escaped: they are written as `\\x1b`."""
    return "".join(letter if _is_legal(ord(letter)) else _escape(ord(letter)) for letter in text)


def _is_legal(code: int) -> bool:
    return (
        code in (0x9, 0xA) or 0x20 <= code < 0x7F or 0xA0 <= code <= 0xD7FF or 0xE000 <= code <= 0xFFFD or code > 0xFFFF
    )


def _escape(code: int) -> str:
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def _suite(root: ElementTree.Element, report: Report) -> None:
    suite = ElementTree.SubElement(root, "testsuite", name=legal(report.subject))
    properties = ElementTree.SubElement(suite, "properties")
    facts = {"tool": report.tool, "setting": report.setting, "seed": str(report.seed), "verdict": str(report.verdict)}
    for name, value in {**facts, **report.environment}.items():
        ElementTree.SubElement(properties, "property", name=legal(name), value=legal(value))
    findings = findings_by_check(report)
    for index, (name, check) in enumerate(zip(case_names(report.checks), report.checks, strict=True)):
        case = _case(suite, report, name, check.seconds)
        if not check.verdict.passes:
            _problem(case, check.verdict, findings[index], check_line(check).text)
        elif not check.count:
            ElementTree.SubElement(case, "skipped", message="there was nothing to compare")
    if not report.verdict.passes and not findings:  # no check of the report says that it does not pass
        case = _case(suite, report, "verdict", 0.0)
        _problem(case, report.verdict, list(findings_of(report)), "no check compared anything")
    text = "\n".join([*(f"note: {note}" for note in report.notes), last_line([report]).text])
    ElementTree.SubElement(suite, "system-out").text = legal(text)
    _count(suite, report.seconds)


def case_names(checks: Sequence[Check]) -> list[str]:
    """Return names that no two checks share: a second `loss` is `loss (2)`."""
    seen: Counter[str] = Counter()
    names: list[str] = []
    for check in checks:
        name = check.name or "verdict"
        seen[name] += 1
        names.append(name if seen[name] == 1 else f"{name} ({seen[name]})")
    return names


def _case(suite: ElementTree.Element, report: Report, name: str, seconds: float) -> ElementTree.Element:
    classname = legal(f"{report.tool}.{report.subject}")
    return ElementTree.SubElement(suite, "testcase", classname=classname, name=legal(name), time=f"{seconds:.3f}")


def _problem(case: ElementTree.Element, verdict: Verdict, findings: Sequence[Finding], summary: str) -> None:
    kind = "failure" if verdict is Verdict.REFUTED else "error"
    message = one_line(findings[0].message) if findings else one_line(summary)
    code = findings[0].code if findings else verdict.value
    problem = ElementTree.SubElement(case, kind, type=legal(code), message=legal(message))
    blocks = [summary, *("\n".join(line.text for line in finding_lines(finding)) for finding in findings)]
    problem.text = legal("\n\n".join(blocks))


def _count(element: ElementTree.Element, seconds: float) -> None:
    """Set the counts of a suite, or of all suites."""
    for kind, name in (("testcase", "tests"), ("failure", "failures"), ("error", "errors"), ("skipped", "skipped")):
        element.set(name, str(sum(1 for _ in element.iter(kind))))
    element.set("time", f"{seconds:.3f}")
