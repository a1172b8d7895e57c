"""Known findings: who owns each of them, and until when it may stay.

    [[finding]]
    item = "model.py ranks=2"
    code = "gradient_differs"
    fingerprint = "..."            # or message = "a part of it", or tensor = "layer.weight"
    owner = "me@example.org"
    expires = 2027-01-31
    reason = "the fix is in review"

A known finding does not fail the gate, and is shown. An entry that has expired, and one whose finding does not occur
any more, do. What says that nothing was decided cannot be known.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from nnscaler.atomic_writes import write_text
from nnscaler.errors import SourceLocation
from nnscaler.pyproject_settings import Document, Key, KeyPath, read_document, read_table
from verify.report_formats.machine_format_findings import problems
from verify.results.finding import Finding
from verify.results.finding_codes import CODES, UNFINISHED
from verify.results.report import Check, Report

_KEYS = (
    Key("item", "text", required=True),
    Key("code", "text", required=True),
    Key("message", "text"),
    Key("tensor", "text"),
    Key("fingerprint", "text"),
    Key("checks", "texts"),
    Key("owner", "text", required=True),
    Key("expires", "date", required=True),
    Key("reason", "text", required=True),
)
_HEAD = """\
# Findings that are known: the gate shows them and does not fail. Each has an owner and a date until which it may stay.
# `nnscaler gate --update-baseline --owner NAME --expires DATE --reason TEXT` writes this file.
"""


@dataclass(frozen=True)
class KnownFinding:
    """One known finding of a baseline.

    item, code         the item and the finding's code; both must match
    owner              who looks after it
    expires            last day on which the entry is valid
    message            text that the finding's message contains; None: any
    tensor             tensor or parameter that the finding names; None: any
    fingerprint        of the finding; None: any
    checks             the item's checks that fail with it, so that another failing check is new; None: any
    """

    item: str
    code: str
    owner: str
    expires: date
    reason: str
    message: str | None = None
    tensor: str | None = None
    fingerprint: str | None = None
    checks: tuple[str, ...] | None = None
    where: SourceLocation | None = None

    def matches(self, item: str, finding: Finding, fingerprint: str) -> bool:
        """Return whether the finding of this item is the one that the entry describes."""
        facts = finding.counter_example
        return (
            (self.item, self.code) == (item, finding.code)
            and (self.message is None or self.message in finding.message)
            and (self.tensor is None or self.tensor in (facts.get("tensor"), facts.get("parameter")))
            and (self.fingerprint is None or self.fingerprint == fingerprint)
        )

    def expired(self, today: date) -> bool:
        """Return whether the entry's last day has passed."""
        return today > self.expires

    @property
    def told(self) -> str:
        """`until 2027-01-31, owner: me@example.org (the fix is in review)`."""
        return f"until {self.expires}, owner: {self.owner} ({self.reason})"


def read_baseline(file: Path | None) -> tuple[KnownFinding, ...]:
    """Return the known findings: none where there is no file yet, for then every finding is new.

    Raises NnscalerError `no_such_file` for one that cannot be read, and `bad_settings` for an entry that is wrong or
    lacks something.
    """
    if file is None or not file.exists():
        return ()
    document = read_document(file)
    for key in document.content:
        if key != "finding":
            raise document.error((key,), f"{file.name} has no key {key!r}", "each entry is a [[finding]]")
    found = document.value(("finding",))
    if found is None:
        return ()
    if not isinstance(found, list) or not all(isinstance(entry, dict) for entry in found):
        raise document.error(("finding",), f"finding of {file.name} is not a list of tables", "[[finding]]")
    return tuple(_entry(document, ("finding", number)) for number in range(len(found)))


def _entry(document: Document, path: KeyPath) -> KnownFinding:
    values: dict[str, Any] = read_table(document, path, _KEYS)
    code = values["code"]
    if code not in CODES:
        raise document.error((*path, "code"), f"there is no finding {code!r}", "docs/findings.md lists the codes")
    if code in UNFINISHED:
        message = f"{code!r} cannot be known: it says that something was not verified"
        raise document.error((*path, "code"), message, "take the item out of the gate, or make it run")
    checks = values.pop("checks", None)
    return KnownFinding(**values, checks=None if checks is None else tuple(checks), where=document.place(path))


def fingerprints(report: Report) -> list[tuple[Finding, str]]:
    """Return each finding of a report with what identifies it from run to run, whatever the seed and
    the line number."""
    return [(problem.finding, problem.fingerprint) for problem in problems([report])]


def failing_checks(report: Report) -> tuple[str, ...]:
    """Return the names of the checks that do not pass, with the digest of its findings where not all are shown."""
    return tuple(dict.fromkeys(named(check) for check in report.checks if not check.verdict.passes))


def named(check: Check) -> str:
    """`gradients`; `gradients 0f3e1b9a2c4d` where it has more findings than are shown."""
    return " ".join(filter(None, (check.name, check.failures)))


def entries_of(
    item: str, report: Report, old: Sequence[KnownFinding], today: date, blame: Mapping[str, Any]
) -> tuple[list[KnownFinding], list[Finding]]:
    """Return the entries that make a report's findings known, and the findings that cannot be.

    An entry that holds already keeps its owner and its date; `blame`: owner, expires and reason of the others.
    """
    made: list[KnownFinding] = []
    refused: list[Finding] = []
    checks = failing_checks(report)
    for finding, fingerprint in fingerprints(report):
        if finding.code in UNFINISHED:
            refused.append(finding)
            continue
        held = next((e for e in old if e.matches(item, finding, fingerprint) and not e.expired(today)), None)
        said = blame if held is None else {"owner": held.owner, "expires": held.expires, "reason": held.reason}
        made.append(
            KnownFinding(item, finding.code, message=finding.message, fingerprint=fingerprint, checks=checks, **said)
        )
    return made, refused


def write_baseline(file: Path, entries: Iterable[KnownFinding]) -> None:
    """Replace the file. Raises NnscalerError `cannot_write`."""
    write_text(file, "\n".join([_HEAD, *map(_written, entries)]))


def _written(entry: KnownFinding) -> str:
    """Write an entry as TOML.

    A message beside a fingerprint is for the reader: its numbers may change from run to run.
    """
    lines = ["[[finding]]"]
    if entry.fingerprint is not None and entry.message is not None:
        lines.append(f"# {' '.join(entry.message.split())}")
    for name in ("item", "code", "fingerprint", "message", "tensor"):
        value = getattr(entry, name)
        if value is not None and not (name == "message" and entry.fingerprint is not None):
            lines.append(f"{name} = {quoted(value)}")
    if entry.checks is not None:
        lines.append(f"checks = [{', '.join(map(quoted, entry.checks))}]")
    lines += [f"owner = {quoted(entry.owner)}", f"expires = {entry.expires.isoformat()}"]
    return "\n".join([*lines, f"reason = {quoted(entry.reason)}", ""])


def quoted(text: str) -> str:
    """Return a basic string of TOML."""
    named = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t"}
    plain = (c if 0x20 <= ord(c) != 0x7F else f"\\u{ord(c):04X}" for c in text)
    return '"' + "".join(named.get(c, p) for c, p in zip(text, plain, strict=True)) + '"'
