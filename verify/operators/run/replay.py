"""Replay a token: exactly its case, or, for a finding about the operator itself, its verification."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from nnscaler.atomic_writes import write_text
from nnscaler.errors import NnscalerError
from verify.child_processes import Done, Note, Raised, run_tasks
from verify.evidence.inputs.find_operator import matching
from verify.evidence.inputs.import_user_code import import_module
from verify.evidence.oracle.case_runner import CaseResult, OperatorRunner, WholeRaised
from verify.evidence.verify_op_options import OpOptions
from verify.operators.report_on_operator import refutation
from verify.operators.run.emitted_test import EmittedFinding, write_tests
from verify.operators.run.job import Job, make_job
from verify.operators.run.reproduce_token import PREFIX, Token, decode, encode
from verify.operators.run.run_job import Reproduce, verify_job
from verify.operators.run.tensors_as_python_text import NotWritable
from verify.operators.run.verify_many import PoolSettings, run_many
from verify.results.finding import Finding
from verify.results.report import Check, Report, environment
from verify.results.verdict import Verdict


def find_job(token: Token) -> Job:
    """Return the token's operator. Raises NnscalerError where it is not there any more."""
    for module in token.modules:
        import_module(module)
    found = matching(token.address)
    exact = [spec for spec in found if spec.name == token.address] or found
    if len(exact) != 1:
        raise NnscalerError("bad_token", f"{token.address!r} names {len(exact)} operators now")
    return make_job(exact[0], token.annotation, token.samples)


def replay(token: Token, timeout: float) -> Report:
    """Return a report with one check: REFUTED if the finding is found again, TESTED if it is not.

    Raises NnscalerError where the operator is gone, or its annotation has no such case any more.
    """
    options = OpOptions(seed=token.seed, timeout=timeout)

    def verify(job: Job, options: OpOptions, reproduce: Reproduce, note: Note) -> Report:
        if token.case is None or job.error is not None:
            return _again(token, verify_job(job, options, reproduce, note))
        return _case(token, job, options, note)

    (result,) = run_many([find_job(token)], options, PoolSettings(workers=1, modules=token.modules, verify=verify))
    return result.report


def _case(token: Token, job: Job, options: OpOptions, note: Note) -> Report:
    assert token.case is not None
    started = time.perf_counter()
    try:
        result = OperatorRunner(job.spec, options, note).run(token.case)
    except WholeRaised as raised:
        raise _gone(f"the whole operator does not run on its inputs any more: {raised}") from None
    except KeyError as error:
        raise _gone(f"the annotation has no identifier {error} any more") from None
    if result.refused:
        raise _gone(f"its split is not legal any more: {result.refused}")
    line = f"nnscaler reproduce {encode(token)}"
    findings = (replace(refutation(job.spec, result, options), reproduce=line),) if result.failed else ()
    return _report(token, job, findings, _count(result), time.perf_counter() - started, result)


def _gone(reason: str) -> NnscalerError:
    help = "the operator or its annotation has changed: verify it again with nnscaler verify-op"
    return NnscalerError("case_is_gone", f"the token's case cannot be replayed: {reason}", help=help)


def _count(result: CaseResult) -> int:
    return max(1, result.compared.count) if result.compared is not None else 1


def _again(token: Token, report: Report) -> Report:
    """Return the report reduced to the token's finding."""
    same = tuple(f for f in report.findings if f.code == token.code)
    verdict = Verdict.REFUTED if same and report.verdict is Verdict.REFUTED else report.verdict
    if not same and report.verdict.passes:
        verdict = Verdict.TESTED_EXACT
    count = max(1, report.total)
    check = Check(f"{token.code} again", verdict, count, int(verdict is Verdict.REFUTED), report.seconds)
    return replace(report, checks=(check,), findings=same or report.findings)


def _report(
    token: Token, job: Job, findings: tuple[Finding, ...], count: int, seconds: float, result: CaseResult
) -> Report:
    verdict = Verdict.REFUTED if findings else Verdict.TESTED_EXACT
    bound = result.signature.bound
    here = environment()
    notes = (
        () if token.torch == here["torch"] else (f"found under torch {token.torch}, replayed under {here['torch']}",)
    )
    check = Check("the case of the token", verdict, count, len(findings), seconds)
    setting = "" if bound is None else f"`{bound.text}`"
    found = {**here, "dtype": result.case.inputs.dtype}
    return Report("verify-op", job.spec.name, setting, token.seed, (check,), findings, notes, found, seconds)


def token_of(finding: Finding) -> Token | None:
    """Return the token in the line that replays a finding; None where there is none."""
    word = (finding.reproduce or "").rpartition(" ")[2]
    return decode(word) if word.startswith(PREFIX) else None


def emit_tests(reports: Sequence[tuple[Job, Report]], file: Path, options: OpOptions) -> tuple[int, list[str]]:
    """Write a test for every finding: one file for one operator, `<file>_<operator>` beside it for several.

    Returns how many files were written, and why findings have no test. Each text is made in a child process: that runs
    the operator. Raises NnscalerError where a file cannot be written.
    """
    problems: list[str] = []
    texts: list[tuple[str, str]] = []
    for job, report in reports:
        found = _wanted(job, report, problems)
        text = _made(found, file, options, problems) if found else None
        if text is not None:
            texts.append((job.spec.name, text))
    for name, text in texts:
        path = file if len(texts) == 1 else file.with_name(f"{file.stem}_{_word(name)}{file.suffix}")
        write_text(path, text)
    return len(texts), problems


def _word(name: str) -> str:
    return "".join(c if c.isalnum() else "_" for c in name)


def _wanted(job: Job, report: Report, problems: list[str]) -> list[EmittedFinding]:
    found: list[EmittedFinding] = []
    for finding in report.findings:
        token = token_of(finding)
        if token is None:
            problems.append(f"{finding.code} of `{job.spec.name}` has no test: no text names the operator")
        else:
            found.append(EmittedFinding(job.spec, finding, token))
    return found


def _made(wanted: list[EmittedFinding], path: Path, options: OpOptions, problems: list[str]) -> str | None:
    def task(note: Note) -> str:
        note("the operator, to write its test")
        try:
            return write_tests(wanted, path, options)
        except NotWritable as reason:
            raise NnscalerError("no_test", str(reason)) from None

    name = wanted[0].spec.name
    (event,) = run_tasks([task], 1, options.timeout)
    if isinstance(event, Done):
        return event.result
    why = str(event.error) if isinstance(event, Raised) else "its process was ended"
    problems.append(f"`{name}` has no test: {why}")
    return None
