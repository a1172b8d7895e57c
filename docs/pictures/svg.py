"""Pieces of SVG, in the colours of the reports, on light and on dark paper: what the pictures are made of.

Coordinates are pixels. Nothing is fetched and no script runs; the style follows `prefers-color-scheme`, so that one
file serves both themes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from verify.report_formats.html.page_elements import PALETTE, escape

SANS = 'system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif'
MONO = 'ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace'
STYLE = f"""{PALETTE}text {{ font-family:{SANS}; fill:var(--text) }}
.mono {{ font-family:{MONO} }} .bold {{ font-weight:650 }}
text.faint {{ fill:var(--faint) }} text.accent {{ fill:var(--accent) }} text.good {{ fill:var(--good) }}
text.bad {{ fill:var(--bad) }} text.unsure {{ fill:var(--unsure) }}
.paper {{ fill:var(--page) }} .card {{ fill:var(--card); stroke:var(--line) }} .code {{ fill:var(--code) }}
.bar {{ fill:var(--accent) }} .pale {{ fill:var(--accent); fill-opacity:.28 }}
.goodback {{ fill:var(--goodback); stroke:var(--good) }} .badback {{ fill:var(--badback); stroke:var(--bad) }}
.unsureback {{ fill:var(--unsureback); stroke:var(--unsure) }}
.rule {{ stroke:var(--line); stroke-width:1 }} .mark {{ stroke:var(--bad); stroke-width:2 }}
.arrow {{ stroke:var(--faint); stroke-width:1.5; fill:none }} .head {{ fill:var(--faint) }}
text.dark {{ fill:#000 }} text.light {{ fill:#fff }}
"""


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture: its size, what it shows in words, and its pieces in the order in which they are drawn."""

    width: int
    height: int
    title: str
    pieces: tuple[str, ...]

    def text(self) -> str:
        """Return the file."""
        head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}"'
        head += f' width="{self.width}" height="{self.height}" role="img">'
        paper = rect(0, 0, self.width, self.height, "paper", radius=10)
        lines = (head, f"<title>{escape(self.title)}</title>", f"<style>{STYLE}</style>", paper, *self.pieces, "</svg>")
        return "\n".join(lines) + "\n"


def rect(x: float, y: float, width: float, height: float, kind: str, *, radius: float = 0, fill: str = "") -> str:
    """Return a rectangle. `fill`: a colour that is the same on light and dark paper."""
    color = f' fill="{fill}"' if fill else ""
    return f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius:g}"{color}/>'


def words(x: float, y: float, text: object, kind: str = "", *, size: float = 13, anchor: str = "start") -> str:
    """Return a line of text: `y` is that of its baseline, `anchor` is start, middle or end."""
    where = f'x="{x:g}" y="{y:g}" font-size="{size:g}" text-anchor="{anchor}"'
    return f'<text class="{kind}" {where}>{escape(text)}</text>'


def paragraph(x: float, y: float, lines: Iterable[str], kind: str = "faint", *, size: float = 12) -> list[str]:
    """Return lines of text, one below the other."""
    return [words(x, y + number * size * 1.45, line, kind, size=size) for number, line in enumerate(lines)]


def line(x1: float, y1: float, x2: float, y2: float, kind: str = "rule", *, dashes: str = "") -> str:
    """Return a line."""
    dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
    return f'<line class="{kind}" x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}"{dashed}/>'


def arrow(x1: float, y1: float, x2: float, y2: float) -> str:
    """Return an arrow along an axis, its head at the second point."""
    length = abs(x2 - x1) + abs(y2 - y1)
    dx, dy = (x2 - x1) / length, (y2 - y1) / length
    left = (x2 - 7 * dx - 4 * dy, y2 - 7 * dy + 4 * dx)
    right = (x2 - 7 * dx + 4 * dy, y2 - 7 * dy - 4 * dx)
    points = " ".join(f"{x:g},{y:g}" for x, y in ((x2, y2), left, right))
    return line(x1, y1, x2 - 5 * dx, y2 - 5 * dy, "arrow") + f'<polygon class="head" points="{points}"/>'
