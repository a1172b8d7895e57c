"""Pieces of HTML: escaping, numbers as people read them, tables, and the style of the page."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from verify.report_formats.junit import legal
from verify.results.styled_line import WORDS, style_of
from verify.results.verdict import Verdict

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


def panel(title: str, body: str, remark: str = "") -> str:
    """Return a part of the page with its heading."""
    after = f'<p class="remark">{remark}</p>' if remark else ""
    return f'<section class="panel"><h2>{escape(title)}</h2>{after}{body}</section>\n'


# The frame of a page: no script, nothing fetched.


def page(title: str, body: str) -> str:
    """Return a whole document. `body`: HTML."""
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{CSS}</style>\n</head>\n<body>\n<main>\n{body}</main>\n</body>\n</html>"
    )


# The style of the page. Light and dark by the reader's setting; on paper light, with everything unfolded.

# Colours, on light and on dark paper.
PALETTE = """
:root { color-scheme: light dark;
  --page:#f4f5f7; --card:#fff; --text:#1b2230; --faint:#5a6475; --line:#dce1e8; --code:#eef1f5; --accent:#2f6feb;
  --good:#18752f; --bad:#c9202c; --unsure:#8f5f00; --goodback:#e3f5e8; --badback:#fde8e8; --unsureback:#fdf3d6; }
@media (prefers-color-scheme: dark) { :root {
  --page:#0e131a; --card:#161c25; --text:#e4e9f1; --faint:#98a4b5; --line:#2a3340; --code:#202835; --accent:#6ea3ff;
  --good:#4ac26b; --bad:#ff7b72; --unsure:#e3b341; --goodback:#12291b; --badback:#371a1d; --unsureback:#2f2610; } }
"""
CSS = (
    PALETTE
    + """@media print { :root { color-scheme: light;
  --page:#fff; --card:#fff; --text:#000; --faint:#444; --line:#bbb; --code:#f4f4f4; --accent:#1b4fb3;
  --good:#1a7f37; --bad:#c9202c; --unsure:#8f5f00; --goodback:#fff; --badback:#fff; --unsureback:#fff; } }
* { box-sizing:border-box }
html { -webkit-text-size-adjust:100% }
body { margin:0; background:var(--page); color:var(--text); line-height:1.5;
  font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif; overflow-wrap:anywhere }
main { max-width:1120px; margin:0 auto; padding:20px 16px 48px }
code,pre,.mono { font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace; font-size:.9em }
code { background:var(--code); padding:.08em .32em; border-radius:4px }
pre { background:var(--code); padding:10px 12px; border-radius:6px; overflow-x:auto; margin:8px 0; line-height:1.45;
  overflow-wrap:normal }
pre.wrap { white-space:pre-wrap; overflow-wrap:anywhere; max-height:8.6em; overflow-y:auto }
h1 { font-size:1.35rem; line-height:1.3; margin:2px 0 4px }
h2 { font-size:1.05rem; margin:0 0 10px }
h3 { font-size:.95rem; margin:18px 0 6px }
a { color:var(--accent) }
.banner { border-radius:10px; padding:18px 20px; border:1px solid var(--line); border-left:8px solid;
  margin-bottom:16px }
.banner .word { font-size:1.7rem; font-weight:750; letter-spacing:.02em; line-height:1.2 }
.banner p { margin:4px 0 0 }
.banner.good { background:var(--goodback); border-left-color:var(--good) } .banner.good .word { color:var(--good) }
.banner.bad { background:var(--badback); border-left-color:var(--bad) } .banner.bad .word { color:var(--bad) }
.banner.unsure { background:var(--unsureback); border-left-color:var(--unsure) }
.banner.unsure .word { color:var(--unsure) } .banner.plain { background:var(--card); border-left-color:var(--accent) }
.panel,.report { background:var(--card); border:1px solid var(--line); border-radius:10px; padding:16px 18px;
  margin-bottom:16px }
.report>.panel { border:0; border-top:1px solid var(--line); border-radius:0; padding:16px 0 0; margin:16px 0 0 }
.remark,.faint { color:var(--faint) } .remark { margin:-4px 0 12px; font-size:.92em }
.badge { display:inline-block; font-size:.75em; font-weight:700; padding:.1em .55em; border-radius:99px;
  border:1px solid currentColor; white-space:nowrap }
.good { color:var(--good) } .bad { color:var(--bad) } .unsure { color:var(--unsure) } .none { color:var(--faint) }
.banner,.panel { color:var(--text) }
table { border-collapse:collapse; width:100%; font-variant-numeric:tabular-nums }
th { text-align:left; font-size:.82em; color:var(--faint); font-weight:600; white-space:nowrap }
th,td { padding:6px 10px 6px 0; border-bottom:1px solid var(--line); vertical-align:top }
tbody tr:last-child td { border-bottom:0 }
.checks td:nth-child(1) { width:4.2em }
.checks td:nth-child(2) { min-width:17em } td { overflow-wrap:break-word }
.checks td:nth-child(3),.checks td:nth-child(4) { white-space:nowrap }
.checks td:last-child { text-align:right; white-space:nowrap } .checks th:last-child { text-align:right }
details { margin-top:8px } summary { cursor:pointer; color:var(--faint) }
.report { margin-top:0 } .report>summary { color:var(--text); font-weight:600 }
.finding { border-left:4px solid var(--bad); padding:2px 0 2px 14px; margin:0 0 22px }
.finding.open { border-left-color:var(--unsure) } .finding:last-child { margin-bottom:4px }
.finding h3 { margin:0 0 2px; color:var(--bad); font-family:ui-monospace,Menlo,Consolas,"DejaVu Sans Mono",monospace }
.finding.open h3 { color:var(--unsure) }
.finding .message { font-weight:600; margin:0 0 6px } .finding p { margin:6px 0 }
.finding .cause { background:var(--unsureback); border-radius:6px; padding:8px 12px; margin:8px 0;
  white-space:pre-wrap }
.finding .help { white-space:pre-wrap }
.label { color:var(--faint); font-size:.82em; font-weight:600; margin-right:.5em; white-space:nowrap }
.caret { color:var(--bad); font-weight:700 }
dl { display:grid; grid-template-columns:minmax(7em,max-content) 1fr; gap:3px 16px; margin:6px 0 }
dt { color:var(--faint) } dd { margin:0; min-width:0 } dd pre { margin:0 } dd dl { margin:0 }
ul.notes { margin:0; padding-left:1.2em }
svg { display:block; width:100%; overflow:visible } svg text { fill:var(--faint); font-size:11px }
.strip { margin-bottom:10px } .strip-head { display:flex; flex-wrap:wrap; gap:0 10px; font-size:.92em }
.strip-head b { font-weight:600 } .strip rect.plot { fill:var(--code) } .strip line.allowed { stroke:var(--bad) }
.strip line.grid,.times line { stroke:var(--line) } circle { fill:var(--accent); fill-opacity:.55 }
circle.good { fill:var(--accent) } circle.bad { fill:var(--bad); fill-opacity:.95 }
circle.unsure { fill:var(--unsure); fill-opacity:.95 }
circle.worst { stroke:var(--text); stroke-width:1.6; fill-opacity:1 }
svg text.tag { fill:var(--text); stroke:var(--code); stroke-width:3px; paint-order:stroke }
svg text.allowed { fill:var(--bad) }
.scroll { overflow-x:auto; padding-bottom:4px }
.lane { display:grid; grid-template-columns:var(--names) 1fr; align-items:center }
.lane>.who { position:sticky; left:0; background:var(--card); z-index:1; font-size:.82em; padding-right:8px;
  align-self:stretch; display:flex; align-items:center; line-height:1.1 }
.lane svg { background:var(--code); border-bottom:2px solid var(--card) } .lane.times svg { background:none }
.lane svg rect { stroke:var(--card); stroke-width:.6 }
.lane svg text.dark { fill:#000 } .lane svg text.light { fill:#fff }
.legend { display:flex; flex-wrap:wrap; gap:4px 14px; font-size:.85em; color:var(--faint); margin:0 0 10px }
.legend i { display:inline-block; width:11px; height:11px; border-radius:2px; margin-right:5px; vertical-align:-1px }
.bars { display:grid; grid-template-columns:minmax(4.5em,max-content) 1fr max-content; gap:5px 12px; align-items:center;
  font-variant-numeric:tabular-nums; font-size:.92em }
.bars .track { height:14px; background:var(--code); border-radius:3px; display:flex; overflow:hidden; min-width:40px }
.bars .track i { display:block; height:100%; background:var(--accent) }
.bars.small { gap:2px 12px; font-size:.8em } .bars.small .track { height:9px }
.pair { display:grid; grid-template-columns:repeat(auto-fit,minmax(330px,1fr)); gap:8px 36px }
.pair h3 { margin-top:4px }
footer { color:var(--faint); font-size:.85em; margin-top:20px }
@media (max-width:640px) {
  body { font-size:14px } main { padding:10px 10px 32px }
  .panel,.report,.banner { padding:13px 13px; border-radius:8px } .report>.panel { padding:13px 0 0 }
  .banner .word { font-size:1.4rem } h1 { font-size:1.12rem }
  .pair { grid-template-columns:1fr } dl { grid-template-columns:minmax(5em,max-content) 1fr; gap:2px 10px }
  dt { max-width:38vw }
  thead { position:absolute; width:1px; height:1px; overflow:hidden; clip-path:inset(50%) }
  table,tbody { display:block } tr { display:flex; flex-wrap:wrap; gap:1px 10px; padding:8px 0;
    border-bottom:1px solid var(--line) } tbody tr:last-child { border-bottom:0 }
  td { display:block; border:0; padding:0; width:auto!important; min-width:0!important;
    max-width:100% } td:empty { display:none }
  .checks td:nth-child(2) { flex:1 1 70% } .checks td:nth-child(5) { flex:1 1 60% } .checks td { font-size:.95em }
  .plain td { flex:1 1 40% } .plain td::before { content:attr(data-name) " "; color:var(--faint); font-size:.85em }
  .bars { grid-template-columns:minmax(3.6em,max-content) 1fr; } .bars .value { grid-column:1/-1; margin:-4px 0 4px }
}
@media print {
  body { font-size:11px } main { max-width:none; padding:0 } .panel,.report { break-inside:auto; padding:10px 0;
    border:0 }
  .finding,.strip,tr,.lane { break-inside:avoid } h2,h3,summary { break-after:avoid } summary { list-style:none }
  details::details-content { content-visibility:visible!important; block-size:auto!important; display:block!important }
  pre,pre.wrap { white-space:pre-wrap; max-height:none; overflow:visible } .scroll { overflow:visible }
  .scroll>div { min-width:0!important }
  svg,.track,.legend i,.banner,.badge { -webkit-print-color-adjust:exact; print-color-adjust:exact }
}
"""
)
