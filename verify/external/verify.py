"""Verify a program of somebody else: run it on every rank, and compare it with the plain eager model."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from op_registry.call import dtype_name

from nnscaler.errors import NnscalerError, few
from nnscaler.exception_in_one_line import first_line
from nnscaler.runtime.kernel_threads import kernel_threads
from nnscaler.runtime.nested_values import map_tensors
from nnscaler.tracing.export.independent_module_copies import copied_with_hooks
from verify.external.averaged_copies_beside_model import COPY
from verify.external.check_every_way_to_save import check_saving
from verify.external.communication_and_memory_profile import communication_profile, memory, notes_of
from verify.external.comparison.comparison_records import ComparisonResult
from verify.external.comparison.findings_from_differences import findings
from verify.external.comparison.reference_in_parts_and_noise import rounded
from verify.external.differential_run import ExternalCase, ExternalSettings
from verify.external.observe_rank_run import RankRecord, note_on_hooks
from verify.external.parameter_mapping import StateMap, moved_names
from verify.external.program import Batch, ExternalProgram
from verify.external.ranks.attention_and_float64_of_torch import exact_throughout, register_attention
from verify.external.ranks.run_ranks_here_or_in_child import RankRun, RanksFailed
from verify.external.reference import RAISES, check_rows, copied, finish_backward, initial_model, run_reference
from verify.external.shards_made_anew import GUESSED
from verify.external.torchrun.cuda_on_cpu import WITHOUT_GPU, OnCpu, asks_for_gpu, cuda_is_the_cpu
from verify.results.finding import Finding
from verify.results.report import Check, Report, environment
from verify.results.typed_attachments import Attachments
from verify.results.verdict import Verdict, merge

Progress = Callable[[str], None]
TOOL = "verify-external"
_PLAIN = 1e-3  # a relative difference that the rounding of float32 cannot hide


@dataclass(frozen=True)
class Outcome:
    """The result of one dtype.

    ran      what the ranks recorded, and their calls; None where they failed
    """

    dtype: torch.dtype
    checks: tuple[Check, ...]
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]
    compared: tuple[ComparisonResult, ...] = ()
    ran: RankRun[RankRecord] | None = None


def verify_program(
    program: ExternalProgram,
    settings: ExternalSettings | None = None,
    *,
    dtypes: Sequence[str] = ("float64",),
    progress: Progress = lambda text: None,
) -> Report:
    """Verify a program in each of these dtypes. Raises NnscalerError for what cannot be run at all."""
    return verify_and_name(program, settings, dtypes=dtypes, progress=progress)[0]


@cuda_is_the_cpu()
def verify_and_name(
    program: ExternalProgram,
    settings: ExternalSettings | None = None,
    *,
    dtypes: Sequence[str] = ("float64",),
    progress: Progress = lambda text: None,
) -> tuple[Report, Mapping[str, str]]:
    """Verify a program, and return as well the model's names of what the program names otherwise, as the run found."""
    register_attention()
    exact_throughout()
    how = settings or ExternalSettings()
    started = time.perf_counter()
    model = initial_model(program, how.seed)
    torch.manual_seed(how.seed)
    batch = program.batch()
    check_rows(program, batch)

    def run(dtype: torch.dtype, known: Sequence[RankRecord] = ()) -> Outcome:
        with kernel_threads(model):
            return verify_in(program, how, model, batch, dtype, known)

    outcomes: list[Outcome] = []
    for name in dtypes:
        progress(f"{program.name} on {program.ranks} ranks in {name}")
        known = outcomes[0].ran.results if outcomes and outcomes[0].ran is not None else ()
        try:
            outcomes.append(run(getattr(torch, name), known))
        except NnscalerError as error:
            if (told := _of_float64(program, model, batch, error)) is not None:
                raise told from error
            raise
    dtypes, outcomes = _without_float64(run, list(dtypes), outcomes)
    dtypes, outcomes = _float64_alone(run, dtypes, outcomes)
    axes = " ".join(f"{axis}={size}" for axis, size in program.mesh)
    several = len(outcomes) > 1
    report = Report(
        tool=TOOL,
        subject=program.name,
        setting=f"on {program.ranks} ranks ({axes}), in {' and '.join(dtypes)}",
        seed=how.seed,
        checks=tuple(
            replace(check, name=f"{check.name}, {name}" if several else check.name)
            for name, outcome in zip(dtypes, outcomes, strict=True)
            for check in outcome.checks
        ),
        findings=_merged(dtypes, outcomes),
        notes=tuple(dict.fromkeys((*_narrow(dtypes), *(note for outcome in outcomes for note in outcome.notes)))),
        environment=environment() | {"executor": how.executor, "dtype": ", ".join(dtypes)},
        seconds=time.perf_counter() - started,
        attachments=_measured(program, how, outcomes),
    )
    pieces = [piece for record in (outcomes[0].ran.results if outcomes[0].ran else ()) for piece in record.pieces]
    return report, moved_names(pieces, StateMap.of(model))


