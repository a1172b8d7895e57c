"""The plans of the installed transformers, each verified: equal to the plain model, wrong, crashing, or not built.

    python benchmarks/plan_health.py [--models llama qwen3 ...] [--cases tp2 tp4 ep2 fsdp2 tp2-fsdp2 tp2-ep2 flags]
                                     [--jobs 2] [--timeout 60] [--out docs/plan-health.md] [--keep]
                                     [--no-confirm]

Every configuration that declares a tensor or expert plan is shrunk, given random weights, parallelised through the
library's own code, and compared with the plain model in float64: the loss, and every gradient on every rank. What is
wrong, or raises, is confirmed by a minimal script (plain torch and transformers, gloo processes, float32, weights read
by `from_pretrained(distributed_config=...)`, which needs accelerate), and rules that may mend it are tried.

Beside the Markdown file, the same rows are written as JSON and HTML. Ends with 1 where a wrong plan is not confirmed.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import re
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from nnscaler.errors import NnscalerError
from tests.verify.external.script_runs import run_script
from verify.child_processes import Done, Note, Raised, Task, run_forked
from verify.external.differential_run import ExternalSettings
from verify.external.reference import initial_model
from verify.external.transformers.build_program import build, distributed_options, transformers_program
from verify.external.transformers.check_parallel_degrees import PlanChanges, PlanSizes
from verify.external.transformers.expand_requests import FlagVariant, flag_variants
from verify.external.transformers.find_and_change_config import library, targets
from verify.external.transformers.lint_and_repair_plan import WrongParameter, generic, plan_lints, plan_repairs
from verify.external.transformers.repro_script import minimal_script
from verify.external.verify import Outcome, verify_in
from verify.results.verdict import Verdict

sys.path.insert(0, str(Path(__file__).parent))
from plan_health_report import RAISES, Row, write_reports

CASES: Mapping[str, PlanSizes] = {
    "tp2": PlanSizes(tp=2),
    "tp4": PlanSizes(tp=4),
    "ep2": PlanSizes(ep=2),
    "tp2-ep2": PlanSizes(tp=2, ep=2),
    "fsdp2": PlanSizes(fsdp=2),
    "tp2-fsdp2": PlanSizes(tp=2, fsdp=2),
}
FLAGS = "flags"  # every flag, under tp2
SETTINGS = ExternalSettings(steps=1, isolate=False, timeout=60.0)
Result = TypeVar("Result")


@dataclass(frozen=True)
class Job:
    """One program: a model type, a name of CASES, and settings of its configuration."""

    model: str
    case: str
    flag: FlagVariant | None = None

    @property
    def settings(self) -> Mapping[str, Any]:
        """Fields of the configuration that are changed."""
        return {} if self.flag is None else self.flag.settings

    def row(self, status: str, detail: str = "", **more: Any) -> Row:
        """Return the row of this job."""
        return Row(self.model, self.case, "" if self.flag is None else str(self.flag), status, detail, **more)


def judge(job: Job) -> Row:
    """Verify one program, and try rules that may mend it where it is wrong."""
    sizes = CASES[job.case]
    try:
        outcome = verified(job, PlanChanges())
        built = build(job.model, sizes, job.settings)
        lints = tuple(lint.text for lint in plan_lints(built, sizes) if lint.kind != "unmatched_rule")
    except NnscalerError as error:
        return job.row({"no_plan": "no plan"}.get(error.code, "not built"), error.message)
    verdict = outcome_verdict(outcome)
    if verdict not in (Verdict.REFUTED, Verdict.INCONCLUSIVE):
        return job.row("equal", lints=lints)
    if outcome.ran is None:
        finding = outcome.findings[0]
        return job.row("timed out" if finding.code == "timed_out" else "crashes", finding.message, lints=lints)
    wrong = wrong_parameters(outcome)
    if verdict is Verdict.INCONCLUSIVE:
        return job.row("undecided", "; ".join(finding.message for finding in outcome.findings), lints=lints)
    detail = "; ".join(told(outcome))
    names = tuple(sorted({generic(one.name) for one in wrong}))
    return job.row("wrong", detail, lints=lints, parameters=names, repair=repaired(job, built.model, wrong))


def verified(job: Job, changes: PlanChanges, executor: str = "simulator") -> Outcome:
    """Run a program in float64, and compare it."""
    settings = replace(SETTINGS, executor=executor)
    program = transformers_program(job.model, CASES[job.case], job.settings, changes=changes)
    model = initial_model(program, settings.seed)
    return verify_in(program, settings, model, program.batch(), torch.float64)


def outcome_verdict(outcome: Outcome) -> Verdict:
    """Return the worst verdict of the checks; INCONCLUSIVE without any."""
    worst = (Verdict.REFUTED, Verdict.INCONCLUSIVE)
    found = {check.verdict for check in outcome.checks}
    return next((verdict for verdict in worst if verdict in found or not found), Verdict.TESTED_EXACT)


def wrong_parameters(outcome: Outcome) -> list[WrongParameter]:
    """Return each wrong gradient with its cause."""
    differences = [one for compared in outcome.compared for one in compared.differences]
    return [
        WrongParameter(one.name, one.cause.kind, one.cause.axis, one.cause.factor)
        for one in differences
        if one.code.startswith("gradient_") and one.verdict is Verdict.REFUTED
    ]


def told(outcome: Outcome) -> Iterator[str]:
    """Yield what is wrong, with the cause."""
    for finding in outcome.findings:
        size = finding.counter_example.get("relative difference")
        text = finding.message + (f", by {size}" if size else "")
        yield f"{text}: {finding.cause}" if finding.cause else text


def repaired(job: Job, model: Any, wrong: Sequence[WrongParameter]) -> str:
    """Return the first rules that mend the plan, tried; empty where none does."""
    for repair in plan_repairs(model, wrong):
        try:
            outcome = verified(job, repair.changes)
        except NnscalerError:
            continue
        if outcome_verdict(outcome) is Verdict.TESTED_EXACT:
            return repair.text
    return ""


def confirmed(row: Row) -> Row:
    """Run the minimal script of a row that is wrong or crashes, and say what it says."""
    if importlib.util.find_spec("accelerate") is None:
        return replace(row, confirmed="not tried: accelerate is not installed")
    sizes, settings = CASES[row.case], job_of(row).settings
    built = build(row.model, sizes, settings, exact=False)
    script = minimal_script(built, sizes, distributed_options(sizes, PlanChanges(), built.model))
    try:
        result = run_script(script, sizes.fsdp * sizes.shared)
    except NnscalerError as error:
        return replace(row, confirmed=f"no: {error.message}", script=script)
    if result.error:
        if row.status == "wrong":
            over_gloo = outcome_verdict(verified(job_of(row), PlanChanges(), "gloo")) is Verdict.REFUTED
            text = f"yes, over gloo; {RAISES} {result.error}" if over_gloo else f"no: {result.error}"
            return replace(row, confirmed=text, script=script)
        is_known = row.status == "crashes" and is_one_error(row.detail, result.error)
        return replace(row, confirmed="yes" if is_known else f"no: {result.error}", script=script)
    if row.status == "crashes":
        return replace(row, confirmed="no: it runs", script=script)
    same = {generic(name) for name in result.parameters} & set(row.parameters)
    is_same = result.is_wrong and (same or not row.parameters)
    return replace(row, confirmed="yes" if is_same else "no: it is equal in float32", script=script)


def is_one_error(left: str, right: str) -> bool:
    """Return whether two messages name the same exception, and begin alike: sizes may differ."""
    kinds = [re.search(r"(\w+(?:Error|Exception)):?(.{0,24})", text, re.DOTALL) for text in (left, right)]
    one, two = (kind.groups() if kind is not None else ("", "") for kind in kinds)
    return one[0] == two[0] != "" and re.sub(r"\d+", "", one[1]).strip() == re.sub(r"\d+", "", two[1]).strip()


def job_of(row: Row) -> Job:
    """Return the job of a row: with the flag that has its name."""
    flags = flag_variants(row.model, CASES[row.case]) if row.flag else ()
    return Job(row.model, row.case, next((flag for flag in flags if str(flag) == row.flag), None))


def every(tasks: Sequence[Task[Result]], arguments: argparse.Namespace) -> Iterator[tuple[int, Result | str, float]]:
    """Yield each task's number, its result or how it ended, and its seconds."""
    for event in run_forked(tasks, arguments.jobs, arguments.timeout):
        if isinstance(event, Done):
            yield event.index, event.result, event.seconds
        else:
            how = str(event.error) if isinstance(event, Raised) else type(event).__name__
            yield event.index, how, event.seconds


