"""A finding for people: code and message, the place with its line, the annotation with carets, what was run, why, and
what to do."""

from __future__ import annotations

import re

from op_registry.source_location import SourceLocation

from verify.results.finding import Finding
from verify.results.styled_line import StyledLine, plain

# Carets under the wrong identifier of an annotation.

TOKEN = re.compile(r"(?P<name>\*|[A-Za-z_]\w*)(?P<mark>\+max|\+sum|\+|\^)?")


def caret_line(annotation: str, identifier: str) -> str | None:
    """Return spaces and carets that, below `annotation`, point at each place of `identifier` with its mark.

    `identifier` may be several, as in "m, k". `*0` and the like, which a `*` binds, point at the `*`. None where the
    annotation does not have it. `m k+, k+ n -> m n` with `k` gives `  ^^  ^^`.
    """
    wanted = {"*" if name.startswith("*") else name for name in re.split(r"[,\s`]+", identifier) if name}
    marks = [" "] * len(annotation)
    for token in TOKEN.finditer(annotation):
        if token["name"] in wanted:
            marks[token.start() : token.end()] = "^" * (token.end() - token.start())
    line = "".join(marks).rstrip()
    return line or None


WIDTH = 140  # a counter-example that is longer takes a line for each fact
# Facts that have lines of their own; `expected` and `found` are layouts or values, one below the other.
_COMPARED = ("expected", "found")


def finding_lines(finding: Finding) -> list[StyledLine]:
    """Return the anatomy of a finding, a blank line not included."""
    lines = [StyledLine(((finding.code, "bad"), (f"  {finding.message}", "strong")))]
    facts = dict(finding.counter_example)
    annotation = facts.get("annotation", "")
    carets = caret_line(annotation, facts.get("identifier", "")) if annotation else None
    shown = _place_lines(finding.where, annotation, carets, lines)
    if carets is not None:
        del facts["annotation"]
        if not shown:
            label = "  = annotation: "
            lines += [plain(label + annotation), StyledLine(((" " * len(label), ""), (carets, "bad")))]
    for what, place in finding.related:
        lines.append(plain(f"  {what}: {place}"))
        if place.text:
            lines.append(plain(f"      {place.text}"))
    lines += _compared(facts)
    lines += _counter_example(facts)
    if finding.cause:
        lines += _labelled("= cause", finding.cause)
    if finding.help:
        lines += _labelled("help", finding.help)
    if finding.reproduce:
        lines.append(plain(f"  reproduce: {finding.reproduce}"))
    return lines


def _place_lines(where: SourceLocation | None, annotation: str, carets: str | None, lines: list[StyledLine]) -> bool:
    """Add `--> file:line` and the line itself; return whether the carets could be put below that line."""
    if where is None:
        return False
    lines.append(plain(f"  --> {where}", "faint"))
    if not where.text:
        return False
    number = str(where.line)
    gutter = f"  {' ' * len(number)} |"
    text = where.text.expandtabs(4)
    lines.append(plain(gutter, "faint"))
    lines.append(StyledLine(((f"  {number} | ", "faint"), (text, ""))))
    start = _start(text, annotation)
    if carets is None or start is None:
        lines.append(plain(gutter, "faint"))
        return False
    lines.append(StyledLine(((f"{gutter} ", "faint"), (" " * start + carets, "bad"))))
    return True


def _start(text: str, annotation: str) -> int | None:
    """Return where the annotation stands in a line of source, in quotes; None where it is not in it whole."""
    for quote in ('"', "'"):
        found = text.find(quote + annotation + quote)
        if found >= 0:
            return found + 1
    return None


def _compared(facts: dict[str, str]) -> list[StyledLine]:
    """`= expected: ...` and `= found:    ...`, aligned; takes them out of `facts`."""
    if not all(key in facts and "\n" not in facts[key] for key in _COMPARED):
        return []
    width = max(map(len, _COMPARED)) + 1
    return [plain(f"  = {key + ':':<{width}} {facts.pop(key)}") for key in _COMPARED]


def _counter_example(facts: dict[str, str]) -> list[StyledLine]:
    texts = [f"{key}={value}" for key, value in facts.items()]
    if not texts:
        return []
    if sum(map(len, texts)) <= WIDTH and not any("\n" in text for text in texts):
        return [plain(f"  = counter-example: {', '.join(texts)}")]
    lines = [plain("  = counter-example:")]
    for text in texts:
        first, *rest = text.split("\n")
        lines += [plain(f"      {first}"), *(plain(f"        {line}") for line in rest)]
    return lines


def _labelled(label: str, text: str) -> list[StyledLine]:
    first, *rest = text.split("\n")
    indent = " " * (len(label) + 2)
    return [plain(f"  {label}: {first}"), *(plain(f"  {indent}{line}") for line in rest)]
