"""Verify one program on the levels that are asked for: run it, on one executor or on both, and prove it."""

from __future__ import annotations

import logging
from dataclasses import replace

from nnscaler.exception_in_one_line import in_one_line
from verify.child_processes import Died, Done, Note, Raised, run_tasks
from verify.external.comparison.compare import LATE
from verify.external.differential_run import ExternalSettings
from verify.external.program import ExternalProgram
from verify.external.proof.prove import ExternalProof, prove_external
from verify.external.ranks.attention_and_float64_of_torch import register_attention
from verify.external.request import ExternalRequest
from verify.external.verify import TOOL, Progress, verify_and_name
from verify.results.finding import Finding
from verify.results.report import Check, Report, environment
from verify.results.verdict import Verdict

PROOF = "proof"


def verify_levels(program: ExternalProgram, request: ExternalRequest, progress: Progress) -> Report:
    """Verify a program as the request says. Raises NnscalerError for what cannot be run at all."""
    register_attention()
    if request.level == "static":
        return _static(program, request, progress)
    executors = ("simulator", "gloo") if request.executor == "both" else (request.executor,)
    reports: list[Report] = []
    names: dict[str, str] = {}
    for executor in executors:
        how = ExternalSettings(executor, request.seed, request.steps, request.timeout, checkpoint=request.checkpoint)
        report, moved = verify_and_name(program, how, dtypes=request.dtypes, progress=progress)
        reports.append(report)
        names |= moved
    report = reports[0] if len(reports) == 1 else _of_both(*reports)
    if request.level == "run" or not report.verdict.passes:
        return report
    if any(check.name.startswith(LATE) for check in report.checks):
        why = "not proved: the optimizer's step adds gradients up, and a proof is about forward and backward"
        return replace(report, notes=(*report.notes, why))
    progress(f"{program.name}: proof")
    named = replace(program, names={**names, **program.names})  # a trace has no values to find whose a tensor is
    return _beside(report, _prove(named, request.timeout))


def _of_both(threads: Report, processes: Report) -> Report:
    """Return one report of a program's runs on the simulator and over gloo; what only one of them finds says so."""
    told = {(finding.code, finding.message) for finding in threads.findings}
    more = [finding for finding in processes.findings if (finding.code, finding.message) not in told]
    notes = list(dict.fromkeys((*threads.notes, *processes.notes)))
    words = threads.verdict.word, processes.verdict.word
    if words[0] != words[1]:
        notes.insert(0, f"threads say {words[0]} and processes say {words[1]}: the program depends on where it runs")
    return replace(
        threads,
        setting=f"{threads.setting}, on threads and on processes",
        checks=tuple(
            replace(check, name=f"{check.name}, {executor}")
            for executor, report in (("simulator", threads), ("gloo", processes))
            for check in report.checks
        ),
        findings=(*threads.findings, *more),
        notes=tuple(notes),
        environment={**threads.environment, "executor": "simulator, gloo"},
        seconds=threads.seconds + processes.seconds,
    )


# The proof. It traces the user's code on fake tensors under a fake process group, so it has a process of its own.


def _prove(program: ExternalProgram, timeout: float) -> ExternalProof:
    def task(_note: Note) -> ExternalProof:
        logging.getLogger("torch").setLevel(logging.CRITICAL)  # what cannot be traced is told once, in the reason
        return prove_external(program)

    (event,) = run_tasks([task], 1, timeout)
    if isinstance(event, Done):
        return event.result
    if isinstance(event, Raised):
        reason = f"the trace raises {in_one_line(event.error, 200)}"
    else:
        reason = f"the process of the proof was {event.how}" if isinstance(event, Died) else "the time was up"
    return ExternalProof(Verdict.INCONCLUSIVE, (Finding("program_unreadable", reason, program.where),), reason)


def _static(program: ExternalProgram, request: ExternalRequest, progress: Progress) -> Report:
    progress(f"{program.name}: proof")
    proof = _prove(program, request.timeout)
    axes = " ".join(f"{axis}={size}" for axis, size in program.mesh)
    setting = f"on {program.ranks} ranks ({axes}), proof alone"
    seconds = sum(proof.seconds.values())
    findings = tuple(replace(f, where=f.where or program.where) for f in proof.findings)
    return Report(
        TOOL, program.name, setting, request.seed, (_check(proof),), findings, _notes(proof), environment(), seconds
    )


def _beside(report: Report, proof: ExternalProof) -> Report:
    """Add a proof to a run that found nothing: it strengthens the report, and is no claim where it did not succeed.

    A proof that refutes what ran without a difference has no counter-example: then nothing is decided.
    """
    seconds = report.seconds + sum(proof.seconds.values())
    if proof.verdict.passes:
        notes = (*report.notes, *_notes(proof))
        return replace(report, checks=(*report.checks, _check(proof)), notes=notes, seconds=seconds)
    if proof.verdict is not Verdict.REFUTED:
        return replace(report, notes=(*report.notes, f"not proved: {proof.reason}"), seconds=seconds)
    check = replace(_check(proof).undecided(), detail="it contradicts the run")
    found = tuple(replace(finding, help=finding.help or _CONTRADICTION) for finding in proof.findings)
    return replace(report, checks=(*report.checks, check), findings=(*report.findings, *found), seconds=seconds)


_CONTRADICTION = (
    "the run shows no difference: another --seed, or the line that is named, decides which of them is right"
)


def _check(proof: ExternalProof) -> Check:
    refuted = len(proof.findings) if proof.verdict is Verdict.REFUTED else 0
    ends = f"losses, gradients and buffers, from {proof.calls} calls with {proof.collectives} collectives"
    detail = ends if proof.compared else (proof.reason or "")
    return Check(PROOF, proof.verdict, max(proof.compared, refuted), refuted, sum(proof.seconds.values()), detail)


def _notes(proof: ExternalProof) -> tuple[str, ...]:
    if not proof.verdict.passes:
        return ()
    ranks = ", ".join(map(str, proof.ranks))
    where = f" where {' and '.join(proof.conditions)}" if proof.conditions else ""
    return (f"proved from the traces of ranks {ranks}{where}; docs/verify-external.md says what a proof assumes",)
