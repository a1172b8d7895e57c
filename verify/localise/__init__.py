"""Where a wrong program is wrong, line by line, and why."""

from __future__ import annotations

from verify.localise.localise import localise, localise_all, localise_apart

__all__ = ["localise", "localise_all", "localise_apart"]
