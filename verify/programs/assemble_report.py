"""The report of `verify-plan`, from the outcomes of the checks."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from op_registry.source_location import SourceLocation

from verify.child_processes import LASTING
from verify.programs.checks.input_and_outcome import LOCALISED, CheckOutcome
from verify.programs.eager_reference import Trajectory
from verify.programs.prepare_verification import Prepared
from verify.programs.proof import Proof
from verify.programs.request import WORDS, PlanRequest, make_token
from verify.programs.training.compare_delayed_sgd import semantics_of
from verify.programs.typing.program_files.check_manifest_and_stored_tensors import NAME as STATE_CHECK
from verify.programs.typing.program_files.compare_operator_files import NAME as OPERATORS_CHECK
from verify.results.finding import Finding
from verify.results.report import Check, Report, environment
from verify.results.request_tokens import reproduce_line
from verify.results.typed_attachments import Attachments
from verify.results.verdict import Verdict

NOT_THE_MODEL = (
    "a stream is not the model's training step by step: it was compared with {}, W(t+1) = W(t) - lr * grad "
    "f(w_0(t-p+1), ..., w_{{p-1}}(t)) for p stages (docs/asynchronous-pipeline.md)"
)


def make_report(
    request: PlanRequest,
    prepared: Prepared,
    reference: Trajectory | None,
    outcomes: Sequence[CheckOutcome],
    proof: Proof | None,
    seconds: float,
) -> Report:
    """Make the report: checks in order, findings worst first. `reference`: None where nothing was run."""
    program = prepared.program
    if not any(outcome.check.count for outcome in outcomes) and not any(o.findings for o in outcomes):
        nothing = Finding("nothing_checked", "there was nothing to compare")
        outcomes = [*outcomes, CheckOutcome(Check("", Verdict.INCONCLUSIVE, 0), (nothing,))]
    read = {STATE_CHECK, OPERATORS_CHECK, *(() if proof is None else (o.check.name for o in proof.outcomes))}
    findings = _ordered(outcomes, frozenset(read))
    command = prepared.context.command
    again = None if command is None or not findings else reproduce_line(WORDS.encode(make_token(request)), command)
    told = semantics_of(program)
    report = Report(
        "verify-plan",
        prepared.name,
        _setting(request, program.summary, reference is not None),
        request.seed,
        tuple(outcome.check for outcome in outcomes if outcome.check.name),
        tuple(f.with_reproduce(again) for f in findings),
        (
            *((NOT_THE_MODEL.format(told),) if told else ()),
            *_notes(prepared, reference, request, proof is not None),
            *(() if proof is None else proof.notes),
        ),
        {**environment(), **_settings(request, reference), "plan": json.dumps(program.axes)},
        seconds,
        _attachments(prepared, outcomes, proof),
    )
    if not told:
        return report
    return replace(report, setting=f"{report.setting}, {'equals' if report.verdict.passes else 'compared with'} {told}")


def _attachments(prepared: Prepared, outcomes: Sequence[CheckOutcome], proof: Proof | None) -> Attachments:
    """Collect the attachments of a report: compared tensors, lemmas, and the manifest's records of a step."""
    manifest = prepared.program.manifest
    return Attachments(
        timeline=manifest.timeline,
        communication_profile=manifest.communication_profile,
        memory=manifest.memory or None,
        tensors=tuple(row for outcome in outcomes for row in outcome.rows) or None,
        lemmas=None if proof is None else proof.lemma_rows,
        certificate=None if proof is None else proof.certificate,
    )


def _settings(request: PlanRequest, reference: Trajectory | None) -> dict[str, str]:
    """Return the settings of the run; empty where the program was not run."""
    if reference is None:
        return {}
    return {
        "backend": request.runs_on,
        "dtype": request.dtype,
        **({"compiled": "torch.compile"} if request.compile else {}),
        "steps": str(request.steps),
        "learning_rate": f"{reference.learning_rate:g}",
        "max_norm": "none" if reference.settings.max_norm is None else f"{reference.settings.max_norm:g}",
    }


def _setting(request: PlanRequest, summary: str, ran: bool) -> str:
    """`on 4 ranks (dp=2 tp=2), in float64`; what is proved of a text holds of no dtype in particular."""
    where = f"on {request.ranks} rank{'s' * (request.ranks != 1)}" + (f" ({summary})" if summary else "")
    return f"{where}, in {request.dtype}{', compiled' if request.compile else ''}" if ran else where


