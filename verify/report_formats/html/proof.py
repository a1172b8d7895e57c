"""The basis of a static proof: its lemmas, and the certificate that the schedule has no deadlock."""

from __future__ import annotations

from collections.abc import Sequence

from nnscaler.records import encode
from verify.report_formats.html.text import facts, folded, panel, table, value_html
from verify.results.attachments import Certificate, LemmaRow

SHOWN = 40  # lemmas that are shown; the others are folded


def lemmas_panel(lemmas: Sequence[LemmaRow] | None) -> str:
    """Return a table of the lemmas; nothing where there are none."""
    if not lemmas:
        return ""
    rows = encode(lemmas)
    columns = list(rows[0])
    cells = [[value_html(value) for value in row.values()] for row in rows]
    body = table(columns, cells[:SHOWN], "plain")
    if len(cells) > SHOWN:
        body += folded(f"{len(cells) - SHOWN} more lemmas", table(columns, cells[SHOWN:], "plain"))
    return panel(f"Lemmas ({len(rows)})", body)


def certificate_panel(certificate: Certificate | None) -> str:
    """Return the certificate's entries, one below the other."""
    return "" if certificate is None else panel("Certificate", facts(encode(certificate)))
