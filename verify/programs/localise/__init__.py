"""Localise the faults of a wrong program, line by line, and explain them. `teacher_forcing` describes the method."""

from __future__ import annotations

from verify.programs.localise.localise import localise_all, localise_apart

__all__ = ["localise_all", "localise_apart"]
