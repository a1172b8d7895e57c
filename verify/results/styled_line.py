"""Lines of styled text, which formats for people return. Colours are chosen by whoever prints them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from verify.results.report import Report, Totals, totals
from verify.results.verdict import Verdict

Style = Literal["", "strong", "good", "bad", "unsure", "faint"]
WORDS: Mapping[Style, str] = {"good": "PASS", "bad": "FAIL", "unsure": "OPEN"}


@dataclass(frozen=True, slots=True)
class StyledLine:
    """A line made of (text, style) pieces."""

    pieces: tuple[tuple[str, Style], ...]

    @property
    def text(self) -> str:
        """The line without styles."""
        return "".join(text for text, _ in self.pieces)


def plain(text: str, style: Style = "") -> StyledLine:
    """Return a line of one style."""
    return StyledLine(((text, style),))


def plain_lines(text: str) -> list[StyledLine]:
    """Return a text of several lines.

    Only LF ends a line: the other characters that `splitlines` takes may stand in one.
    """
    return [plain(line) for line in text.split("\n")]


def style_of(verdict: Verdict) -> Style:
    """Return green, yellow or red. The word stands beside it, so colour alone never carries the meaning."""
    if verdict.passes:
        return "good"
    return "bad" if verdict is Verdict.REFUTED else "unsure"


def last_line(reports: Sequence[Report], seconds: float = 0.0) -> StyledLine:
    """Return the verdict with its counts, always last.

    `VERIFIED  gpt.py on 8 ranks (dp=2 tp=2 pp=2): 214 checks, ...`, or
    `REFUTED  3 operators (1 refuted, 2 verified): 60 checks, ...`.
    """
    found = totals(reports, seconds)
    if len(reports) == 1:
        head = f"{reports[0].subject} {reports[0].setting}".rstrip()
    else:
        words = ", ".join(f"{number} {word.lower()}" for word, number in found.words.items() if number)
        head = f"{len(reports)} {found.noun}" + (f" ({words})" if words else "")
    return StyledLine(((found.verdict.word, style_of(found.verdict)), (f"  {head}: {counts(found)}", "")))


def counts(found: Totals) -> str:
    """`214 checks, 0 refuted, 12.4 s (seed 0)`."""
    noun = "check" if found.checks == 1 else "checks"
    return f"{found.checks} {noun}, {found.refuted} refuted, {found.seconds:.1f} s (seed {found.seed})"
