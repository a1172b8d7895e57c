"""The basis of a static proof: its lemmas, and the certificate that the schedule has no deadlock."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verify.report_formats.html.text import escape, facts, folded, panel, table, value_html

SHOWN = 40  # lemmas that are shown; the others are folded


def lemmas_panel(lemmas: Any) -> str:
    """Return a table of rows, with the columns that they have."""
    rows = [row for row in lemmas if isinstance(row, Mapping)] if isinstance(lemmas, list | tuple) else []
    if not rows:
        return ""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    cells = [[value_html(row.get(key, "")) for key in columns] for row in rows]
    body = table(columns, cells[:SHOWN], "plain")
    if len(cells) > SHOWN:
        body += folded(f"{len(cells) - SHOWN} more lemmas", table(columns, cells[SHOWN:], "plain"))
    return panel(f"Lemmas ({len(rows)})", body)


def certificate_panel(certificate: Any) -> str:
    """Render the certificate, whatever form it has: names with values, or a text."""
    if not certificate:
        return ""
    if isinstance(certificate, Mapping):
        body = facts(certificate)
    elif isinstance(certificate, list | tuple):
        body = "<ul>" + "".join(f"<li>{value_html(item)}</li>" for item in certificate) + "</ul>"
    else:
        body = f"<pre>{escape(certificate)}</pre>"
    return panel("Certificate", body)
