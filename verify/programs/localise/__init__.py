"""Localise the faults of a wrong program, line by line, and explain them. `teacher` describes the method."""

from __future__ import annotations

from verify.programs.localise.localise import localise, localise_all, localise_apart

__all__ = ["localise", "localise_all", "localise_apart"]
