"""Verify a program of somebody else: run it on every rank, and compare it with the plain eager model."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from op_registry.spec import SourceLocation

from nnscaler.errors import NnscalerError
from verify.external.addresses import Piece
from verify.external.compare import Compared, Run, compare
from verify.external.findings import findings
from verify.external.noise import Noise, measure, rounded
from verify.external.observe import RankRecord, observe
from verify.external.program import Batch, ExternalProgram
from verify.external.ranks.run import RankRun, RanksFailed, run_ranks, run_ranks_isolated
from verify.external.reference import (
    Reference,
    check_rows,
    computing_in,
    copied,
    initial_model,
    part_gradients,
    run_reference,
)
from verify.results.finding import Finding
from verify.results.report import Check, Report, environment
from verify.results.verdict import Verdict

Progress = Callable[[str], None]
TOOL = "verify-external"


@dataclass(frozen=True)
class Settings:
    """How a program is run.

    executor  simulator: a thread per rank; gloo: a process per rank
    seed      of the model's parameters
    steps     of the optimizer, at least 1
    timeout   seconds of one run of the ranks
    isolate   run the simulator in a child process, so that a crash of the program is a finding
    """

    executor: str = "simulator"
    seed: int = 0
    steps: int = 2
    timeout: float = 120.0
    isolate: bool = True


@dataclass(frozen=True)
class Outcome:
    """The result of one dtype.

    records  what the ranks recorded; empty where they failed
    """

    dtype: torch.dtype
    checks: tuple[Check, ...]
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]
    compared: tuple[Compared, ...] = ()
    records: tuple[RankRecord, ...] = ()


def verify_program(
    program: ExternalProgram,
    settings: Settings | None = None,
    *,
    dtypes: Sequence[str] = ("float64",),
    progress: Progress = lambda text: None,
) -> Report:
    """Verify a program in each of these dtypes. Raises NnscalerError for what cannot be run at all."""
    how = settings or Settings()
    started = time.perf_counter()
    model = initial_model(program, how.seed)
    torch.manual_seed(how.seed)
    batch = program.batch()
    check_rows(program, batch)
    outcomes: list[Outcome] = []
    for name in dtypes:
        progress(f"{program.name} on {program.ranks} ranks in {name}")
        known = outcomes[0].records if outcomes else ()
        outcomes.append(verify_in(program, how, model, batch, getattr(torch, name), known))
    axes = " ".join(f"{axis}={size}" for axis, size in program.mesh)
    several = len(outcomes) > 1
    return Report(
        tool=TOOL,
        subject=program.name,
        setting=f"on {program.ranks} ranks ({axes}), in {' and '.join(dtypes)}",
        seed=how.seed,
        checks=tuple(
            replace(check, name=f"{check.name}, {name}" if several else check.name)
            for name, outcome in zip(dtypes, outcomes, strict=True)
            for check in outcome.checks
        ),
        findings=tuple(finding for outcome in outcomes for finding in outcome.findings),
        notes=tuple(dict.fromkeys(note for outcome in outcomes for note in outcome.notes)),
        environment=environment() | {"executor": how.executor, "dtype": ", ".join(dtypes)},
        seconds=time.perf_counter() - started,
    )


def verify_in(
    program: ExternalProgram,
    how: Settings,
    model: nn.Module,
    batch: Batch,
    dtype: torch.dtype,
    known: Sequence[RankRecord] = (),
) -> Outcome:
    """Verify a program in one dtype; `known`: records of the same ranks in float64."""
    mine = rounded(model, dtype)
    values = copied(copied(batch, dtype), torch.float64) if dtype != torch.float64 else batch
    truth = run_reference(program, mine, values, steps=how.steps, dtype=torch.float64)
    reference = replace(truth, dtype=dtype)
    tolerance = Noise() if dtype == torch.float64 else measure(program, mine, truth, dtype)
    try:
        records = run_program(program, how, mine, reference, known)
    except RanksFailed as failure:
        return failed(program, dtype, failure)
    run = Run(program, truth, records, tolerance, part_gradients(program, mine, truth))
    run = replace(run, reference=reference)
    compared = compare(run)
    if dtype == torch.float64 and any(result.differences for result in compared):
        run = replace(run, tolerance=measure(program, mine, truth, dtype))  # an ill-conditioned model
        compared = compare(run)
    level = Verdict.TESTED_EXACT if dtype == torch.float64 else Verdict.TESTED_CALIBRATED
    checks = tuple(result.check(level) for result in compared if result.name != "gradient norm" or result.count)
    return Outcome(dtype, checks, findings(run, compared), _notes(records), compared, records)


def run_program(
    program: ExternalProgram, how: Settings, model: nn.Module, reference: Reference, known: Sequence[RankRecord]
) -> tuple[RankRecord, ...]:
    """Run the program on every rank. Raises RanksFailed, and NnscalerError for what a rank refuses."""
    lookup = reference.lookup()
    pieces: dict[int, tuple[Piece, ...]] = {record.rank: record.pieces for record in known}

    def on_rank(rank: int) -> RankRecord | NnscalerError:
        try:
            return observe(program, model, reference, lookup, rank, pieces.get(rank, ()))
        except NnscalerError as error:
            return error

    runner = run_ranks_isolated if how.isolate and how.executor == "simulator" else run_ranks
    with computing_in(None, reference.dtype):
        run: RankRun[RankRecord | NnscalerError] = runner(on_rank, program.ranks, how.executor, timeout=how.timeout)
    records: list[RankRecord] = []
    for result in run.results:
        if isinstance(result, NnscalerError):
            raise result
        records.append(result)
    return tuple(records)


def failed(program: ExternalProgram, dtype: torch.dtype, failure: RanksFailed) -> Outcome:
    """Return the outcome of a run that did not end."""
    name = str(dtype).removeprefix("torch.")
    verdict = Verdict.INCONCLUSIVE if failure.code == "timed_out" else Verdict.REFUTED
    example = {"dtype": name} | ({} if failure.rank is None else {"rank": str(failure.rank)})
    example |= {f"rank {rank}": text for rank, text in failure.by_rank.items()}
    finding = Finding(failure.code, f"{failure.message} ({name})", _place(failure) or program.where, example)
    check = Check("ranks run to their end", verdict, 1, int(verdict is Verdict.REFUTED))
    return Outcome(dtype, (check,), (finding,), ())


def _place(failure: RanksFailed) -> SourceLocation | None:
    file, _, line = (failure.place or "").rpartition(":")
    return SourceLocation(file, int(line), "") if file and line.isdigit() else None


def _notes(records: Sequence[RankRecord]) -> tuple[str, ...]:
    pieces = [piece for record in records for piece in record.pieces]
    notes = []
    given = sorted({piece.local for piece in pieces if piece.found == "given"})
    if given:
        notes.append(f"the program makes its own values of {_few(given)}: they were replaced by the model's")
    by_value = sorted({piece.local for piece in pieces if piece.found == "value"})
    if by_value:
        notes.append(f"{_few(by_value)}: which elements of the model they hold was found from their values")
    buffers = sorted({p.local for p in pieces if p.addresses is None and p.kind == "buffer"})
    if buffers:
        notes.append(f"buffers of the program that the model lacks were not compared: {_few(buffers)}")
    return tuple(notes)


def _few(names: Sequence[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
