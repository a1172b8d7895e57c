"""Many operators: crashes, hangs and errors of one leave the others alone; what becomes of the verdicts."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch

from nnscaler.errors import NnscalerError
from verify.child_processes import Note
from verify.evidence.inputs.find_operator import record_of
from verify.evidence.verify_op_options import OpOptions
from verify.operators.run.cache import CACHED
from verify.operators.run.job import Job, make_job
from verify.operators.run.run_job import Reproduce
from verify.operators.run.targets import find_jobs
from verify.operators.run.verify_many import InternalError, PoolSettings, run_many, run_one, summary, worst
from verify.results.finding import Finding
from verify.results.report import Check, Report
from verify.results.verdict import Verdict

OPTIONS = OpOptions(prove=False, cases=6, timeout=60.0)
DEADLY = """
import ctypes, os, time

@nnscaler.register_op("a b -> a b", name="NAME_right")
def right(x: Tensor) -> Tensor:
    return x * 2

@nnscaler.register_op("a b -> a b", name="NAME_dies_on_a_shard")
def dies_on_a_shard(x: Tensor) -> Tensor:
    if x.shape[0] == 4:
        os.abort()
    return x * 2

@nnscaler.register_op("a b -> a b", name="NAME_dies")
def dies(x: Tensor) -> Tensor:
    ctypes.string_at(0)
    return x

@nnscaler.register_op("a b -> a b", name="NAME_exits")
def exits(x: Tensor) -> Tensor:
    os._exit(0)

@nnscaler.register_op("a b -> a b", name="NAME_wrong")
def wrong(x: Tensor) -> Tensor:
    return x.softmax(-1)
"""
HANGS = """
import time

@nnscaler.register_op("a b -> a b", name="NAME_hangs")
def hangs(x: Tensor) -> Tensor:
    time.sleep(100)
    return x
"""


def test_a_death_is_a_finding_on_the_operator_that_ran(write: Callable[[str], str]) -> None:
    file = write(DEADLY)
    results = sorted(run_many(find_jobs([file]), OPTIONS, PoolSettings(workers=2)), key=lambda r: r.index)
    verdicts = [result.report.verdict for result in results]
    bad, open_ = Verdict.REFUTED, Verdict.INCONCLUSIVE
    assert verdicts[0].passes and verdicts[1:] == [bad, open_, open_, bad]
    on_a_shard, whole, exits = (results[i].report.findings[0] for i in (1, 2, 3))
    assert on_a_shard.code == whole.code == exits.code == "operator_died"
    assert "SIGABRT" in on_a_shard.message and "SIGSEGV" in whole.message and "code 0" in exits.message
    assert on_a_shard.counter_example["running"].startswith("shards of a call on shapes (12, ")
    assert "split a in 3" in on_a_shard.counter_example["running"]
    assert on_a_shard.counter_example["at"] == f"{file}:14"
    assert whole.counter_example["running"].startswith("the whole operator on shapes")
    assert "nnscaler reproduce nns1:" in (on_a_shard.reproduce or "")
    assert worst([result.report for result in results]) == 1


def test_a_hang_is_not_a_pass(write: Callable[[str], str]) -> None:
    report = run_one(find_jobs([write(HANGS)])[0], OpOptions(timeout=5.0))
    assert report.verdict is Verdict.INCONCLUSIVE and report.exit_code == 3
    (finding,) = report.findings
    assert finding.code == "operator_timed_out" and "was still running after " in finding.message
    assert finding.counter_example["at"].endswith(".py:9")


def test_in_this_process(write: Callable[[str], str]) -> None:
    jobs = find_jobs([f"{write(DEADLY)}::right"])
    assert run_one(jobs[0], OPTIONS, isolate=False).verdict.passes


def test_no_fork_is_said(write: Callable[[str], str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    report = run_one(find_jobs([f"{write(DEADLY)}::right"])[0], OPTIONS)
    assert any("CUDA is initialised" in note for note in report.notes)


def job_of(name: str) -> Job:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x

    function.__name__ = name
    spec = record_of(function)
    assert spec is not None
    return make_job(spec, "a -> a")


def report_of(job: Job, verdict: Verdict, *, detail: str = "", notes: tuple[str, ...] = ()) -> Report:
    check = Check("split `a`", verdict, 3, int(verdict is Verdict.REFUTED), 0.1, detail)
    findings = (Finding("annotation_wrong", "wrong"),) if verdict is Verdict.REFUTED else ()
    return Report("verify-op", job.spec.name, "", 0, (check,), findings, notes)


def fake(job: Job, options: OpOptions, reproduce: Reproduce, note: Note) -> Report:
    """Does what the operator's name says."""
    name = job.spec.name
    if name == "error":
        raise NnscalerError("sample_inputs_needed", "needs inputs", help="give some")
    if name == "bug":
        raise AssertionError("impossible")
    return report_of(job, Verdict.REFUTED if name == "wrong" else Verdict.PROVED_ALL_SIZES)


