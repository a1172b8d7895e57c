"""Tells mkdocstrings how docstrings become Markdown: see docstrings_text.py."""

from __future__ import annotations

from typing import Any

import griffe

from ci.site.docstrings_text import with_lists


class Fields(griffe.Extension):
    """Applies `with_lists` to every docstring that is read."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = with_lists(obj.docstring.value)
