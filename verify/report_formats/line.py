"""What a report format for people returns: lines of styled text. Colours are chosen by whoever prints them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from verify.report import Report
from verify.verdict import Verdict

Style = Literal["", "strong", "good", "bad", "unsure", "faint"]


@dataclass(frozen=True, slots=True)
class Line:
    """A line made of (text, style) pieces."""

    pieces: tuple[tuple[str, Style], ...]

    @property
    def text(self) -> str:
        """The line without styles."""
        return "".join(text for text, _ in self.pieces)


def plain(text: str, style: Style = "") -> Line:
    """A line of one style."""
    return Line(((text, style),))


def style_of(verdict: Verdict) -> Style:
    """Green, yellow or red. The word stands beside it, so colour alone never carries the meaning."""
    if verdict.passes:
        return "good"
    return "bad" if verdict is Verdict.REFUTED else "unsure"


def last_line(report: Report) -> Line:
    """The verdict with its counts, always last: `VERIFIED  gpt.py on 8 ranks (dp=2 tp=2 pp=2): 214 checks, ...`."""
    head = f"  {report.subject} {report.setting}".rstrip()
    return Line(((report.verdict.word, style_of(report.verdict)), (f"{head}: {counts(report)}", "")))


def counts(report: Report) -> str:
    """`214 checks, 0 refuted, 12.4 s (seed 0)`."""
    noun = "check" if report.total == 1 else "checks"
    return f"{report.total} {noun}, {report.refuted} refuted, {report.seconds:.1f} s (seed {report.seed})"