def run_fakes(*names: str, fail_fast: bool = False) -> list[Report]:
    options = OpOptions(fail_fast=fail_fast)
    found = run_many([job_of(name) for name in names], options, PoolSettings(workers=1, verify=fake))
    return [result.report for result in found]


def test_what_cannot_be_run_is_an_error_alone_and_undecided_among_others() -> None:
    with pytest.raises(NnscalerError) as caught:
        run_fakes("error")
    assert caught.value.code == "sample_inputs_needed"
    reports = run_fakes("right", "error", "right")
    assert [r.exit_code for r in reports] == [0, 3, 0] and worst(reports) == 3
    (finding,) = reports[1].findings
    assert finding.code == "nothing_checked" and "needs inputs" in finding.message and finding.help == "give some"


def test_a_bug_of_ours_is_no_verdict() -> None:
    with pytest.raises(InternalError, match="impossible"):
        run_fakes("bug")
    seen: list[str] = []
    results = run_many([job_of("bug"), job_of("right")], OpOptions(), PoolSettings(workers=1, verify=fake))
    with pytest.raises(InternalError, match="impossible"):
        seen.extend(result.report.subject for result in results)
    assert seen == ["right"]  # the others are not lost


def test_fail_fast() -> None:
    assert [r.subject for r in run_fakes("right", "wrong", "right", "right", fail_fast=True)] == ["right", "wrong"]
    assert len(run_fakes("right", "wrong", "right", "right")) == 4


@pytest.mark.parametrize(
    ("verdicts", "code"),
    [
        ([], 3),
        ([Verdict.PROVED_ALL_SIZES, Verdict.TESTED_CALIBRATED], 0),
        ([Verdict.PROVED_ALL_SIZES, Verdict.INCONCLUSIVE], 3),
        ([Verdict.INCONCLUSIVE, Verdict.REFUTED, Verdict.PROVED_ALL_SIZES], 1),
    ],
)
def test_the_worst_report_counts(verdicts: list[Verdict], code: int) -> None:
    assert worst([report_of(job_of("f"), verdict) for verdict in verdicts]) == code


def blocked(reason: str) -> str:
    """Return the detail of a check whose proof was not found."""
    return f"not proved for all sizes: {reason}"


def test_the_summary_of_proofs_void_variants_and_the_cache() -> None:
    tested = Verdict.TESTED_EXACT
    reports = [
        report_of(job_of("one"), tested, detail="8 cases; " + blocked("a guard on a size")),
        report_of(job_of("two"), tested, detail=blocked("a guard on a size") + "; more"),
        report_of(
            job_of("three"), tested, detail="constant along the split: sum dropped, output 0; " + blocked("sort")
        ),
        report_of(job_of("four"), Verdict.PROVED_ALL_SIZES, notes=(CACHED,)),
        report_of(job_of("five"), Verdict.REFUTED, detail=blocked("it is wrong")),
    ]
    text = [line.text for line in summary(reports)]
    assert "  a guard on a size  one, two" in text
    assert "  sort               three" in text
    assert any("three split `a`" in line and "sum dropped, output 0" in line for line in text)
    assert any(line.startswith("cached: 1 of 5") for line in text)
    assert not any("it is wrong" in line for line in text)
    assert summary([report_of(job_of("four"), Verdict.PROVED_ALL_SIZES)]) == []


MAIN = """
import os
import torch
import verify

def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2

if __name__ == "__main__":
    report = verify.verify_op(double, annotation="a b -> a b")
    print(report.verdict.passes, [f.code for f in report.findings])
"""


def test_a_function_of_main(tmp_path: object, repository: object) -> None:
    import subprocess
    import sys
    from pathlib import Path

    file = Path(str(tmp_path)) / "script.py"
    file.write_text(MAIN)
    environment = {**os.environ, "PYTHONPATH": str(repository), "OMP_NUM_THREADS": "1"}
    found = subprocess.run([sys.executable, str(file)], capture_output=True, text=True, env=environment, check=False)
    assert found.stdout == "True []\n", found.stderr
