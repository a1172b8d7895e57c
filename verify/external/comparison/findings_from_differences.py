"""Turn differences into findings: one for each code and cause, with all parameters that are alike together."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from nnscaler.errors import few
from verify.external.comparison.compare import ELSEWHERE, LATE
from verify.external.comparison.comparison_records import IN_STEP, ComparisonResult, Difference, ProgramRun
from verify.programs.causes.wrong_tensor import VAGUE, Cause
from verify.results.finding import Finding
from verify.results.verdict import Verdict

_SHOWN = 4  # names in one sentence


def findings(run: ProgramRun, compared: Sequence[ComparisonResult], every_gradient: bool = True) -> tuple[Finding, ...]:
    """Return one finding for each group of differences that are alike: of one code, first those with a cause.

    `every_gradient`: those that optimizers read are among what was compared.
    """
    groups: dict[tuple[str, str, str, str], list[Difference]] = {}
    for result in compared:
        for one in result.differences:
            factor = f"{one.cause.factor:.3g}"
            groups.setdefault((one.code, one.cause.kind, one.cause.axis, factor), []).append(one)
    gradients = [result for result in compared if result.name in ("gradients", LATE)]
    missing = any(not r.count or any(d.code == "not_compared" for d in r.differences) for r in gradients)
    agreed = every_gradient and not missing
    found = [_finding(run, group, _AGREED if agreed else _NOT_ALL) for group in groups.values()]
    codes = list(dict.fromkeys(finding.code for finding in found))
    return tuple(sorted(found, key=lambda f: (codes.index(f.code), f.counter_example["cause"] in VAGUE)))


_AGREED, _NOT_ALL = "although gradients agree", "and not all gradients could be compared"
_SENTENCES: Mapping[str, str] = {
    "loss_differs": "the loss is not the model's",
    "loss_missing": "no rank returns a loss, so that none can be compared",
    "gradient_differs": "the gradient of {name} is not the model's",
    "gradient_missing": "the model has a gradient for {name}, and the program has none",
    "gradient_extra": "the program has a gradient for {name}, and the model has none",
    "not_finite": "the gradient of {name} has NaN or infinity where the model's has not",
    "gradient_norm_differs": "the norm of all gradients is not the model's",
    "parameter_differs": "{name} is not the model's after step {step}, {gradients}",
    "buffer_differs": "the buffer {name} is not the model's after step {step}",
    "parameter_not_held": "no rank holds {actual} of {name}",
    "parameter_unmatched": "{name} of the program cannot be matched with a parameter of the model",
    "not_compared": "{actual}",
    "replicas_differ": "ranks start from different values of {name}",
}


def _finding(run: ProgramRun, group: Sequence[Difference], gradients: str) -> Finding:
    undecided = [d for d in group if d.verdict is not Verdict.REFUTED]
    worst = max(group, key=lambda d: (d.verdict is Verdict.REFUTED, d.relative))
    names, ranks = sorted({d.name for d in group}), sorted({d.rank for d in group if d.rank >= 0})
    cause = _common([d.cause for d in group])
    code = "near_threshold" if len(undecided) == len(group) and worst.relative else worst.code
    sentence = _SENTENCES[worst.code].format(
        name=_listed(names), step=worst.step, actual=worst.actual, gradients=gradients
    )
    if ranks:
        sentence += f", on {'rank' if len(ranks) == 1 else 'ranks'} {_ranges(ranks)}"
    example = {"step": str(worst.step), "rank": str(worst.rank)} if worst.rank >= 0 else {}
    if worst.expected:
        example |= {"expected": worst.expected, "actual": worst.actual}
    if worst.relative:
        example["relative difference"] = f"{worst.relative:.3g}"
    example |= {"dtype": run.dtype}
    if worst.layout:
        example["layout"] = worst.layout
    if cause.axis:
        example["axis"] = cause.axis
    if cause.factor:
        example["factor"] = f"{cause.factor:.6g}"
    example["cause"] = cause.kind
    if len(names) > 1:
        example["tensors"] = ", ".join(names)
    help = _HELP.get(worst.actual, _HELP.get(worst.code))
    if code == "near_threshold" and run.tolerance.unknown:
        help = run.tolerance.unknown
    return Finding(code, sentence, run.program.where, example, cause.text or None, help)


_HELP: Mapping[str, str] = {
    "parameter_unmatched": "name it in `names`: {its name in the program: its name in the plain model}",
    "not_compared": "a learning rate above 0, or more steps (`--steps`); does the optimizer hold the parameters that "
    "the module has now, and do they get gradients?",
    ELSEWHERE: "parallelise the values that the module has, instead of initialising parameters again; or name them in "
    "`names`: {its name in the program: its name in the plain model}",
    IN_STEP: "verify it with plain SGD as the update between the reduction and what is sent to other ranks: that hides "
    "nothing; or write the reduced gradients into `.grad`",
    "loss_missing": "return the loss from `step` on the ranks that have it",
}


def _common(causes: Sequence[Cause]) -> Cause:
    """Return the cause that most of these share; the first of them where several do."""
    kinds = [(cause.kind, cause.axis) for cause in causes]
    best = max(dict.fromkeys(kinds), key=kinds.count)
    return causes[kinds.index(best)]


def _listed(names: Sequence[str]) -> str:
    """Name tensors, those of all layers together: `layers.*.norm.weight (4), head.bias and 3 more`."""
    generic: dict[str, list[str]] = {}
    for name in names:
        generic.setdefault(re.sub(r"\b\d+\b", "*", name), []).append(name)
    shown = [members[0] if len(members) == 1 else f"{kind} ({len(members)})" for kind, members in generic.items()]
    return few(shown, _SHOWN)


def _ranges(ranks: Sequence[int]) -> str:
    """Write rank numbers: `0-3, 6`."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
