"""Pieces of HTML: escaping, numbers as people read them, tables."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from verify.report_formats.html.style import CSS
from verify.report_formats.junit import legal
from verify.results.line import style_of
from verify.results.verdict import Verdict

WORDS = {"good": "PASS", "bad": "FAIL", "unsure": "OPEN"}
_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def escape(text: object) -> str:
    """Text that is text in HTML wherever it stands, in attributes too; control characters are written as `\\x1b`."""
    return html.escape(legal(str(text).encode("utf-8", "backslashreplace").decode("utf-8")), quote=True)


def code(text: object) -> str:
    """Set a text in the typeface of code."""
    return f"<code>{escape(text)}</code>"


def prose(text: str) -> str:
    """Set words between backquotes in the typeface of code."""
    pieces = text.split("`")
    if len(pieces) % 2 == 0:
        return escape(text)
    return "".join(code(piece) if index % 2 else escape(piece) for index, piece in enumerate(pieces))


def badge(verdict: Verdict) -> str:
    """Render PASS, FAIL or OPEN in its colour."""
    style = style_of(verdict)
    return f'<span class="badge {style}">{WORDS[style]}</span>'


def size(value: float) -> str:
    """`1.2 MB`."""
    step = 0
    while value >= 999.5 and step < len(_UNITS) - 1:
        value, step = value / 1000, step + 1
    return f"{value:.3g} {_UNITS[step]}"


def seconds(value: float) -> str:
    """`0.3 s`, or nothing for what took no time."""
    return f"{value:.1f} s" if value >= 0.05 else ""


def count(value: int, noun: str) -> str:
    """`1 check`, `2 checks`."""
    return f"{value:,} {noun}{'' if value == 1 else 's'}".replace(",", " ")


def percent(share: float) -> str:
    """Return a share from 0 to 1 as a length in CSS and SVG."""
    return f"{100 * share:.3f}".rstrip("0").rstrip(".") + "%"


def table(head: Sequence[str], rows: Iterable[Sequence[str]], kind: str = "") -> str:
    """Return a table of cells that are HTML already; on narrow screens each row is a block, its cells named by the
    head."""
    titles = "".join(f"<th>{escape(title)}</th>" for title in head)
    body = "".join(
        "<tr>"
        + "".join(f'<td data-name="{escape(title)}">{cell}</td>' for title, cell in zip(head, row, strict=True))
        + "</tr>\n"
        for row in rows
    )
    return f'<table class="{kind}"><thead><tr>{titles}</tr></thead><tbody>\n{body}</tbody></table>'


def facts(items: Mapping[str, Any]) -> str:
    """Render names and values, one below the other."""
    rows = "".join(f"<dt>{escape(name)}</dt><dd>{value_html(value)}</dd>" for name, value in items.items())
    return f"<dl>{rows}</dl>"


def value_html(value: Any) -> str:
    """Render any JSON value readably."""
    if isinstance(value, Mapping):
        return facts(value)
    if isinstance(value, list | tuple):
        return escape(", ".join(map(str, value)))
    text = str(value)
    return f"<pre>{escape(text)}</pre>" if "\n" in text else prose(text)


def folded(summary: str, body: str, kind: str = "", is_open: bool = False) -> str:
    """Return a section that is folded under its summary; it is always open in print."""
    return f'<details class="{kind}"{" open" if is_open else ""}><summary>{summary}</summary>{body}</details>'


def panel(title: str, body: str, remark: str = "", kind: str = "") -> str:
    """Return a part of the page with its heading."""
    after = f'<p class="remark">{remark}</p>' if remark else ""
    return f'<section class="panel {kind}"><h2>{escape(title)}</h2>{after}{body}</section>\n'


# The frame of a page: no script, nothing fetched.


def page(title: str, body: str) -> str:
    """Return a whole document. `body`: HTML."""
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{CSS}</style>\n</head>\n<body>\n<main>\n{body}</main>\n</body>\n</html>"
    )
