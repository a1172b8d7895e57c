"""Check resuming from a checkpoint before the last step: it holds the model's state, and leads to the same bits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from nnscaler.atomic_writes import save_tensors
from nnscaler.compile import WantedPlan, compile_traced
from nnscaler.runtime.tensor_bits_and_differences import difference, same_bits
from nnscaler.runtime.training.saving.checkpoint import load_checkpoint
from verify.programs.checks import run_checks
from verify.programs.checks.assemble_logical_tensors import Holding, holdings_of, results_of
from verify.programs.checks.input_and_outcome import CheckOutcome, Comparison, Tally, merge_outcomes
from verify.programs.execution.record_rank_steps import RankResult, Task
from verify.programs.execution.run_on_backend import Failure, finding_of, run_simulator
from verify.programs.opened_program import open_program
from verify.programs.prepare_verification import Prepared
from verify.programs.request import PlanRequest
from verify.programs.source_map import SourceMap
from verify.results.finding import Finding
from verify.results.report import Check
from verify.results.verdict import Verdict


def check(comparison: Comparison, saved: Mapping[str, Tensor]) -> CheckOutcome:
    """`saved`: the logical state as it was read back from all files."""
    tally = Tally("save and load", Verdict.TESTED_EXACT)
    holdings = {**comparison.parameters, **comparison.buffers}
    for holding in holdings.values():
        _complete(tally, comparison, holding, saved)
    for result in comparison.results:
        _continues(tally, comparison, result)
    return tally.outcome()


def _complete(tally: Tally, comparison: Comparison, holding: Holding, saved: Mapping[str, Tensor]) -> None:
    found = saved.get(holding.name)
    if found is not None and tuple(found.shape) == holding.shape:
        tally.add(Verdict.TESTED_EXACT)
        return
    what = "is not in the checkpoint" if found is None else f"has shape {tuple(found.shape)} in the checkpoint"
    tally.add(Verdict.REFUTED, _finding(comparison, holding.name, f"`{holding.name}` {what}"))


def _continues(tally: Tally, comparison: Comparison, result: RankResult) -> None:
    """Compare bitwise: the same program runs on the same numbers."""
    resumed = {(stage, attribute): tensor for stage, attribute, _, tensor in result.resumed}
    for stage, attribute, name, right in (*result.parameters, *result.buffers):
        tensor = resumed.get((stage, attribute))
        if right is None:
            continue
        if tensor is not None and same_bits(tensor, right):
            tally.add(Verdict.TESTED_EXACT)
            continue
        how = "is missing" if tensor is None else f"differs: {difference(tensor, right)}"
        message = f"training from a checkpoint, `{name}` {how} on rank {result.rank}"
        tally.refute(_finding(comparison, name, message))


def _finding(comparison: Comparison, name: str, message: str) -> Finding:
    facts = {"tensor": name, "step": str(comparison.steps - 1)}
    return Finding("checkpoint_differs", message, comparison.place(name), facts)


# The checkpoint under another plan: what many ranks wrote is a state from which one rank goes on.

NAME = "checkpoint under another plan"


def check_other_plan(
    request: PlanRequest, prepared: Prepared, comparison: Comparison, task: Task, folder: Path
) -> CheckOutcome:
    """Make the last step on one rank, from the checkpoint, and compare as after the last step of all ranks."""
    if prepared.traced is None or task.checkpoint is None:
        return CheckOutcome(Check(NAME, Verdict.INCONCLUSIVE, 0))
    compiled = compile_traced(prepared.traced, WantedPlan(1, "dp=1"), model={"name": type(prepared.model).__name__})
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
        refuted = int(outcome.verdict is Verdict.REFUTED)
        finding = finding_of(outcome, program.path, SourceMap(prepared.graph))
        return CheckOutcome(Check(NAME, outcome.verdict, refuted, refuted), (finding,))
    roles = program.roles()
    (parameters, buffers), reference = holdings_of(roles), comparison.reference
    last = replace(
        reference, losses=reference.losses[-1:], gradients=reference.gradients[-1:], results=reference.results[-1:]
    )
    other = replace(
        comparison,
        reference=last,
        results=outcome,
        parameters=parameters,
        buffers=buffers,
        outputs=results_of(roles),
        steps=1,
    )
    return merge_outcomes(NAME, f"{NAME}: ", run_checks(other, {n: t.clone() for n, t in reference.buffers.items()}))
