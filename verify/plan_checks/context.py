"""What every check of a plan is given, and what it returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from op_registry.spec import SourceLocation

from verify.finding import Finding
from verify.plan_checks.logical import Holding
from verify.rank_program import RankResult
from verify.reference import Trajectory
from verify.report import Check
from verify.tolerance import Tolerance
from verify.verdict import Verdict, merge

SHOWN = 5  # findings of one check; the count says how many there are


@dataclass(frozen=True)
class Comparison:
    """`parameters` and `buffers`: what the stages declare. `places`: where in the model a parameter is first used.
    `names`: all names of each tensor of the model. `loss`: the tensor of the graph."""

    reference: Trajectory
    results: tuple[RankResult, ...]
    parameters: Mapping[tuple[int, str], Holding]
    buffers: Mapping[tuple[int, str], Holding]
    names: Mapping[str, tuple[str, ...]]
    places: Mapping[str, SourceLocation]
    tolerance: Tolerance
    steps: int
    loss: str = "loss"
    loss_place: SourceLocation | None = None

    def place(self, name: str) -> SourceLocation | None:
        """Where the model uses this parameter."""
        found = (self.places.get(alias) for alias in self.names.get(name, (name,)))
        return next((place for place in found if place is not None), None)


@dataclass(frozen=True)
class Outcome:
    check: Check
    findings: tuple[Finding, ...] = ()


class Tally:
    """Collects the comparisons of one check."""

    def __init__(self, name: str, level: Verdict) -> None:
        self.name = name
        self.level = level
        self.count = 0
        self.refuted = 0
        self.verdicts: list[Verdict] = []
        self.findings: list[Finding] = []
        self.worst = 0.0

    def add(self, verdict: Verdict, finding: Finding | None = None, relative: float = 0.0) -> None:
        """One comparison; `relative` is how far apart its sides were."""
        self.count += 1
        self.refuted += verdict is Verdict.REFUTED
        self.verdicts.append(verdict)
        if verdict.passes:
            self.worst = max(self.worst, relative)
        if finding is not None and len(self.findings) < SHOWN:
            self.findings.append(finding)

    def outcome(self, detail: str = "") -> Outcome:
        """The check. Without any comparison it claims nothing."""
        if not detail and self.count and self.worst:
            detail = f"worst difference {self.worst:.1e}"
        verdict = merge(self.verdicts) if self.verdicts else self.level
        return Outcome(Check(self.name, verdict, self.count, self.refuted, 0.0, detail), tuple(self.findings))
