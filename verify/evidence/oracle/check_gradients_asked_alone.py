"""Check gradients where only some inputs ask for one: they must be those that all inputs together get.

A hand-written backward often looks at `ctx.needs_input_grad`; what it returns for one input must not depend on whether
another asks. Without any gradient asked for, outputs must be the same as well.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor

from nnscaler.exception_in_one_line import in_one_line
from verify.evidence.oracle.case_runner import OperatorRunner, Prepared
from verify.evidence.oracle.enumerate_cases import Base, Enumerator
from verify.evidence.oracle.run_whole_operator import run_whole
from verify.results.finding import Finding
from verify.results.report import Check
from verify.results.verdict import Verdict

BASES = 3  # sample calls that are tried


def check_subsets(runner: OperatorRunner, found: list[Base]) -> tuple[Check | None, list[Finding]]:
    """Ask for the gradient of each floating input alone, and of none; the check is None where no input has one."""
    started = time.perf_counter()
    count = 0
    findings: list[Finding] = []
    for base in found[:BASES]:
        draws = Enumerator(runner, base).draws(base.inputs.sizes, 1)
        if not draws:
            continue
        prepared = runner.prepare(draws[0])
        leaves = [i for i, g in enumerate(prepared.whole.gradients) if g is not None]
        for kept in [*([i] for i in leaves if len(leaves) > 1), []] if leaves else []:
            count += 1
            problem = _problem(runner, prepared, draws[0].seed, frozenset(kept))
            if problem is not None and not findings:
                findings.append(_finding(runner, prepared, kept, problem))
    if not count:
        return None, []
    verdict = Verdict.REFUTED if findings else Verdict.TESTED_EXACT
    seconds = time.perf_counter() - started
    return Check("gradients for some inputs", verdict, count, len(findings), seconds, supporting=True), findings


def _problem(runner: OperatorRunner, prepared: Prepared, seed: int, kept: frozenset[int]) -> str | None:
    """Describe the first difference that appears when only the inputs `kept` ask for a gradient; else None."""
    whole = prepared.whole
    without = frozenset(range(len(whole.concrete.tensors))) - kept
    generator = torch.Generator().manual_seed(seed + 1)
    function = runner.function(whole.concrete)
    random = runner.options.safeguards.random_cotangents
    try:
        alone = run_whole(function, whole.concrete, generator, whole.dtype, without, random)
    except Exception as error:  # noqa: BLE001 - an operator that cannot do it is the finding
        return f"it raises {in_one_line(error, 200)}"
    bound = prepared.bound
    for index, (expected, found) in enumerate(zip(whole.outputs, alone.outputs, strict=True)):
        if whole.concrete.compare and not _same(expected, found, bound.agree):
            return f"output {index} differs"
    same_cotangents = all((a is None) == (b is None) for a, b in zip(whole.cotangents, alone.cotangents, strict=True))
    for index in kept if same_cotangents else ():
        if not _same(whole.gradients[index], alone.gradients[index], bound.agree):
            return f"the gradient of input {index} differs"
    return None


def _same(a: Tensor | None, b: Tensor | None, agree: object) -> bool:
    if a is None or b is None:
        return a is b
    return bool(agree(b, a, 0.0)) if callable(agree) else False


def _finding(runner: OperatorRunner, prepared: Prepared, kept: list[int], problem: str) -> Finding:
    who = f"only input {kept[0]} asks" if kept else "no input asks"
    message = f"`{runner.spec.name}` gives another result when {who} for a gradient: {problem}"
    shapes = ", ".join(str(tuple(t.shape)) for t in prepared.whole.concrete.tensors)
    help = "in the backward, compute each gradient alike, whatever `ctx.needs_input_grad` says of the others"
    return Finding("gradient_is_not_derivative", message, runner.spec.where, {"shapes": shapes}, help=help)