def flag_jobs(models: Sequence[str], arguments: argparse.Namespace) -> list[Job]:
    """Return a job for each flag of each model."""

    def task(model: str) -> Task[tuple[FlagVariant, ...]]:
        return lambda note: flags_or_none(model)

    found: dict[int, list[Job]] = {}
    for index, result, _ in every([task(model) for model in models], arguments):
        flags = () if isinstance(result, str) else result
        found[index] = [Job(models[index], "tp2", flag) for flag in flags]
    return [job for index in sorted(found) for job in found[index]]


def flags_or_none(model: str) -> tuple[FlagVariant, ...]:
    """Return the flags of a model; none where it cannot be built at all, which its own row says."""
    try:
        return flag_variants(model, CASES["tp2"])
    except NnscalerError:
        return ()


def sweep(jobs: Sequence[Job], arguments: argparse.Namespace) -> list[Row]:
    """Judge every job, and confirm what is not equal."""

    def task(job: Job) -> Task[Row]:
        def run(note: Note) -> Row:
            note(f"{job.model} {job.case}")
            return judge(job)

        return run

    rows = list(_rows([task(job) for job in jobs], jobs, arguments))
    doubtful = [index for index, row in enumerate(rows) if row.status in ("wrong", "crashes")]
    print(f"{len(rows)} programs in {sum(row.seconds for row in rows):.0f} s of {arguments.jobs} children", flush=True)
    if arguments.confirm:
        again = [_confirmation(rows[index]) for index in doubtful]
        for number, result, _ in every(again, replace_jobs(arguments)):
            index = doubtful[number]
            rows[index] = replace(rows[index], confirmed=result) if isinstance(result, str) else result
            say(rows[index])
    return rows


