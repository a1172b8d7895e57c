"""The report on missing annotations for people."""

from __future__ import annotations

from collections.abc import Iterator

from verify.operators.missing.report import MissingReport, MissingRow
from verify.operators.missing.shares import Shares
from verify.operators.missing.uses import Missing, places
from verify.results.line import Style, StyledLine, plain, style_of

MOST_PLACES = 4
_KINDS = {"aten": "torch", "library": "torch.library", "function": "autograd.Function"}


def missing_lines(report: MissingReport) -> list[StyledLine]:
    """Return the report: operators that a parameter reaches with their stubs, the others in a line, the cost, and the
    sum."""
    lines: list[StyledLine] = []
    for row in report.rows:
        lines += [*_row(row), plain("")]
    if report.local:
        names = ", ".join(f"{m.name} ({_calls(m)})" for m in report.local)
        text = f"without annotation too, but no parameter reaches it: computed on every rank, harmless: {names}"
        lines += [plain(text, "faint"), plain("")]
    if report.shares is not None:
        lines += [plain(_shares(report.shares, any(row.stub for row in report.rows)))]
    return [*lines, _last(report)]


def _row(row: MissingRow) -> Iterator[StyledLine]:
    yield StyledLine(((row.missing.name, "strong"), (f"  {_KINDS[row.missing.kind]}, {_calls(row.missing)}", "")))
    found = places(row.missing.calls)
    for place in found[:MOST_PLACES]:
        yield plain(f"  --> {place}", "faint")
    if len(found) > MOST_PLACES:
        yield plain(f"      and {len(found) - MOST_PLACES} more places", "faint")
    if row.advice.found:
        shapes = "the model's own shapes" if row.advice.own else "smaller shapes than the model's"
        for text in dict.fromkeys(t for t in row.advice.texts if t is not None):
            verdict: tuple[str, Style] = (str(row.advice.verdict), style_of(row.advice.verdict))
            yield StyledLine(((f'  "{text}"  ', ""), verdict, (f" on {shapes}", "")))
    if row.stub is None:
        yield plain(f"  no stub: {row.problem}", "unsure")
        return
    yield plain(f"  paste {row.stub.place}:")
    for line in row.stub.code.rstrip("\n").split("\n"):
        yield plain(f"    {line}".rstrip())


def _shares(found: Shares, suggested: bool) -> str:
    text = f"matmul FLOPs divided under tp=2: {_percent(found.now)} now"
    if suggested:
        text += f", {_percent(found.then)} with these annotations"
    if found.missing:
        text += f" ({_percent(found.missing)} of all are inside operators without annotation)"
    return text


def _last(report: MissingReport) -> StyledLine:
    number = len(report.rows)
    if not number:
        return StyledLine(
            (("nothing is missing", "good"), (f"  {report.model}: all of {report.operators} operators", ""))
        )
    stubs = sum(row.stub is not None for row in report.rows)
    head = f"{number} of {report.operators} operators without annotation"
    return StyledLine(((head, "bad"), (f"  {report.model}: {stubs} with a stub, {number - stubs} without", "")))


def _calls(missing: Missing) -> str:
    return f"{len(missing.calls)} call{'s' * (len(missing.calls) != 1)}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
