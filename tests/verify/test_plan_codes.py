"""Codes of findings that no edited program of the other tests leads to."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from nnscaler.codegen.compiled_program import Program
from verify.programs.checks import losses
from verify.programs.checks.assemble_logical_tensors import Holding
from verify.programs.checks.compare_gradients_and_state import check_coverage
from verify.programs.checks.input_and_outcome import Comparison
from verify.programs.eager_reference import Trajectory
from verify.programs.execution.record_rank_steps import RankResult
from verify.programs.execution.run_on_backend import Failure, finding_of
from verify.programs.source_map import SourceMap
from verify.programs.typing import check_program
from verify.results.float64_tolerance import Tolerance
from verify.results.verdict import Verdict

ONE = torch.tensor(1.0, dtype=torch.float64)


def comparison(held: str, loss: torch.Tensor | None) -> Comparison:
    """A model with one parameter `w`, and a program that holds `held` and returns `loss`."""
    reference = Trajectory((ONE,), ({"w": ONE},), {"w": ONE}, {}, 0.1, 0.0)
    holding = Holding(held, 0, held, (), (), {}, (0,), True)
    result = RankResult(0, (loss,), ((),), (), ())
    return Comparison(reference, (result,), {(0, held): holding}, {}, {"w": ("w",)}, {}, Tolerance(), 1)


def test_a_parameter_that_no_rank_holds() -> None:
    outcome = check_coverage(comparison("v", ONE), {})
    assert outcome.check.verdict is Verdict.REFUTED
    assert [f.code for f in outcome.findings] == ["parameter_not_held", "parameter_unknown"]
    assert [f.message for f in outcome.findings] == [
        "no rank holds the parameter `w`",
        "stage 0 holds `v`, which the model does not have",
    ]
    right = check_coverage(comparison("w", ONE), {})
    assert right.check.verdict.passes and right.check.count and not right.findings


def test_a_loss_that_no_rank_returns() -> None:
    outcome = losses.check(comparison("w", None))
    assert outcome.check.verdict is Verdict.REFUTED
    assert [(f.code, f.message) for f in outcome.findings] == [("loss_missing", "no rank returns the loss of step 0")]
    assert losses.check(comparison("w", ONE)).check.verdict.passes


@pytest.mark.long
def test_a_process_that_died(compiled: Program, tmp_path: Path) -> None:
    failure = Failure("rank_died", "rank 3: ended by signal 11 (SIGSEGV)", 3)
    finding = finding_of(failure, tmp_path, SourceMap(compiled.graph))
    assert (finding.code, finding.counter_example["rank"], failure.verdict) == ("rank_died", "3", Verdict.REFUTED)
    assert Failure("rank_died", "", 3, from_outside=True).verdict is Verdict.INCONCLUSIVE


def edited(compiled: Program, pattern: str, new: str) -> set[str]:
    """Codes of the findings about the program whose text is changed at the first place in each role."""
    sources = {file: re.sub(pattern, new, text, count=1) for file, text in compiled.sources.items()}
    assert sources != compiled.sources
    result = check_program(sources, compiled.graph)
    codes = {finding.code for outcome in result.outcomes for finding in outcome.findings}
    assert any(outcome.check.verdict is Verdict.REFUTED for outcome in result.outcomes)
    return codes


def test_a_micro_batch_that_no_stage_computes(compiled: Program) -> None:
    assert "not_covered" in edited(compiled, r"F0\.1 ", "")


def test_copies_that_draw_other_numbers(compiled: Program) -> None:
    wrong = edited(compiled, r"(ops\.dropout\(.*)\"dp\": Sharded\(0\), ", r'\1"tp": Sharded(0), ')
    assert "random_numbers_differ" in wrong
