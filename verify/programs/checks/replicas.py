"""Copies of one value are equal bitwise on every rank: across the ranks of a stage, and across stages that share a
tied parameter. Copies that differ in the last bit drift apart over a long training."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from op_registry.source_location import SourceLocation

from verify.programs.checks.assemble_logical_tensors import (
    Holding,
    StageTensor,
    UnequalElements,
    by_rank,
    put_together,
    tied_copies_differ,
)
from verify.programs.checks.compare_gradients_and_state import noun_of
from verify.programs.checks.input_and_outcome import CheckOutcome, Comparison, Tally
from verify.results.finding import Finding
from verify.results.verdict import Verdict


@dataclass(frozen=True, slots=True)
class _Kind:
    name: str
    step: int
    holdings: tuple[Holding, ...]


def check(comparison: Comparison) -> CheckOutcome:
    """Compare gradients of every step, and parameters and buffers after the last."""
    tally = Tally("replicas bitwise equal", Verdict.TESTED_EXACT)
    for kind in _kinds(comparison):
        entries = by_rank(comparison.results, kind.name, kind.step)
        seen: dict[str, StageTensor] = {}
        for holding in kind.holdings:
            logical = put_together(holding, entries)
            _within_stage(tally, comparison, kind, logical)
            key = comparison.names.get(holding.name, (holding.name,))[0]
            if key in seen:
                _between_stages(tally, comparison, kind, seen[key], logical)
            seen.setdefault(key, logical)
    return tally.outcome()


def _kinds(comparison: Comparison) -> Iterable[_Kind]:
    trainable = tuple(h for h in comparison.parameters.values() if h.trainable)
    for step in range(comparison.steps):
        yield _Kind("gradient", step, trainable)
    yield _Kind("parameter", comparison.steps - 1, tuple(comparison.parameters.values()))
    yield _Kind("buffer", comparison.steps - 1, tuple(comparison.buffers.values()))


def _within_stage(tally: Tally, comparison: Comparison, kind: _Kind, logical: StageTensor) -> None:
    for _ in range(logical.copies - len(logical.unequal)):
        tally.add(Verdict.TESTED_EXACT)
    name = logical.holding.name
    for found in logical.unequal:
        what = f"{noun_of(kind.name, name)} at step {kind.step}"
        tally.refute(copies_differ(found, what, name, kind.step, comparison.place(name)))


def copies_differ(found: UnequalElements, what: str, tensor: str, step: int, place: SourceLocation | None) -> Finding:
    """Return the finding on copies of `what` on two ranks."""
    facts = {
        "tensor": tensor,
        "step": str(step),
        "ranks": f"{found.first}, {found.other}",
        "differing elements": str(found.elements),
        "greatest difference": f"{found.largest:.6g}",
    }
    message = f"ranks {found.first} and {found.other} hold different copies of {what}"
    return Finding("replicas_differ", message, place, facts)


def _between_stages(tally: Tally, comparison: Comparison, kind: _Kind, one: StageTensor, other: StageTensor) -> None:
    if not tied_copies_differ(one, other):
        tally.add(Verdict.TESTED_EXACT)
        return
    name = one.holding.name
    stages = f"{one.holding.stage} and {other.holding.stage}"
    finding = Finding(
        "replicas_differ",
        f"stages {stages} hold different copies of {noun_of(kind.name, name)} at step {kind.step}",
        comparison.place(name),
        {"tensor": name, "step": str(kind.step), "stages": stages},
        cause="the gradient of a tied parameter is summed over all stages that use it"
        if kind.name == "gradient"
        else None,
    )
    tally.refute(finding)
