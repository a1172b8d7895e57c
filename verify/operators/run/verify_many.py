"""Verify many operators: cached passes first, the others in child processes, results as they come, and a summary."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from nnscaler.errors import NnscalerError, few
from verify.child_processes import Died, Done, Event, Note, Raised, Task, TimedOut, run_forked, run_here, why_not_fork
from verify.evidence.inputs.find_operator import find_record
from verify.evidence.prove_tested_claims import SPENT
from verify.evidence.verify_op_options import OpOptions
from verify.operators.run.cache import CACHED, Cache, key_of
from verify.operators.run.file_and_process_reads import outside_reads
from verify.operators.run.fingerprint import Opaque
from verify.operators.run.job import Job, make_job
from verify.operators.run.run_job import Reproduce, lost, not_run, verify_job
from verify.results.report import Report
from verify.results.styled_line import StyledLine, plain
from verify.results.verdict import Verdict

Verify = Callable[[Job, OpOptions, Reproduce, Note], Report]


@dataclass(frozen=True)
class JobResult:
    """The result of one job.

    index    the job's place in the list
    cached   the report is one from an earlier run
    remark   why the report cannot be cached; empty if it can
    """

    index: int
    job: Job
    report: Report
    cached: bool = False
    remark: str = ""


@dataclass(frozen=True)
class _Ran:
    """A report, and the first thing that the operator's code read while it ran, which no key has; empty for nothing."""

    report: Report
    read: str = ""


class InternalError(Exception):
    """Our own code raised in a child; the text is its traceback."""


@dataclass(frozen=True)
class PoolSettings:
    """
    workers    child processes; None: one for each processor
    isolate    whether to use child processes at all
    cache      where passes are kept; None: nowhere
    modules    what must be imported for addresses to be known in another process
    verify     what a child does with a job
    """

    workers: int | None = None
    isolate: bool = True
    cache: Cache | None = None
    modules: tuple[str, ...] = ()
    verify: Verify = verify_job


def run_many(
    jobs: Sequence[Job], options: OpOptions, settings: PoolSettings | None = None, started: Note | None = None
) -> Generator[JobResult, None, None]:
    """Yield every job's result, in the order in which they come. Closing the iterator ends what still runs.

    One job that cannot be run raises its NnscalerError; among several it is a report that is INCONCLUSIVE. With
    `options.fail_fast` nothing follows the first report that does not pass. `started` is told what runs. Raises
    InternalError after all results where our own code has failed.
    """
    settings = settings or PoolSettings()
    keys, remarks = _keys(jobs, options, settings)
    open_jobs: list[int] = []
    for index, job in enumerate(jobs):
        report = settings.cache.load(keys[index]) if settings.cache is not None and index in keys else None
        if report is None:
            open_jobs.append(index)
        else:
            yield JobResult(index, job, report, cached=True)
    broken: list[str] = []
    events = _events([jobs[i] for i in open_jobs], options, settings, started)
    try:
        for event in events:
            index = open_jobs[event.index]
            job = jobs[index]
            report = _report(job, event, options, settings, len(jobs) == 1)
            if report is None:
                assert isinstance(event, Raised)
                broken.append(f"{job.spec.name}: {event.text or event.error}")
                continue
            if isinstance(event, Done) and event.result.read and index in keys:
                remarks[index] = f"not cached: {event.result.read} while it ran"
            elif settings.cache is not None and index in keys and not _cut_short(report):
                settings.cache.store(keys[index], report)
            yield JobResult(index, job, report, remark=remarks.get(index, ""))
            if options.fail_fast and not report.verdict.passes:
                break
    finally:
        events.close()
    if settings.cache is not None:
        settings.cache.prune()
    if broken:
        raise InternalError("\n".join(broken))


def _cut_short(report: Report) -> bool:
    """Return whether a proof was cut short by the time limit: another run may have more time."""
    return any(SPENT in check.detail for check in report.checks)


def run_one(job: Job, options: OpOptions, isolate: bool = True) -> Report:
    """Return the report on one operator, from a child process unless `isolate` is off. Raises as `run_many`."""
    (result,) = run_many([job], options, PoolSettings(workers=1, isolate=isolate))
    return result.report


def worst(reports: Sequence[Report]) -> int:
    """Return the exit code of several reports: 1 if one is refuted, else 3 if one is undecided, else 0."""
    codes = {report.exit_code for report in reports} or {3}
    return next(code for code in (1, 3, 0) if code in codes)


def _keys(jobs: Sequence[Job], options: OpOptions, settings: PoolSettings) -> tuple[dict[int, str], dict[int, str]]:
    """Return the digests of the jobs by index, and for those without one, why."""
    keys: dict[int, str] = {}
    remarks: dict[int, str] = {}
    if settings.cache is None:
        return keys, remarks
    for index, job in enumerate(jobs):
        if job.error is not None:
            continue
        try:
            keys[index] = key_of(job, options, settings.verify.__name__)
        except Opaque as opaque:
            remarks[index] = f"not cached: {opaque} cannot be looked into"
    return keys, remarks


