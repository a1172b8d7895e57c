"""Logical gradients, results, parameters and buffers against the model's; every parameter is held somewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nnscaler.runtime.tensor_bits_and_differences import (
    FILL,
    TensorDifference,
    difference,
    family_scale,
    real_numbers,
    same_values,
)
from verify.programs.causes.explain_wrong_values import cause_of
from verify.programs.causes.wrong_tensor import STAGES, WrongTensor, on_ranks
from verify.programs.checks.assemble_logical_tensors import Holding, StageTensor, by_rank, put_together
from verify.programs.checks.gradient_norm import cause_of_update
from verify.programs.checks.input_and_outcome import CheckOutcome, Comparison, Tally
from verify.programs.eager_reference import gradient_value
from verify.results.finding import Finding
from verify.results.verdict import Verdict


@dataclass(frozen=True, slots=True)
class Reference:
    """The model's tensors of one kind at one step.

    kind     "gradient", "result", "parameter" or "buffer"
    step     from 0
    tensors  name -> the model's; None: it has no gradient
    scale    the largest absolute value in all of them, against which small ones are measured
    """

    kind: str
    step: int
    tensors: Mapping[str, Tensor | None]
    scale: float


def check_gradients(comparison: Comparison) -> CheckOutcome:
    """Compare each parameter's gradient at every step.

    A gradient that is missing, or one too many, is refuted: also where the program says that the parameter is not
    trained.
    """
    tally = Tally("gradients", comparison.tolerance.level, comparison.tolerance)
    before: dict[tuple[int, str], Tensor | None] = {}
    for step in range(comparison.steps):
        expected = comparison.reference.gradients[step]
        reference = Reference("gradient", step, expected, family_scale(expected.values()))
        entries = by_rank(comparison.results, "gradient", step)
        together = [put_together(holding, entries) for holding in comparison.parameters.values()]
        together = [replace(logical, value=gradient_value(logical.value)) for logical in together]
        for logical in together:
            tied = [other for other in together if other.holding.name == logical.holding.name]
            last = before.get((logical.holding.stage, logical.holding.name))
            compare(tally, comparison, reference, logical, tied, last)
        before = {(found.holding.stage, found.holding.name): found.value for found in together}
    return tally.outcome()


def check_parameters(comparison: Comparison) -> CheckOutcome:
    """Compare every parameter after the last step."""
    return _check_state(comparison, "parameter", comparison.reference.parameters, comparison.parameters)


def check_buffers(comparison: Comparison) -> CheckOutcome:
    """Compare every buffer that the program holds, after the last step."""
    return _check_state(comparison, "buffer", comparison.reference.buffers, comparison.buffers)


def _check_state(
    comparison: Comparison, kind: str, expected: Mapping[str, Tensor], holdings: Mapping[tuple[int, str], Holding]
) -> CheckOutcome:
    tally = Tally(f"{kind}s after {_steps(comparison)}", comparison.tolerance.level, comparison.tolerance)
    reference = Reference(kind, comparison.steps - 1, expected, family_scale(expected.values(), FILL))
    entries = by_rank(comparison.results, kind)
    for holding in holdings.values():
        compare(tally, comparison, reference, put_together(holding, entries))
    return tally.outcome()


def check_results(comparison: Comparison) -> CheckOutcome:
    """Compare each result at every step, put together from the ranks' parts, and gathered by the runtime."""
    tally = Tally("other results", comparison.tolerance.level, comparison.tolerance)
    for step, expected in enumerate(comparison.reference.results):
        entries = by_rank(comparison.results, "result", step) if expected else {}
        for name, right in expected.items():
            holding = comparison.outputs.get(name)
            if holding is None:
                message = f"no rank of the program returns `{name}`"
                tally.add(Verdict.REFUTED, Finding("result_differs", message, comparison.place(name)))
                continue
            compare(tally, comparison, Reference("result", step, {name: right}, 0.0), put_together(holding, entries))
    if not tally.refuted:
        _compare_gathered(tally, comparison)
    return tally.outcome()


def _compare_gathered(tally: Tally, comparison: Comparison) -> None:
    """Compare what every rank has of the first step's results once they are gathered."""
    for rank in comparison.results:
        for name, found in rank.gathered.items():
            gap = difference(found, comparison.reference.results[0][name])
            verdict = comparison.tolerance.judge(("result", 0, name), gap.relative)
            finding = None
            if not verdict.passes and not tally.findings:
                message = f"the result `{name}` differs once it is gathered, on rank {rank.rank}: {gap}"
                facts = {"tensor": name, "step": "0", "rank": str(rank.rank)}
                finding = Finding("result_differs", message, comparison.place(name), facts)
            tally.add(verdict, finding, gap.relative)


