"""The input and the result type that all checks of a plan share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from op_registry.source_location import SourceLocation

from verify.programs.checks.assemble_logical_tensors import Holding
from verify.programs.eager_reference import Trajectory
from verify.programs.execution.record_rank_steps import RankResult
from verify.results.finding import Finding, digest_of
from verify.results.float64_tolerance import Key, Tolerance
from verify.results.report import Check
from verify.results.typed_attachments import ComparedTensor
from verify.results.verdict import Verdict, merge

LOCALISED = "wrong lines"  # the check whose findings say where
SHOWN = 5  # findings of one check; the count says how many there are


@dataclass(frozen=True)
class Comparison:
    """The results of the model and of the ranks, as the checks compare them.

    reference   the model's trajectory
    results     one per rank
    parameters  (stage, attribute) -> the declared holding
    buffers     (stage, attribute) -> the declared holding
    names       tensor of the model -> all its names
    places      parameter -> where the model first uses it
    tolerance   the bound on differences
    steps       number of training steps
    loss        the graph's tensor
    loss_place  where the model computes it
    outputs     name -> the declared holding of each result besides the loss
    """

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
    outputs: Mapping[str, Holding] = field(default_factory=dict)

    def place(self, name: str) -> SourceLocation | None:
        """Return where the model uses this parameter."""
        found = (self.places.get(alias) for alias in self.names.get(name, (name,)))
        return next((place for place in found if place is not None), None)


@dataclass(frozen=True)
class CheckOutcome:
    """`rows`: the tensors that were compared, where the check compares tensors."""

    check: Check
    findings: tuple[Finding, ...] = ()
    rows: tuple[ComparedTensor, ...] = ()


def outcome_of(check: Check, findings: Sequence[Finding], rows: Sequence[ComparedTensor] = ()) -> CheckOutcome:
    """Return the outcome of a check, with those of its findings that are shown. What tells all of them apart stays:
    those that are known must not hide another one."""
    if len(findings) > SHOWN:
        check = replace(check, failures=digest_of(findings))
    return CheckOutcome(check, tuple(findings[:SHOWN]), tuple(rows))


def merge_outcomes(name: str, prefix: str, outcomes: Sequence[CheckOutcome]) -> CheckOutcome:
    """Merge several outcomes into one check; `prefix` is put before the message of each finding."""
    checks = [outcome.check for outcome in outcomes]
    count, refuted = sum(c.count for c in checks), sum(c.refuted for c in checks)
    details = [c.detail for c in checks if c.detail]
    worst = max(details, key=_worst, default="")
    findings = tuple(replace(f, message=prefix + f.message) for outcome in outcomes for f in outcome.findings)
    rows = tuple(replace(row, kind=f"{name}: {row.kind}") for outcome in outcomes for row in outcome.rows)
    merged = merge(c.verdict for c in checks if c.count)
    failures = " ".join(c.failures for c in checks if c.failures)
    return CheckOutcome(Check(name, merged, count, refuted, 0.0, worst, failures=failures), findings, rows)


def _worst(detail: str) -> float:
    """Return the number at the end of "worst difference 1.2e-15"."""
    try:
        return float(detail.rpartition(" ")[2])
    except ValueError:
        return -1.0


class Tally:
    """Collects the comparisons of one check."""

    def __init__(self, name: str, level: Verdict, tolerance: Tolerance | None = None) -> None:
        self.name = name
        self.tolerance = tolerance
        self.rows: list[ComparedTensor] = []
        self.level = level
        self.count = 0
        self.refuted = 0
        self.verdicts: list[Verdict] = []
        self.findings: list[Finding] = []
        self.worst = 0.0

    def add(
        self, verdict: Verdict, finding: Finding | None = None, relative: float = 0.0, key: Key | None = None
    ) -> None:
        """Add one comparison. `relative`: the difference of its two sides; `key`: the tensor."""
        self.count += 1
        if key is not None and self.tolerance is not None:
            self.rows.append(ComparedTensor(*_named(key), relative, self.tolerance.bound, verdict))
        self.refuted += verdict is Verdict.REFUTED
        self.verdicts.append(verdict)
        if verdict.passes:
            self.worst = max(self.worst, relative)
        if finding is not None:
            self.findings.append(finding)

    def refute(self, finding: Finding) -> None:
        """Add a comparison that refutes, with its finding if it is the first on its tensor: others follow from it."""
        told = any(other.counter_example["tensor"] == finding.counter_example["tensor"] for other in self.findings)
        self.add(Verdict.REFUTED, None if told else finding)

    def outcome(self, detail: str = "") -> CheckOutcome:
        """Return the check. Without any comparison it claims nothing."""
        if not detail and self.count and self.worst:
            detail = f"worst difference {self.worst:.1e}"
        verdict = merge(self.verdicts) if self.verdicts else self.level
        check = Check(self.name, verdict, self.count, self.refuted, 0.0, detail)
        return outcome_of(check, self.findings, self.rows)


def _named(key: Key) -> tuple[str, int, str]:
    kind, step, name = key
    return kind, step, name or kind
