"""The smallest plan that still fails: as much as possible runs whole on every rank."""

from __future__ import annotations

from verify.programs.minimise.minimise import Minimal, minimise, minimise_plan
from verify.programs.minimise.trial import PlanTrial

__all__ = ["Minimal", "PlanTrial", "minimise", "minimise_plan"]