def _of_float64(program: ExternalProgram, model: nn.Module, batch: Batch, error: NnscalerError) -> NnscalerError | None:
    """Return the error of a plain model that raises in float64 alone, as where it asserts a dtype, or in its second
    step, as where it keeps a part of the first; None of another."""
    if error.code != "model_raised" or not error.message.startswith(RAISES):
        return None
    own, step, what = copied_with_hooks(model), program.reference_step or program.step, error.message[len(RAISES) :]
    for number in range(2):
        try:
            with OnCpu():
                finish_backward(step(own, map_tensors(batch, torch.Tensor.clone)), list(own.parameters()))
        except Exception:  # noqa: BLE001 - whatever it raises, it raises as well
            message = f"the plain model makes a step on `batch()`, and raises in the next one{what}"
            return NnscalerError(error.code, message, error.where, _IN_SECOND) if number else None
        own.zero_grad()
    return NnscalerError(
        error.code, f"the plain model runs in its own dtypes, and raises in float64{what}", error.where, _IN_FLOAT64
    )


_IN_SECOND = (
    "what it keeps of a step for later ones, such as a cache of keys and values, belongs to the graph of that step: "
    "let it keep `tensor.detach()`, or make it anew in `step` of the check file"
)
_IN_FLOAT64 = (
    "whatever --dtype says, the program is compared with the plain model in float64: let this line compare a dtype "
    "with that of a parameter (`x.dtype == self.weight.dtype`), or leave it out in `model()` of the check file"
)


def _narrow(dtypes: Sequence[str]) -> tuple[str, ...]:
    """Tell what runs in narrow dtypes alone do not show."""
    if "float64" in dtypes:
        return ()
    return (
        f"what is smaller than the rounding of {' and '.join(dtypes)} does not show: --dtype float64 beside it does",
    )


def _measured(program: ExternalProgram, how: ExternalSettings, outcomes: Sequence[Outcome]) -> Attachments:
    """Return what the first run that ended shows of a step's communication and of memory."""
    ran = next((outcome.ran for outcome in outcomes if outcome.ran is not None), None)
    if ran is None:
        return Attachments()
    profile = communication_profile(program, ran.calls, how.steps - 1)
    return Attachments(communication_profile=profile, memory=memory(ran.results))


Run = Callable[..., Outcome]  # of a program in a dtype, like `verify_in`


def _without_float64(run: Run, dtypes: list[str], outcomes: list[Outcome]) -> tuple[list[str], list[Outcome]]:
    """Where the program raises in float64 alone, leave float64 out: its kernels or casts may not take it."""
    raised = [o for o in outcomes if o.dtype == torch.float64 and any(f.code == "rank_raises" for f in o.findings)]
    if not raised:
        return dtypes, outcomes
    others = [outcome for outcome in outcomes if outcome not in raised]
    if not others:
        others = [run(torch.float32)]
    if all(outcome.ran is None for outcome in others):
        return dtypes, outcomes
    first = first_line(raised[0].findings[0].message)
    names = [dtype_name(outcome.dtype) for outcome in others]
    note = f"in float64 the program raises ({first}); it was verified in {' and '.join(names)} alone"
    return names, [replace(others[0], notes=(note, *others[0].notes)), *others[1:]]


