"""Exceptions that say why something is not proved."""

from __future__ import annotations


class Unsupported(Exception):
    """Outside of what can be proved here; the message is the reason, as a phrase."""


class Unmet(Exception):
    """Numbers on which an operator raises: an index out of range."""


class NoCall(Exception):
    """The whole operator does not run on these sizes, although its trace did: other sizes are to be tried."""
