"""Every parameter of the model is held somewhere, in its own shape, and nothing is held that the model lacks."""

from __future__ import annotations

import torch

from verify.programs.checks.context import CheckOutcome, Comparison, Tally
from verify.results.finding import Finding
from verify.results.verdict import Verdict


def check(comparison: Comparison, initial_buffers: dict[str, torch.Tensor]) -> CheckOutcome:
    """`initial_buffers`: the model's buffers before the first step. Those that training does not change may be left
    out of a program (its graph does not read them)."""
    tally = Tally("coverage", Verdict.TESTED_EXACT)
    reference = comparison.reference
    held = {alias for h in comparison.parameters.values() for alias in comparison.names.get(h.name, (h.name,))}
    held |= {alias for h in comparison.buffers.values() for alias in comparison.names.get(h.name, (h.name,))}
    for name in sorted({comparison.names[n][0] for n in reference.parameters}):
        tally.add(*_held(comparison, name, name in held, "parameter"))
    for name in sorted({comparison.names[n][0] for n in reference.buffers}):
        after, before = reference.buffers[name], initial_buffers[name]
        changed = after.shape != before.shape or not torch.equal(after.double(), before.double())
        if name in held or changed:
            tally.add(*_held(comparison, name, name in held, "buffer"))
    for holding in (*comparison.parameters.values(), *comparison.buffers.values()):
        if holding.name not in reference.parameters and holding.name not in reference.buffers:
            message = f"stage {holding.stage} holds `{holding.name}`, which the model does not have"
            facts = {"tensor": holding.name, "stage": str(holding.stage)}
            tally.add(Verdict.REFUTED, Finding("parameter_unknown", message, counter_example=facts))
    return tally.outcome()


def _held(comparison: Comparison, name: str, held: bool, kind: str) -> tuple[Verdict, Finding | None]:
    if held:
        return Verdict.TESTED_EXACT, None
    message = f"no rank holds the {kind} `{name}`"
    return Verdict.REFUTED, Finding("parameter_not_held", message, comparison.place(name), {"tensor": name})
