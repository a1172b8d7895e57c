"""One program with its oracle in one dtype: run it on the ranks, compare, localise, try repairs."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TypeVar, cast

import torch
from torch import nn

from nnscaler.errors import NnscalerError
from nnscaler.runtime.tensor_bits_and_differences import FLOAT64_BOUND, difference
from verify.external.comparison.compare import compare
from verify.external.comparison.comparison_records import ComparisonResult, ProgramRun
from verify.external.comparison.findings_from_differences import findings
from verify.external.comparison.first_module_that_differs import (
    FirstDifference,
    first_differences,
    traced_model,
    traced_rank,
)
from verify.external.comparison.reference_in_parts_and_noise import measure, micro_means
from verify.external.comparison.replicas_under_dropout import NAME as COPIES
from verify.external.comparison.replicas_under_dropout import draws, draws_beside_dropout, unequal, unequal_losses
from verify.external.comparison.replicas_under_dropout import finding as of_dropout
from verify.external.comparison.try_repairs import Repair, repair_of
from verify.external.observe_rank_run import RankRecord, observe
from verify.external.program import ExternalProgram
from verify.external.ranks.run_ranks_here_or_in_child import RankRun, RanksFailed, run_ranks
from verify.external.reference import PlainReference, data_part, data_parts, piece_of_step, run_reference
from verify.external.unequal_label_counts import NAME as LABELS
from verify.external.unequal_label_counts import unequal_labels
from verify.results.finding import Finding
from verify.results.float64_tolerance import Tolerance
from verify.results.report import Check
from verify.results.verdict import Verdict

T = TypeVar("T")
CLIPPED = "gradients that are clipped"


@dataclass(frozen=True)
class ExternalSettings:
    """How a program is run.

    executor  simulator: a thread per rank; gloo: a process per rank
    seed      of the model's parameters
    steps     of the optimizer, at least 1
    timeout   seconds of one run of the ranks
    isolate   run the simulator in a child process, so that a crash of the program is a finding
    checkpoint
              save after the steps, in each way that the program has, and load into the plain model and on another mesh
    """

    executor: str = "simulator"
    seed: int = 0
    steps: int = 2
    timeout: float = 120.0
    isolate: bool = True
    checkpoint: bool = False


@dataclass(frozen=True)
class ExternalCase:
    """A program with its oracle in one dtype.

    truth      the plain model in float64
    reference  the same, with the dtype in which the ranks compute
    """

    program: ExternalProgram
    how: ExternalSettings
    model: nn.Module
    truth: PlainReference
    reference: PlainReference

    def run(self, known: Sequence[RankRecord] = ()) -> RankRun[RankRecord]:
        """Run the program on every rank. Raises RanksFailed, and NnscalerError for what a rank refuses."""
        lookup = self.truth.lookup()
        pieces = {record.rank: record.pieces for record in known}

        def on_rank(rank: int) -> RankRecord:
            return observe(self.program, self.model, self.reference, lookup, rank, pieces.get(rank, ()))

        return self.on_ranks(on_rank)

    def tried(self, known: Sequence[RankRecord] = ()) -> RankRun[RankRecord] | RanksFailed:
        """Run the program as `run` does, and return its failure instead of raising it."""
        try:
            return self.run(known)
        except RanksFailed as failure:
            return failure

    def on_ranks(self, function: Callable[[int], T]) -> RankRun[T]:
        """Call a function on every rank. Raises RanksFailed, and NnscalerError for what a rank refuses."""

        def guarded(rank: int) -> T | NnscalerError:
            try:
                return function(rank)
            except NnscalerError as error:
                return error

        with _quiet():
            run = self._run(guarded, self.program.ranks)
        for result in run.results:
            if isinstance(result, NnscalerError):
                raise result
        return cast(RankRun[T], run)

    def alone(self, function: Callable[[int], T]) -> T:
        """Call a function, with 0, where ranks run, and without any process group. Raises RanksFailed."""
        with _quiet():
            return self._run(function, 1, initialise=False).results[0]

    def _run(self, function: Callable[[int], T], ranks: int, initialise: bool = True) -> RankRun[T]:
        how = self.how
        return run_ranks(function, ranks, how.executor, initialise=initialise, isolate=how.isolate, timeout=how.timeout)

    def compare(
        self, records: tuple[RankRecord, ...], tolerance: Tolerance
    ) -> tuple[ProgramRun, tuple[ComparisonResult, ...]]:
        """Compare the records with the oracle."""
        piece, parts = piece_of_step(self.program, self.model, self.truth), data_parts(self.program)
        means = micro_means(self.program, self.truth, piece)
        run = ProgramRun(
            self.program, self.reference, records, tolerance, lambda step, part: piece(step, part, parts)[1], means
        )
        return run, compare(run)

    @property
    def level(self) -> Verdict:
        """The verdict on what agrees."""
        return Verdict.TESTED_EXACT if self.reference.dtype == torch.float64 else Verdict.TESTED_CALIBRATED

    def judge(
        self, records: tuple[RankRecord, ...], narrow: torch.dtype
    ) -> tuple[ProgramRun, tuple[ComparisonResult, ...]]:
        """Compare the records with the oracle, up to the rounding of `narrow`, the narrowest dtype on the way.

        Who clips in their own way may divide by the norm itself, to which torch adds a little.
        """
        found = self._judged(records, narrow)
        if self.program.clip is not None and self.program.added_to_norm and any(r.differences for r in found[1]):
            other = self._of(replace(self.program, added_to_norm=0.0))._judged(records, narrow)
            return found if any(result.differences for result in other[1]) else other
        return found

    def _of(self, program: ExternalProgram) -> ExternalCase:
        """Return the case of a program that differs in how gradients are clipped."""
        rate, steps = self.truth.learning_rate or None, len(self.truth.steps)
        truth = run_reference(
            program, self.model, self.truth.batch, steps=steps, dtype=torch.float64, learning_rate=rate
        )
        return replace(self, program=program, truth=truth, reference=replace(truth, dtype=self.reference.dtype))

    def _judged(
        self, records: tuple[RankRecord, ...], narrow: torch.dtype
    ) -> tuple[ProgramRun, tuple[ComparisonResult, ...]]:
        exact = self.reference.dtype == torch.float64
        run, compared = self.compare(records, Tolerance() if exact else self._noise(narrow))
        if exact and any(result.differences for result in compared):
            run, compared = self.compare(records, self._noise(narrow))  # an ill-conditioned model
        return run, compared

    def _noise(self, narrow: torch.dtype) -> Tolerance:
        return measure(self.program, self.model, self.truth, narrow)

    def explained(
        self, run: ProgramRun, compared: Sequence[ComparisonResult], found: tuple[Finding, ...]
    ) -> tuple[Finding, ...]:
        """Add the first module that differs, and a repair that was tried, to the first finding that is refuted."""
        losses = next(result for result in compared if result.name == "losses")
        right = losses.count > 0 and all(difference.step for difference in losses.differences)
        first = self._first_difference(run.records, ("backward",) if right else ("forward", "backward"))
        repair = repair_of(self.program, compared)
        mended = repair is not None and self._mends(repair, run.tolerance)
        result = []
        for finding in found:
            example = dict(finding.counter_example)
            if first is not None and finding.code in _LOCALISED:
                example["first difference"] = str(first)
            help = finding.help
            if mended and repair is not None and finding.code in _REPAIRED:
                help = f"{repair.text} (tried: with it every check passes)"
            result.append(replace(finding, counter_example=example, help=help))
        return tuple(result)

    def copies(self, known: Sequence[RankRecord]) -> tuple[Check, tuple[Finding, ...]] | None:
        """Compare copies, and losses, with dropout on, in float64; None where the plain model drops nothing.

        `known`: the run without dropout.
        """
        if not draws(self.program, self.model, self.truth.batch):
            return None
        one = replace(self.truth, steps=self.truth.steps[:1])
        lookup = self.truth.lookup()
        try:
            ran = self.on_ranks(lambda rank: observe(self.program, self.model, one, lookup, rank, dropout=True))
        except RanksFailed as failure:
            finding = Finding(failure.code, f"{failure.message}, with dropout on", self.program.where)
            return Check(COPIES, Verdict.INCONCLUSIVE, 0), (finding,)
        parts = [data_part(self.program, record.coordinate)[0] for record in ran.results]
        both = unequal(ran.results), unequal_losses(ran.results, known, parts)
        count, wrong = sum(compared for compared, _ in both), [one for _, told in both for one in told]
        found = tuple(
            of_dropout(
                f"copies of {one.name} on ranks {one.ranks[0]} and {one.ranks[1]} get other gradients with dropout on"
                if one.name
                else f"the losses of ranks {one.ranks[0]} and {one.ranks[1]}, of the same rows, differ with dropout on",
                self.program.where,
                {"relative difference": f"{one.relative:.3g}"},
            )
            for one in wrong[:1]
        )
        verdict = Verdict.REFUTED if wrong else Verdict.TESTED_EXACT if count else Verdict.INCONCLUSIVE
        return (Check(COPIES, verdict, count, len(wrong), supporting=True), found) if count else None

    def with_labels(
        self, known: Sequence[RankRecord], narrow: torch.dtype
    ) -> tuple[Check | None, tuple[Finding, ...], tuple[str, ...]]:
        """Run one step on a batch whose data parts count different numbers of labels, where there is one."""
        found = unequal_labels(self.program, self.model, self.truth)
        notes = () if found.why is None else (f"unequal numbers of labels were not tried: {found.why}",)
        if found.truth is None:
            return None, (), notes
        case = replace(self, truth=found.truth, reference=replace(found.truth, dtype=self.reference.dtype))
        check, refuted = case._once_more(known, narrow, LABELS, f"with unequal numbers of {found.counted}")
        return check, refuted, notes

    def with_clipping(
        self, known: Sequence[RankRecord], narrow: torch.dtype
    ) -> tuple[Check | None, tuple[Finding, ...], tuple[str, ...]]:
        """Run the steps with half the norm of the first gradients for `max_norm`, where what is given clips nothing."""
        given, norms = self.program.max_norm, [step.norm for step in self.truth.steps if step.norm is not None]
        if given is None or any(float(norm) > given for norm in norms):
            return None, (), ()
        case = self._of(replace(self.program, max_norm=float(norms[0]) / 2))
        words = f"with max_norm={case.program.max_norm:.3g}, for no gradient reaches {given:g}"
        check, refuted = case._once_more(known, narrow, CLIPPED, words)
        return check, refuted, ()

    def _once_more(
        self, known: Sequence[RankRecord], narrow: torch.dtype, name: str, words: str
    ) -> tuple[Check, tuple[Finding, ...]]:
        """Run and compare all in one check."""
        ran = self.tried(known)
        if isinstance(ran, RanksFailed):
            return Check(name, Verdict.INCONCLUSIVE, 0), (
                Finding(ran.code, f"{ran.message}, {words}", self.program.where),
            )
        run, compared = self.judge(ran.results, narrow)
        refuted = tuple(replace(f, message=f"{words}: {f.message}") for f in findings(run, compared))
        return ComparisonResult.of_all(name, compared).check(self.level), refuted

    def undecided(
        self, records: Sequence[RankRecord], checks: tuple[Check, ...], found: tuple[Finding, ...]
    ) -> tuple[tuple[Check, ...], tuple[Finding, ...]] | None:
        """Return what is refuted as undecided where ranks were given other rows than they work on, or where a step
        draws random numbers: ranks draw for their own rows."""
        if any(finding.code not in _OF_VALUES for finding in found):
            return None
        cause = _on_another_mesh(records)
        help = "use the mesh that `parallelize` is given, or let `mesh` of the check file name its axes in that order"
        if cause is None:
            if not draws_beside_dropout(self.program, self.model, self.truth.batch):
                return None
            cause = "a step draws random numbers, which are others on ranks that see other rows"
            help = "draw them in `batch()`, whose rows are divided, or take them out: else a difference says nothing"
        return tuple(check.undecided() for check in checks), tuple(
            replace(finding, code="not_compared", cause=cause, help=help) for finding in found
        )

    def of_equal_parts(self) -> tuple[Check, Finding] | None:
        """Return what is open where every data part has the gradients of the whole batch, so that an average over the
        parts changes nothing; None where it does."""
        piece, parts = piece_of_step(self.program, self.model, self.truth), data_parts(self.program)
        whole = self.truth.steps[0].gradients.nan_to_num(0.0)
        each = (piece(0, part, parts)[1].nan_to_num(0.0) for part in range(parts))
        if parts == 1 or any(difference(one, whole).relative > FLOAT64_BOUND for one in each):
            return None
        message = "each data part by itself has the gradients of the whole batch: an average over ranks changes nothing"
        help = "let `batch()` return other rows for each data part, by torch.randn and torch.randint say"
        finding = Finding("not_compared", message, self.program.batch_where or self.program.where, help=help)
        return Check("data parts differ", Verdict.INCONCLUSIVE, 0), finding

    def _first_difference(self, records: Sequence[RankRecord], directions: Sequence[str]) -> FirstDifference | None:
        """Return the first module whose result differs; None where none is found, or where the run fails with hooks."""
        right = traced_model(self.program, self.model, self.truth)
        try:
            start = self.truth.lookup().start
            ranks = self.on_ranks(lambda r: traced_rank(self.program, self.model, self.reference, start, records[r]))
        except RanksFailed:
            return None
        found = first_differences(self.program, self.reference, right, ranks.results, records, directions)
        return next(iter(found), None)

    def _mends(self, repair: Repair, tolerance: Tolerance) -> bool:
        """Return whether the program with the repair passes every comparison."""
        case = replace(self, program=repair.applied(self.program, self.truth.lookup()))
        try:
            _, compared = case.compare(case.run().results, tolerance)
        except RanksFailed:
            return False
        return all(not result.differences for result in compared)


def _on_another_mesh(records: Sequence[RankRecord]) -> str | None:
    """Say where a rank stands on the mesh that a program made for itself; None where that is its place on ours."""
    for record in records:
        ours = {axis: place for axis, place in record.coordinate.items() if axis in record.placed}
        theirs = {axis: record.placed[axis] for axis in ours}
        if ours != theirs:
            here, there = (" ".join(f"{axis}={at}" for axis, at in one.items()) for one in (theirs, ours))
            return (
                f"the program makes a mesh of its own, on which rank {record.rank} is at {here}; on the check file's, "
                f"by which rows are dealt out, it is at {there}"
            )
    return None


_OF_VALUES = frozenset(
    (
        "loss_differs",
        "gradient_differs",
        "gradient_norm_differs",
        "parameter_differs",
        "buffer_differs",
        "near_threshold",
    )
)
_LOCALISED = frozenset(("loss_differs", "gradient_differs", "not_finite"))
_REPAIRED = frozenset(("gradient_differs", "replicas_differ"))


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep what torch warns of from every rank to itself: the program's author sees it in runs of their own.

    What torch logs as an error it raises as well (fake tensors of DTensor do), and a finding tells it once.
    """
    torch_log = logging.getLogger("torch")
    before, level = logging.root.manager.disable, torch_log.level
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        torch_log.setLevel(logging.CRITICAL)
        try:
            yield
        finally:
            torch_log.setLevel(level)
            logging.disable(before)
