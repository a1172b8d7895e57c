"""`--profile deep`: cases that hypothesis draws find what fixed sizes do not, and are the same for the same seed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import Tensor

from nnscaler.errors import NnscalerError
from nnscaler.ir.operation_placement import Split
from verify.evidence.inputs.find_operator import record_of
from verify.evidence.oracle.case_runner import OperatorRunner
from verify.evidence.oracle.enumerate_cases import bases
from verify.evidence.verify_op_options import OpOptions
from verify.operators.run import fuzz_with_hypothesis
from verify.operators.run.fuzz_with_hypothesis import NAME, DrawTally, draw_cases, require_hypothesis, verify_deep
from verify.operators.run.job import Job, make_job
from verify.operators.run.run_job import Reproduce
from verify.operators.run.verify_many import PoolSettings, run_many
from verify.results.verdict import Verdict

OPTIONS = OpOptions(prove=False, cases=6, timeout=120.0)


def odd(x: Tensor) -> Tensor:
    """Right for every size but 13: no size of ours."""
    return x * 2 if x.shape[1] != 13 else x.flip(0)


def product(a: Tensor, b: Tensor) -> Tensor:
    return a @ b


def job_of(function: Callable[..., Tensor], annotation: str) -> Job:
    spec = record_of(function)
    assert spec is not None
    return make_job(spec, annotation)


def drawn(job: Job, seed: int, examples: int) -> DrawTally:
    runner = OperatorRunner(job.spec, OpOptions(seed=seed))
    return draw_cases(runner, bases(runner), seed, examples)


def test_it_finds_what_fixed_sizes_do_not() -> None:
    job = job_of(odd, "a b -> a b")
    found = [drawn(job, seed, 500).failed for seed in range(3)]
    failed = next(result for result in found if result is not None)
    case = failed.case
    assert dict(case.inputs.sizes)["b"] == 13 and case.choices == (Split("a"),)
    assert case.parts == (2,) and dict(case.inputs.sizes)["a"] == 2  # shrunk


def test_a_right_operator_passes_and_the_cases_are_many() -> None:
    tally = drawn(job_of(product, "m k+, k+ n -> m n"), 0, 60)
    assert tally.failed is None and tally.cases >= 40 and tally.count > tally.cases


def test_the_seed_decides() -> None:
    job = job_of(product, "m k+, k+ n -> m n")

    def runs(seed: int) -> list[str]:
        notes: list[str] = []
        runner = OperatorRunner(job.spec, OpOptions(seed=seed), notes.append)
        draw_cases(runner, bases(runner), seed, 20)
        return notes

    assert runs(1) == runs(1) != runs(2)


def test_it_is_a_check_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz_with_hypothesis, "EXAMPLES", 20)
    jobs = [job_of(product, "m k+, k+ n -> m n"), job_of(product, "m k^, k^ n -> n m")]
    right, wrong = sorted(
        run_many(jobs, OPTIONS, PoolSettings(workers=1, verify=verify_deep)), key=lambda result: result.index
    )
    (check,) = [check for check in right.report.checks if check.name == NAME]
    assert right.report.verdict.passes and check.count > 0 and check.verdict is Verdict.TESTED_EXACT
    assert wrong.report.exit_code == 1 and NAME not in [check.name for check in wrong.report.checks]


def test_its_finding_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_of(odd, "a b -> a b")
    failed = next(result for seed in range(3) if (result := drawn(job, seed, 500).failed) is not None)
    monkeypatch.setattr(fuzz_with_hypothesis, "draw_cases", lambda *_: DrawTally(1, 1, 0, failed))
    report = verify_deep(job, OPTIONS, Reproduce(job, 0), lambda text: None)
    assert report.verdict is Verdict.REFUTED
    assert "nnscaler reproduce nns1:" in (report.findings[-1].reproduce or "")


def test_without_hypothesis(monkeypatch: pytest.MonkeyPatch) -> None:
    require_hypothesis()
    monkeypatch.setattr(fuzz_with_hypothesis, "find_spec", lambda name: None)
    with pytest.raises(NnscalerError) as caught:
        require_hypothesis()
    assert caught.value.help == "pip install hypothesis"
