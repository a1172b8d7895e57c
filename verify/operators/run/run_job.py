"""One job: verified in this process, and what becomes of it in a child."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, replace
from pathlib import Path

from nnscaler.errors import NnscalerError
from nnscaler.is_user_file import is_users
from nnscaler.model_file import shown_path
from verify.child_processes import Died, Note, TimedOut
from verify.evidence.inputs.optimizer_as_operator import remarks
from verify.evidence.split_case import SplitCase
from verify.evidence.verify_op_options import OpOptions
from verify.operators.report_on_operator import verify_spec
from verify.operators.run.job import Job
from verify.operators.run.reproduce_token import Token, encode
from verify.operators.suggest.infer_widest_annotation import suggest_annotation
from verify.operators.suggest.refute_contradictory_annotation import contradiction
from verify.results.finding import Finding
from verify.results.report import Check, Report, environment
from verify.results.verdict import Verdict

SHARDS = "shards"  # a note that starts with this: the whole operator had run, and its shards were running


@dataclass(frozen=True)
class Reproduce:
    """Makes the line that replays a finding. `modules`: what must be imported for the job's address to be known."""

    job: Job
    seed: int
    modules: tuple[str, ...] = ()

    def __call__(self, code: str, case: SplitCase | None) -> str | None:
        """None where no text names the operator."""
        if not self.job.repeatable or self.job.address is None:
            return None
        # a name says nothing of the module that registers it; a file and a module do
        modules = () if ":" in self.job.address or self.job.spec.target is None else self.modules
        if self.job.error is not None:  # an annotation outside the language has no case
            case = None
        here = environment()
        token = Token(
            self.job.address,
            self.job.given,
            self.job.samples,
            code,
            self.seed,
            case,
            modules,
            here["nnscaler"],
            here["torch"],
        )
        return f"nnscaler reproduce {encode(token)}"


def verify_job(job: Job, options: OpOptions, reproduce: Reproduce, note: Note) -> Report:
    """Verify in this process. Raises NnscalerError for an operator that cannot be run at all."""
    if job.spec.annotation == "" and job.error is None:
        return _suggested(job, options)
    if job.error is None:
        verified = verify_spec(job.spec, options, reproduce, note)
        return replace(verified, notes=(*verified.notes, *remarks(job.spec)))
    started = time.perf_counter()
    note(f"the whole operator under `{job.annotation}`")
    report = contradiction(job.spec, job.annotation, job.error, options)
    if report is None:
        raise job.error
    findings = tuple(f.with_reproduce(reproduce(f.code, None)) for f in report.findings)
    return replace(report, findings=findings, seconds=time.perf_counter() - started)


def _suggested(job: Job, options: OpOptions) -> Report:
    """The report on the widest annotation that was found for an operator without one."""
    started = time.perf_counter()
    found = suggest_annotation(job.spec, options)
    if found:
        report = found[0].report
        note = f'`{job.spec.name}` has no annotation; this one holds (tested): "{found[0].text}"'
        return replace(report, notes=(note, *report.notes), seconds=time.perf_counter() - started)
    text = f"no annotation of `{job.spec.name}` was found under which anything could be split"
    check = Check("suggestion", Verdict.INCONCLUSIVE, 0, detail=text)
    finding = Finding("nothing_checked", text, job.spec.where)
    return _bare(job, options, check, finding, time.perf_counter() - started)


def lost(job: Job, event: Died | TimedOut, options: OpOptions, reproduce: Reproduce) -> Report:
    """Return the report on an operator whose process did not give one."""
    running = event.note or "the operator before its first run"
    facts = {"running": running}
    at = _innermost(event.trace)
    if at is not None:
        facts["at"] = at
    refuted = False
    if isinstance(event, Died):
        code, what = "operator_died", f"the process that ran `{job.spec.name}` was ended: {event.how}"
        refuted = event.note.startswith(SHARDS)
        help = "sample_inputs=... gives inputs on which it runs; where it checks their sizes, it raises instead"
        if refuted:
            help = "the whole operator runs on these inputs, and a shard does not: freeze what it needs whole"
        facts["ended"] = event.how
    else:
        code, what = "operator_timed_out", f"`{job.spec.name}` was {event.how}"
        help = "--timeout S gives it longer; sample_inputs=... gives it smaller inputs"
    verdict = Verdict.REFUTED if refuted else Verdict.INCONCLUSIVE
    check = Check("runs to its end", verdict, int(refuted), int(refuted), detail=what)
    finding = Finding(code, what, job.spec.where, facts, help=help, reproduce=reproduce(code, None))
    return _bare(job, options, check, finding, event.seconds)


def _innermost(trace: str) -> str | None:
    """Return the place in the user's code where a process ended, from a trace that starts with the innermost frame."""
    for file, line in re.findall(r'File "([^"]+)", line (\d+)', trace):
        if is_users(file):
            return f"{shown_path(Path(file).resolve())}:{line}"
    return None


def not_run(job: Job, error: NnscalerError, options: OpOptions, seconds: float) -> Report:
    """Return the report on an operator that could not be run, among others that could."""
    message, _, rest = error.message.partition("\n")
    check = Check("can be run", Verdict.INCONCLUSIVE, 0, detail=message)
    text = f"`{job.spec.name}` was not verified: {message}"
    finding = Finding(
        "nothing_checked", text, error.where or job.spec.where, cause=rest.strip() or None, help=error.help
    )
    return _bare(job, options, check, finding, seconds)


def _bare(job: Job, options: OpOptions, check: Check, finding: Finding, seconds: float) -> Report:
    text = job.given or job.spec.annotation
    setting = f"`{text}`" if isinstance(text, str) and text else ""
    found = {**environment(), "dtype": "float64"}
    return Report("verify-op", job.spec.name, setting, options.seed, (check,), (finding,), (), found, seconds)
