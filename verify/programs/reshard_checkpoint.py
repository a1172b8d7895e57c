"""The checkpoint under another plan: what many ranks wrote is a state from which one rank goes on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from nnscaler.compile import compile_traced
from nnscaler.files import save_tensors
from nnscaler.runtime.program.loader import load_role
from nnscaler.runtime.training.checkpoint import load_checkpoint
from verify.programs.checks import run_checks
from verify.programs.checks.context import Comparison, Outcome, merge_outcomes
from verify.programs.checks.logical import holdings_of
from verify.programs.execution.backends import run_simulator
from verify.programs.execution.failure import Failure, finding_of
from verify.programs.execution.rank_program import Task
from verify.programs.prepare import Prepared
from verify.programs.program_directory import open_program
from verify.programs.request import PlanRequest
from verify.programs.source_map import Places
from verify.results.report import Check
from verify.results.verdict import Verdict

NAME = "checkpoint under another plan"


def check_other_plan(
    request: PlanRequest, prepared: Prepared, comparison: Comparison, task: Task, folder: Path
) -> Outcome:
    """Make the last step on one rank, from the checkpoint, and compare as after the last step of all ranks."""
    if prepared.traced is None or task.checkpoint is None:
        return Outcome(Check(NAME, Verdict.INCONCLUSIVE, 0))
    compiled = compile_traced(prepared.traced, ranks=1, plan="dp=1", model={"name": type(prepared.model).__name__})
    program = open_program(compiled.save(folder))
    checkpoint = load_checkpoint(task.checkpoint)
    # names of constants are those of the trace, which both programs come from
    save_tensors({**(program.state() or {}), **checkpoint.state}, folder / "resumed.pt")
    alone = replace(
        task,
        program=str(program.path),
        state=str(folder / "resumed.pt"),
        steps=1,
        first_step=checkpoint.step,
        trials=(),
        forward_only=False,
        checkpoint=None,
    )
    outcome = run_simulator(alone, 1, request.timeout)
    if isinstance(outcome, Failure):
        return Outcome(Check(NAME, outcome.verdict, 1, 1), (finding_of(outcome, program.path, Places(prepared.graph)),))
    parameters, buffers = holdings_of([load_role(program.path / file) for file in program.role_files])
    reference = comparison.reference
    last = replace(reference, losses=reference.losses[-1:], gradients=reference.gradients[-1:])
    other = replace(comparison, reference=last, results=outcome, parameters=parameters, buffers=buffers, steps=1)
    return merge_outcomes(NAME, f"{NAME}: ", run_checks(other, {n: t.clone() for n, t in reference.buffers.items()}))