def _float64_alone(run: Run, dtypes: list[str], outcomes: list[Outcome]) -> tuple[list[str], list[Outcome]]:
    """Where float64 shows a difference that float32 could not miss, run float32: what agrees there is undecided.

    Nobody trains in float64, and libraries take another path in it: FSDP2's division of gradients is one.
    """
    wide = outcomes[0]
    wrong = [d for result in wide.compared for d in result.differences if d.verdict is Verdict.REFUTED]
    if wide.dtype != torch.float64 or not wrong or min(d.relative for d in wrong) < _PLAIN or wide.ran is None:
        return dtypes, outcomes
    others = [outcome for outcome in outcomes if outcome.dtype == torch.float32]
    narrow = others[0] if others else run(torch.float32, wide.ran.results)
    if not merge(check.verdict for check in narrow.checks).passes:
        return dtypes, outcomes
    found = [replace(f, code="float64_alone", message=f"{f.message}, and in float32 it is") for f in wide.findings]
    undecided = replace(wide, checks=tuple(check.undecided() for check in wide.checks), findings=tuple(found))
    if others:
        return dtypes, [undecided, *outcomes[1:]]
    return [*dtypes, "float32"], [undecided, *outcomes[1:], narrow]


def _merged(dtypes: Sequence[str], outcomes: Sequence[Outcome]) -> tuple[Finding, ...]:
    """Return one finding for what is found in several dtypes; each names its dtypes."""
    found: dict[tuple[str, str], tuple[Finding, list[str]]] = {}
    for name, outcome in zip(dtypes, outcomes, strict=True):
        for finding in outcome.findings:
            found.setdefault((finding.code, finding.message), (finding, []))[1].append(name)
    return tuple(
        replace(
            finding,
            message=f"{finding.message} ({' and '.join(dict.fromkeys(names))})",
            counter_example={**finding.counter_example, "dtype": " and ".join(dict.fromkeys(names))},
        )
        for finding, names in found.values()
    )


def verify_in(
    program: ExternalProgram,
    how: ExternalSettings,
    model: nn.Module,
    batch: Batch,
    dtype: torch.dtype,
    known: Sequence[RankRecord] = (),
) -> Outcome:
    """Verify a program in one dtype; `known`: records of the same ranks in float64."""
    mine = rounded(model, dtype)
    values = copied(copied(batch, dtype), torch.float64) if dtype != torch.float64 else batch
    truth = run_reference(program, mine, values, steps=how.steps, dtype=torch.float64)
    case = ExternalCase(program, how, mine, truth, replace(truth, dtype=dtype))
    notes: list[str] = []
    ran = case.tried(known)
    if isinstance(ran, RanksFailed) and ran.code == "rank_raises" and how.executor == "simulator":
        # what threads of one process cannot do, processes may: module-level groups, environment variables
        notes.append(f"on threads of one process it raises ({first_line(ran.message)}); it was run on processes")
        case = replace(case, how=replace(how, executor="gloo"))
        ran = case.tried(known)
    if isinstance(ran, RanksFailed):
        return failed(program, dtype, ran)
    narrow = narrowest(ran, dtype) if dtype != torch.float64 else dtype
    if narrow != dtype:
        notes.append(
            f"the program computes or communicates in {dtype_name(narrow)} when the model is in {dtype_name(dtype)}: "
            f"it is compared up to the rounding of {dtype_name(narrow)}"
        )
    run, compared = case.judge(ran.results, narrow)
    checks = tuple(result.check(case.level) for result in compared if result.name != "gradient norm" or result.count)
    found = findings(run, compared)
    right = all(check.verdict is not Verdict.REFUTED for check in checks)
    drawn = None if right else case.undecided(ran.results, checks, found)
    if drawn is not None:
        checks, found = drawn
    elif not right and not known:
        found = case.explained(run, compared, found)
    if right and dtype == torch.float64 and (copies := case.copies(ran.results)) is not None:
        checks, found = (*checks, copies[0]), (*found, *copies[1])
    if right and not known:
        for check, others, said in (case.with_labels(ran.results, narrow), case.with_clipping(ran.results, narrow)):
            checks, found, notes = (*checks, *([check] if check else [])), (*found, *others), [*notes, *said]
        if (alike := case.of_equal_parts()) is not None:
            checks, found = (*checks, alike[0]), (*found, alike[1])
    if how.checkpoint and not known:
        saving = check_saving(case)
        checks, found, notes = (*checks, *saving.checks), (*found, *saving.findings), [*notes, *saving.notes]
    return Outcome(dtype, checks, found, (*notes, *_notes(ran.results), *notes_of(program, ran)), compared, ran)


