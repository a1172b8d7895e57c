"""Carets under the wrong identifier of an annotation."""

from __future__ import annotations

import re

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
