"""Why something is not proved."""

from __future__ import annotations


class Unsupported(Exception):
    """Outside of what can be proved here; the message is the reason, as a phrase."""


class Unmet(Exception):
    """Numbers on which an operator raises: an index out of range."""