def _events(
    jobs: Sequence[Job], options: OpOptions, settings: PoolSettings, started: Note | None
) -> Generator[Event[_Ran], None, None]:
    def task(job: Job) -> Task[_Ran]:
        reproduce = Reproduce(job, options.seed, settings.modules)
        return lambda note: _run_watched(lambda: settings.verify(job, options, reproduce, note))

    tasks = [task(job) for job in jobs]
    reason = why_not_fork() if settings.isolate else ""
    if reason is None:
        _preload(jobs)
        workers = max(1, min(settings.workers or os.cpu_count() or 1, len(jobs)))
        yield from run_forked(
            tasks, workers, options.timeout, None if started is None else lambda i: started(jobs[int(i)].spec.name)
        )
        return
    for event in run_here(tasks):
        if isinstance(event, Done) and reason:
            note = f"ran in this process, unprotected from crashes and hangs: {reason}"
            report = replace(event.result.report, notes=(*event.result.report.notes, note))
            event = replace(event, result=replace(event.result, report=report))
        yield event


def _run_watched(verify: Callable[[], Report]) -> _Ran:
    with outside_reads() as read:
        report = verify()
    return _Ran(report, read[0] if read else "")


def _preload(jobs: Sequence[Job]) -> None:
    """Import what torch would import in every child by itself: seconds each time."""
    if jobs:
        importlib.import_module("torch.fx.experimental.symbolic_shapes")
    if any(isinstance(getattr(job.spec.target, "__self__", None), type) for job in jobs):  # autograd.Function
        importlib.import_module("torch._dynamo")


def _report(job: Job, event: Event[_Ran], options: OpOptions, settings: PoolSettings, alone: bool) -> Report | None:
    """None where our own code has failed."""
    reproduce = Reproduce(job, options.seed, settings.modules)
    if isinstance(event, Done):
        return event.result.report
    if isinstance(event, Died | TimedOut):
        return lost(job, event, options, reproduce)
    if isinstance(event.error, NnscalerError):
        if alone:
            raise event.error
        return not_run(job, event.error, options, event.seconds)
    if alone:
        raise InternalError(event.text or str(event.error)) from event.error
    return None


# Summarise many reports: what keeps operators from being proved, what could not be shown, what was cached.

BLOCKED = "not proved for all sizes: "  # in a check's detail, followed by what blocks its proof
VOID = "constant along the split: "  # in a check's detail: wrong variants that cannot differ from the right result
OTHERS = 5  # names in one row of the table


def summary(reports: Sequence[Report]) -> list[StyledLine]:
    """Return the tables, one below the other; nothing for what there is none of."""
    return [*_table("not proved for all sizes, and why", _blocked(reports)), *_void(reports), *_cached(reports)]


def _blocked(reports: Sequence[Report]) -> dict[str, list[str]]:
    """Map each reason that blocks a proof to the operators that pass without one because of it."""
    found: dict[str, list[str]] = {}
    for report in reports:
        if not report.verdict.passes or report.verdict is Verdict.PROVED_ALL_SIZES:
            continue
        reasons = [reason for check in report.checks if (reason := _after(BLOCKED, check.detail))]
        for reason in dict.fromkeys(reasons):
            found.setdefault(reason, []).append(report.subject)
    return dict(sorted(found.items(), key=lambda item: (-len(item[1]), item[0])))


def _void(reports: Sequence[Report]) -> list[StyledLine]:
    rows: dict[str, list[str]] = {}
    for report in reports:
        for check in report.checks:
            variants = _after(VOID, check.detail)
            if variants:
                rows.setdefault(f"{report.subject} {check.name}", []).append(variants)
    return _table("void: wrong variants that equal the right result, which is constant along the split", rows)


def _cached(reports: Sequence[Report]) -> list[StyledLine]:
    count = sum(CACHED in report.notes for report in reports)
    if not count:
        return []
    return [plain(f"cached: {count} of {len(reports)} passed before and have not changed (--no-cache runs them)")]


def _table(title: str, rows: dict[str, list[str]]) -> list[StyledLine]:
    if not rows:
        return []
    width = min(max(map(len, rows)), 60)
    lines = [plain(f"{title}:", "strong")]
    for key, names in rows.items():
        lines.append(plain(f"  {key:<{width}}  {few(names, OTHERS)}"))
    return [*lines, plain("")]


def _after(label: str, detail: str) -> str:
    """Return the text after a label in a detail, up to the next `;`."""
    _, found, rest = detail.partition(label)
    return rest.partition(";")[0].strip() if found else ""


# `verify_op`: is an operator's annotation true?
# Every identifier is split, every shard runs as the compiler would run it, and outputs and input gradients (under
# random cotangents) are compared with the whole operator's. What passes is proved where it can be. The whole and
# its shards run the same backward: where that is written by hand, finite differences are a second oracle.


def verify_op(
    operator: Any, *, annotation: str | Callable[..., Any] | None = None, seed: int = 0, isolate: bool = True
) -> Report:
    """Compare the shards of `operator` with the whole, in a child process unless `isolate` is off.

    `operator`: a registered operator, its name, `file.py::function`, `package.module:function`, or any callable with
    `annotation`. Raises NnscalerError for what cannot be run at all: an unknown name, no annotation, an annotation
    that is not in the language, a call that needs sample inputs.
    """
    return run_one(make_job(find_record(operator), annotation), OpOptions(seed=seed), isolate)
