"""A finding: one thing that is wrong (or could not be decided), with what a person needs to act on it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from op_registry.source_location import SourceLocation


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found, where, and what helps to mend it.

    code             stable, snake_case, listed in `verify.results.finding_codes`
    message          one sentence that names the tensor, collective or identifier
    where            the place in the user's source, None where there is none
    counter_example  what was run and what came out, in order: {"step": "0", "expected": "...", "rank": "3"}
    cause            why, where it can be named
    help             what to do
    reproduce        one command line or Python line that shows it again
    related          other places: (what it is, file:line), such as the line of the generated program
    """

    code: str
    message: str
    where: SourceLocation | None = None
    counter_example: Mapping[str, str] = field(default_factory=dict)
    cause: str | None = None
    help: str | None = None
    reproduce: str | None = None
    related: tuple[tuple[str, SourceLocation], ...] = ()

    def with_reproduce(self, line: str | None) -> Finding:
        """Return the same finding with its line that reproduces it, unless it has one."""
        return self if self.reproduce or line is None else replace(self, reproduce=line)


def digest_of(findings: Iterable[Finding]) -> str:
    """Return what tells these findings from others, whatever their order, their numbers and their lines' numbers."""
    abouts = []
    for finding in findings:
        facts = [finding.counter_example.get(name, "") for name in ("identifier", "tensor", "parameter", "check")]
        text = "" if finding.where is None else finding.where.text
        abouts.append("\0".join([finding.code, *facts, text]))
    return hashlib.sha256("\n".join(sorted(abouts)).encode("utf-8", "backslashreplace")).hexdigest()[:12]
