"""The frame of a page: no script, nothing fetched."""

from __future__ import annotations

from verify.report_formats.html.style import CSS
from verify.report_formats.html.text import escape


def page(title: str, body: str) -> str:
    """Return a whole document. `body`: HTML."""
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{CSS}</style>\n</head>\n<body>\n<main>\n{body}</main>\n</body>\n</html>"
    )