def _precision(prepared: Prepared, request: PlanRequest, proved: bool) -> str | None:
    """Return a note on a program whose own dtypes are others than those of the run."""
    graph = prepared.graph
    casting = [op for op in graph.operations if op.region.autocast not in (None, "off")]
    if casting:
        kinds = " and ".join(sorted({str(op.region.autocast) for op in casting}))
        place = next((f", first at {op.where}" for op in casting if op.where is not None), "")
        what = f"the program computes {len(casting)} operations under autocast to {kinds}{place}"
        told = "was compared in its text" if proved else "was not compared"
        run = f"A run in {request.dtype} has one dtype and shows nothing of that"
        return f"{what}. {run}; that the model does the same {told}"
    narrow = sorted({t.dtype for t in graph.with_role("parameter")} & {"bfloat16", "float16"})
    if narrow and request.exact:
        options = " and ".join(f"`--dtype {dtype}`" for dtype in narrow)
        return f"the program's own dtype is {' and '.join(narrow)}: {options} runs it in that"
    return None


def _notes(prepared: Prepared, reference: Trajectory | None, request: PlanRequest, proved: bool) -> tuple[str, ...]:
    precision = None if reference is None else _precision(prepared, request, proved)
    notes = [*prepared.notes, *(() if precision is None else (precision,)), *prepared.program.changes]
    draws = [] if reference is None else [draw for draw in reference.settings.draws or () if draw is not None]
    if reference is None:
        notes.append("nothing was run")
    elif draws:
        notes.append(f"both sides drew the same random numbers, by place in the whole tensor: {_count(len(draws))}")
    elif prepared.unmatched is None and any(
        op.operator.startswith("nnscaler.random_") for op in prepared.graph.operations
    ):
        notes.append("random numbers were the same on both sides: a function of their place in the tensor")
    if prepared.program.manifest.unannotated:
        names = ", ".join(prepared.program.manifest.unannotated)
        cure = "`nnscaler list ops --missing MODEL` writes annotations to paste"
        notes.append(f"without annotation, so run whole on every rank: {names}. {cure}")
    return tuple(dict.fromkeys(notes))


def _count(draws: int) -> str:
    return f"{draws} random operation{'s' * (draws != 1)} (dropout included)"


def _ordered(outcomes: Sequence[CheckOutcome], proofs: frozenset[str]) -> list[Finding]:
    """Sort the findings by how much they explain, and drop repetitions.

    First those of the text, which name the mechanism; then lines that compute something wrong; then differences by
    step, since later ones follow from earlier ones. A finding that a wrong line already gave is not repeated.
    """
    ranked: list[tuple[int, int, Finding]] = []
    for outcome in outcomes:
        kind = 0 if outcome.check.name in proofs else 1 if outcome.check.name == LOCALISED else 2
        ranked += [(kind, int(f.counter_example.get("step", "0")) if kind == 2 else 0, f) for f in outcome.findings]
    ranked.sort(key=lambda entry: entry[:2])
    said = {(f.code, _subject(f)) for kind, _, f in ranked if kind == 1}
    return [f for kind, _, f in ranked if kind < 2 or (f.code, _subject(f)) not in said]


def _subject(finding: Finding) -> str:
    """Return the first name in the message."""
    parts = finding.message.split("`")
    return parts[1] if len(parts) > 1 else finding.message


def keep_program(report: Report, program: Path, request: PlanRequest) -> Report:
    """Move the program out of the temporary folder, for findings name its lines.

    Where there is no room for it, a note says so: the verdict stands.
    """
    if request.program is not None or not report.findings:
        return report
    try:
        kept = _copied(program)
    except OSError as error:
        return replace(report, notes=(*report.notes, f"the program could not be kept: {error.strerror or error}"))

    def moved(finding: Finding) -> Finding:
        related = tuple((what, _moved(place, program, kept)) for what, place in finding.related)
        return replace(finding, related=related)

    findings = tuple(moved(f) for f in report.findings)
    return replace(report, findings=findings, notes=(*report.notes, f"the program is kept in {kept}"))


def _copied(program: Path) -> Path:
    """Return a copy of the folder; nothing is left of one that fails. Raises OSError."""
    kept = Path(tempfile.mkdtemp(prefix="nnscaler-program-", dir=os.environ.get(LASTING)))
    try:
        for file in filter(Path.is_file, program.iterdir()):
            shutil.copyfile(file, kept / file.name)
    except BaseException:
        shutil.rmtree(kept, ignore_errors=True)
        raise
    return kept


def _moved(place: SourceLocation, old: Path, new: Path) -> SourceLocation:
    return replace(place, file=place.file.replace(str(old), str(new)))
