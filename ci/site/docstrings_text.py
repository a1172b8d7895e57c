"""How docstrings become Markdown for the site: their tables of fields are lists there.

The house's form is a name, spaces, and what it is; lines that go on are indented as far:

    ranks   how many processes run the program
    plan    by which it was partitioned, or None
            where there is none
"""

from __future__ import annotations

import re

FIELD = re.compile(r"^(\w+(?:, \w+)*) +(?=\S)(.+)$")


def with_lists(text: str) -> str:
    """Return a docstring whose paragraphs of aligned fields are lists of definitions."""
    return "\n\n".join(_as_list(paragraph) or paragraph for paragraph in text.split("\n\n"))


def _as_list(paragraph: str) -> str | None:
    """Return the list that a paragraph is; None for one that is prose."""
    lines = paragraph.split("\n")
    starts = [line for line in lines if not line.startswith(" ")]
    found = [FIELD.match(line) for line in starts]
    aligned = {match.start(2) for match in found if match is not None}
    wide = any("  " in line[: match.start(2)] for line, match in zip(starts, found, strict=True) if match)
    if None in found or len(aligned) != 1 or not (wide or len(lines) > len(starts)):
        return None
    items: list[str] = []
    for line in lines:
        match = None if line.startswith(" ") else FIELD.match(line)
        items.append(line.strip() if match is None else f"* `{match[1]}`: {match[2]}")
    return "\n".join(item if item.startswith("* ") else f"  {item}" for item in items)