def _rows(tasks: Sequence[Task[Row]], jobs: Sequence[Job], arguments: argparse.Namespace) -> Iterator[Row]:
    found: dict[int, Row] = {}
    for index, result, seconds in every(tasks, arguments):
        if isinstance(result, str):
            row = jobs[index].row("timed out" if result == "TimedOut" else "crashes", result)
        else:
            row = result
        found[index] = replace(row, seconds=round(seconds, 2))
        if found[index].status not in ("equal", "no plan"):
            say(found[index])
    yield from (found[index] for index in sorted(found))


def _confirmation(row: Row) -> Task[Row]:
    return lambda note: confirmed(row)


def replace_jobs(arguments: argparse.Namespace) -> argparse.Namespace:
    """Return the arguments for confirmations, each of which is several processes."""
    return argparse.Namespace(jobs=max(1, arguments.jobs // 2), timeout=4 * arguments.timeout)


def say(row: Row) -> None:
    """Print one row."""
    print(f"{row.model} {row.case} {row.flag} {row.status} {row.confirmed} {row.detail[:160]}", flush=True)


def main() -> int:
    """Sweep, write the reports, and return the exit code."""
    parser = argparse.ArgumentParser(description="Verify the plans of the installed transformers.")
    parser.add_argument("--models", nargs="+", default=None)
    parser.add_argument("--cases", nargs="+", default=[*CASES, FLAGS], choices=[*CASES, FLAGS])
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=60.0)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--keep", action="store_true", help="keep rows of the file that are not run now")
    parser.add_argument("--no-confirm", dest="confirm", action="store_false")
    arguments = parser.parse_args()
    if arguments.out is not None:  # before the minutes that it is for
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
    logging.disable(logging.ERROR)
    library().logging.set_verbosity_error()
    started = time.perf_counter()
    models = arguments.models or targets()
    jobs = [Job(model, case) for case in arguments.cases if case != FLAGS for model in models]
    if FLAGS in arguments.cases:
        jobs += flag_jobs(models, arguments)
    rows = sweep(jobs, arguments)
    seconds = time.perf_counter() - started
    taken = [row.seconds for row in rows if row.status != "no plan"] or [0.0]
    print(Counter(row.status for row in rows), f"{seconds:.0f} s, median {statistics.median(taken):.2f} s a program")
    if arguments.out is not None:
        write_reports(arguments.out, rows, seconds, keep=arguments.keep)
    return int(any(row.status == "wrong" and not row.confirmed.startswith("yes") for row in rows) and arguments.confirm)


if __name__ == "__main__":
    sys.exit(main())