def narrowest(ran: RankRun[RankRecord], dtype: torch.dtype) -> torch.dtype:
    """Return the narrowest dtype of a module's output or of a call that the plain model has not; else `dtype`."""
    seen = {dtype for record in ran.results for dtype in record.dtypes}
    seen |= {call.dtype for calls in ran.calls for call in calls if call.dtype is not None}
    floating = [d for d in seen if d.is_floating_point and torch.finfo(d).eps > torch.finfo(dtype).eps]
    return max(floating, key=lambda d: torch.finfo(d).eps, default=dtype)


def failed(program: ExternalProgram, dtype: torch.dtype, failure: RanksFailed) -> Outcome:
    """Return the outcome of a run that did not end."""
    name = dtype_name(dtype)
    verdict = Verdict.INCONCLUSIVE if failure.code == "timed_out" else Verdict.REFUTED
    example = {"dtype": name} | ({} if failure.rank is None else {"rank": str(failure.rank)})
    example |= {f"rank {rank}": text for rank, text in failure.by_rank.items()}
    code, message, help = failure.code, failure.message, None
    if code == "rank_raises" and asks_for_gpu(message):
        verdict, code, help = Verdict.INCONCLUSIVE, "nothing_checked", WITHOUT_GPU
        message = f"the program asks for a GPU, and there is none here: {message}"
    finding = Finding(code, message, failure.where or program.where, example, help=help)
    refuted = int(verdict is Verdict.REFUTED)
    check = Check("ranks run to their end", verdict, refuted, refuted)
    return Outcome(dtype, (check,), (finding,), ())


def _notes(records: Sequence[RankRecord]) -> tuple[str, ...]:
    pieces = [piece for record in records for piece in record.pieces]
    notes = []
    given = sorted({piece.local for piece in pieces if piece.found == "given"})
    if given:
        notes.append(f"the program makes its own values of {few(given)}: they were replaced by the model's")
    guessed = sorted({piece.local for piece in pieces if piece.found == GUESSED})
    if guessed:
        notes.append(
            f"the program makes its own values of {few(guessed)}: they were replaced by those of the model's elements "
            "that lie there by the shapes of these shards"
        )
    by_value = sorted({piece.local for piece in pieces if piece.found == "value"})
    if by_value:
        notes.append(f"{few(by_value)}: which elements of the model they hold was found from their values")
    copies = sorted({piece.local for piece in pieces if piece.found == COPY})
    if copies:
        notes.append(f"{few(copies)}: frozen copies of what the program trains, an average of it say: not compared")
    buffers = sorted({p.local for p in pieces if p.addresses is None and p.kind == "buffer"} - set(copies))
    if buffers:
        notes.append(f"buffers of the program that the model lacks were not compared: {few(buffers)}")
    hooked = sorted({name for record in records for name in record.hooked})
    if hooked:
        notes.append(note_on_hooks("the program", hooked))
    evaluating = {record.rank: record.evaluating for record in records if record.evaluating}
    if evaluating:
        rank, modules = min(evaluating.items())
        notes.append(
            f"on {len(evaluating)} of {len(records)} ranks modules are in evaluation mode, and the plain model is in "
            f"training mode: {few(modules)} on rank {rank}. Dropout, which is off in this run, would not drop there"
        )
    return tuple(notes)
