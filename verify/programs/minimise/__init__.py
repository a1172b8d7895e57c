"""The smallest plan that still fails: as much as possible runs whole on every rank."""

from __future__ import annotations

from verify.programs.minimise.minimise import Minimal, PlanTrial, minimise, minimise_plan

__all__ = ["Minimal", "PlanTrial", "minimise", "minimise_plan"]