def compare(
    tally: Tally,
    comparison: Comparison,
    reference: Reference,
    logical: StageTensor,
    tied: Sequence[StageTensor] = (),
    before: Tensor | None = None,
) -> None:
    """Compare one tensor. `tied`: the same one on all stages; `before`: its gradient of the step before."""
    name, kind, step = logical.holding.name, reference.kind, reference.step
    if name not in reference.tensors:
        return  # the coverage check reports it
    expected = reference.tensors[name]
    told = absence(kind, step, logical, expected is not None)
    if told is not None:
        tally.add(Verdict.REFUTED, _finding(comparison, *told, logical.holding, step))
        return
    if expected is None or logical.value is None:
        tally.add(comparison.tolerance.level)
        return
    found = difference(logical.value, expected, reference.scale)
    key = (kind, step, name)
    verdict = comparison.tolerance.judge(key, found.relative)
    finding = None
    if not verdict.passes:
        cause = _cause(reference, logical, expected, tied, before) if kind == "gradient" else None
        if kind == "parameter":
            cause = cause_of_update(comparison, name, logical.value)
        finding = _differs(comparison, reference, logical, found, verdict, cause)
    tally.add(verdict, finding, found.relative, key)


def absence(kind: str, step: int, logical: StageTensor, expected: bool) -> tuple[str, str] | None:
    """Return code and message where one side has no such tensor, or where its shards make up none."""
    name = logical.holding.name
    missing = "gradient_missing" if kind == "gradient" else f"{kind}_differs"
    if logical.problem:
        return missing, f"{noun_of(kind, name)} cannot be put together from its shards: {logical.problem}"
    if expected and logical.value is None:
        return missing, f"the program has no {kind} of `{name}` at step {step}, and the model has one"
    if not expected and logical.value is not None:
        return f"{kind}_extra", f"the program has a {kind} of `{name}` at step {step}, and the model has none"
    return None


def _cause(
    reference: Reference, logical: StageTensor, expected: Tensor, tied: Sequence[StageTensor], before: Tensor | None
) -> str | None:
    """Explain a wrong gradient by its pieces, and by the stages that share it."""
    holding = logical.holding
    of_ranks = on_ranks("gradient", (holding.ranks, holding.axes), logical.pieces or {}, expected, holding.states)
    if of_ranks is not None:
        of_ranks = replace(
            of_ranks,
            reduce=holding.reduce,
            before=None if before is None else real_numbers(before),
            others={n: real_numbers(t) for n, t in reference.tensors.items() if t is not None and n != holding.name},
        )
    values = {(other.holding.stage, 0): real_numbers(other.value) for other in tied if other.value is not None}
    stages = {place: {STAGES: place[0]} for place in values}
    of_stages = WrongTensor("gradient", values, real_numbers(expected), stages, judged=((holding.stage, 0),))
    return cause_of(of_ranks, of_stages if len(values) > 1 else None).text or None


def _differs(
    comparison: Comparison,
    reference: Reference,
    logical: StageTensor,
    found: TensorDifference,
    verdict: Verdict,
    cause: str | None,
) -> Finding:
    name, kind, step = logical.holding.name, reference.kind, reference.step
    code = "not_finite" if found.not_finite else f"{kind}_differs"
    when = f"at step {step}" if kind in ("gradient", "result") else f"after {_steps(comparison)}"
    return _finding(
        comparison,
        code if verdict is Verdict.REFUTED else "near_threshold",
        f"{noun_of(kind, name)} differs {when}: {found}",
        logical.holding,
        step,
        {
            "mismatched": f"{found.mismatched} of {found.elements}",
            "greatest absolute difference": f"{found.absolute:.6g} at {found.index}",
            "relative difference": f"{found.relative:.3g}",
            "allowed": f"{comparison.tolerance.bound:.3g}",
        },
        cause,
    )


def _finding(
    comparison: Comparison,
    code: str,
    message: str,
    holding: Holding,
    step: int,
    facts: Mapping[str, str] | None = None,
    cause: str | None = None,
) -> Finding:
    held = {"tensor": holding.name, "step": str(step), "stage": str(holding.stage), "ranks": str(holding.ranks)}
    return Finding(code, message, comparison.place(holding.name), {**held, **(facts or {})}, cause)


def noun_of(kind: str, name: str) -> str:
    """Return how a tensor of a kind is called."""
    return f"the gradient of `{name}`" if kind == "gradient" else f"the {kind} `{name}`"


def _steps(comparison: Comparison) -> str:
    return "1 step" if comparison.steps == 1 else f"{comparison.steps} steps"


# Every parameter of the model is held somewhere, in its own shape, and nothing is held that the model lacks.


def check_coverage(comparison: Comparison, initial_buffers: dict[str, torch.Tensor]) -> CheckOutcome:
    """`initial_buffers`: the model's buffers before the first step. Those that training does not change may be left
    out of a program (its graph does not read them), and those that forward makes are made again in each step."""
    tally = Tally("coverage", Verdict.TESTED_EXACT)
    reference = comparison.reference
    held = {alias for h in comparison.parameters.values() for alias in comparison.names.get(h.name, (h.name,))}
    held |= {alias for h in comparison.buffers.values() for alias in comparison.names.get(h.name, (h.name,))}
    for name in sorted({comparison.names[n][0] for n in reference.parameters}):
        tally.add(*_held(comparison, name, name in held, "parameter"))
    for name in sorted({comparison.names[n][0] for n in reference.buffers if n in initial_buffers}):
        after, before = reference.buffers[name], initial_buffers[name]
        changed = not same_values(real_numbers(after), real_numbers(before))
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
