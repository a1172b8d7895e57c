"""Compare the ranks of a script with the script on one rank, in the ways that data can be matched."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from nnscaler.exception_in_one_line import first_line
from nnscaler.runtime.tensor_bits_and_differences import (
    FLOAT64_BOUND,
    difference,
    is_finite,
    is_whole,
)
from verify.external.comparison.compare import LATE, compare
from verify.external.comparison.comparison_records import ComparisonResult, Difference, PartGradients, ProgramRun
from verify.external.comparison.findings_from_differences import findings
from verify.external.comparison.reference_in_parts_and_noise import DRAWS, HALF, UNKNOWN, largest_distances
from verify.external.comparison.replicas_under_dropout import NAME as COPIES
from verify.external.comparison.replicas_under_dropout import compare_replicas
from verify.external.comparison.replicas_under_dropout import finding as of_dropout
from verify.external.observe_rank_run import RankRecord
from verify.external.ranks.run_result import RanksFailed
from verify.external.reference import PlainReference, ReferenceStep
from verify.external.torchrun.elements_of_one_rank import NONE_FILLED, FilledIn, filled_in
from verify.external.torchrun.feed_data_of_all_ranks import Material, Way
from verify.external.torchrun.find_comparison_gaps import (
    Tried,
    coupled_unequal_parts,
    doubt_of,
    idle_at_start,
    left_open,
    losses_add_up,
    why_not_whole,
)
from verify.external.torchrun.match_one_rank import (
    Layout,
    own_gradients,
    program_of,
    rank_records,
    reference_of,
    unmatched,
)
from verify.external.torchrun.run_ranks_and_reference import Failed, NoReference, NotMatched, ScriptRunner
from verify.external.torchrun.watched_script_record import Clipped, ReadNumber, ScriptRecord
from verify.programs.low_precision.noise_statistics import moved
from verify.results.finding import Finding
from verify.results.float64_tolerance import AGREES, Key, Tolerance
from verify.results.report import Check
from verify.results.verdict import Verdict, merge

_ROUNDING = 1e-3  # a relative difference in float64 that an ill-conditioned model may make
WAYS: tuple[Way, ...] = ("own", "whole", "turns", "part")
_FIRMEST: tuple[Way, ...] = ("own", "part", "turns", "whole")
_IN_A_STEP = ("parameters are held", "losses", "gradients", LATE)  # as it computes them; others are made of these
SAID: dict[Way, str] = {
    "own": "the reference is the script on one rank, with its own data, which are those of the ranks together",
    "whole": "the reference is the script on one rank, given in each batch the rows of all data parts together",
    "turns": "the reference is the script on one rank, given the micro-batches of all data parts in turn",
    "part": "the reference is the script on one rank, on each data part by itself; the right gradient is taken to be "
    "the mean over the data parts",
}
SAID_OF_SUM = (
    "the reference is the script on one rank, on each data part by itself; losses and gradients are taken to be those "
    "of the data parts added up"
)


@dataclass(frozen=True)
class Attempt:
    """A comparison with one reference.

    way      how the script on one rank was fed
    material with which it was
    numbers  that it read from tensors
    notes    of that run
    clipped  calls of torch's functions that clip gradients, in each of its steps
    own_norms
             of each data part's gradients when its process made these calls, by part and step; none in another way
    unclipped
             makes the gradients before they were clipped
    filled   tensors whose gradients the script fills in
    """

    way: Way
    material: Material
    numbers: tuple[ReadNumber, ...]
    run: ProgramRun
    compared: tuple[ComparisonResult, ...]
    notes: tuple[str, ...]
    clipped: tuple[tuple[Clipped, ...], ...] = ()
    own_norms: tuple[tuple[tuple[float | None, ...], ...], ...] = ()
    unclipped: PartGradients | None = None
    filled: FilledIn = NONE_FILLED

    @property
    def agrees(self) -> bool:
        """Return whether nothing differs."""
        return all(d.code == "not_compared" for result in self.compared for d in result.differences)

    @property
    def reached(self) -> tuple[int, int]:
        """Return the step of the first difference, and its place among what is computed in a step."""
        order = {name: place for place, name in enumerate(_IN_A_STEP)}
        places = [(d.step, order.get(r.name, len(order))) for r in self.compared for d in r.differences]
        return min(places, default=(len(self.run.reference.steps), 0))

    @property
    def firm(self) -> bool:
        """Return whether a difference refutes the script: data were not changed in amount, or the losses show that this
        is right, or the losses and gradients up to the first difference, which changes those of later steps."""
        losses = next(result for result in self.compared if result.name == "losses")
        computed = not losses.differences or self.reached[1] == len(_IN_A_STEP)
        return self.way in ("own", "part") or (losses.count > 0 and computed)

    @property
    def assumed(self) -> tuple[int, int, int]:
        """Return what is small where little speaks against the way: all that the ranks compute agrees for long in the
        right one, and in a wrong one from the first on nothing does."""
        step, place = self.reached
        return -step, -place, _FIRMEST.index(self.way)


@dataclass(frozen=True)
class Judged:
    """The outcome of all attempts.

    attempt  that decides; None where no reference could be made
    reasons  why others could not be made
    """

    attempt: Attempt | None
    reasons: tuple[NoReference, ...]
    checks: tuple[Check, ...]
    findings: tuple[Finding, ...]

    @property
    def passes(self) -> bool:
        """Return whether a comparison was made, and every one passes."""
        return bool(self.checks) and all(check.verdict.passes for check in self.checks)


def judge(runner: ScriptRunner, records: Sequence[ScriptRecord], layout: Layout, material: Material) -> Judged:
    """Make references until one agrees, and judge by that, or by the one that assumes least."""
    reasons: list[NoReference] = []
    made: list[Attempt] = []
    for way, given in _ways(material):
        if layout.count == 1 and (made or way in ("whole", "turns")):
            continue
        if given.summed and not losses_add_up({attempt.way: attempt.run for attempt in made}, layout):
            continue
        try:
            attempt = attempt_of(runner, records, layout, given, way)
        except (NotMatched, Failed) as problem:
            reasons.append(NoReference.of(way, problem))
            continue
        made.append(attempt)
        if attempt.agrees:
            break
    if not made:
        return Judged(None, tuple(reasons), (), ())
    reasons = [reason for reason in reasons if all(reason.way != attempt.way for attempt in made)]
    agreeing = [attempt for attempt in made if attempt.agrees]
    coupled = coupled_unequal_parts({attempt.way: attempt.compared for attempt in made}, records, layout)
    firm = sorted((a for a in made if a.firm and not (coupled and a.way == "part")), key=lambda a: a.assumed)
    chosen = (agreeing or firm or made)[0]
    if not chosen.agrees:
        chosen = explained(runner, chosen, made)
    unseen = frozenset(name for record in records for name in record.unseen)
    if chosen.agrees:
        idle = idle_at_start(runner, chosen.run.reference, chosen.material, chosen.way, chosen.filled)
        judged = _judged(chosen, tuple(reasons), None, unseen, idle)
        if judged.passes and any(record.dropped for record in records):
            checks, found = _with_dropout(runner, chosen.run, layout)
            judged = replace(judged, checks=judged.checks + checks, findings=judged.findings + found)
        meant = runner.parts and not chosen.material.summed  # a sum may be a loss that is scaled too often
        return judged if meant else _with_assumption(judged, made)
    tried = Tried(chosen.way, chosen.numbers, bool(firm), tuple(reasons), coupled)
    differences = [difference for result in chosen.compared for difference in result.differences]
    return _judged(chosen, tuple(reasons), doubt_of(tried, differences, records, layout), unseen, ())


def _ways(material: Material) -> Iterator[tuple[Way, Material]]:
    """Yield the ways, first with the random numbers that the parts drew outside of models, then without them, and at
    last with the scalars that one rank computes."""
    for way in WAYS:
        if material.draws and way in ("whole", "part"):
            yield way, material
        yield way, replace(material, draws=())
        if way == "whole" and material.has_scalars:
            yield way, replace(material, draws=(), scalars=False)
    yield "part", replace(material, draws=(), summed=True)


def attempt_of(
    runner: ScriptRunner, records: Sequence[ScriptRecord], layout: Layout, material: Material, way: Way
) -> Attempt:
    """Compare the ranks with one rank that is fed in one way. Raises NotMatched, Failed."""
    made = runner.fed(material, way)
    steps = min(len(material.taken), *(len(record.steps) for record in made))
    for step in (step for record in made for step in record.steps[:steps]):
        named = [*(("the loss", loss) for loss in step.losses), *step.gradients.items()]
        wrong = next((name for name, value in named if value is not None and not is_finite(value)), None)
        if wrong is not None:
            what = wrong if wrong == "the loss" else f"the gradient of {wrong}"
            raise NotMatched(f"on one rank {what} is not finite, so that nothing can be compared")
    filled = filled_in(records, made[0])
    reference = reference_of(made, steps, filled)
    ranks = rank_records(records, layout, reference, made, filled)
    if strange := unmatched(ranks, records):
        raise strange
    tolerance = Tolerance() if runner.double else Tolerance({}, torch.finfo(reference.dtype).eps, exact=False)
    reference = replace(reference, steps=_with_part_losses(reference, ranks, layout))
    own = own_gradients(made, filled) if len(made) == layout.count else _no_gradients(reference)
    run = ProgramRun(program_of(runner.name, layout), reference, ranks, tolerance, own)
    clipped = tuple(step.clipped for step in made[0].steps[:steps])
    own = own_gradients(made, filled)
    norms = tuple(tuple(tuple(c.own for c in s.clipped) for s in record.steps[:steps]) for record in made)
    norms = norms if way == "part" else ()
    attempt = Attempt(way, material, made[0].numbers, run, compare(run), made[0].notes, clipped, norms, own, filled)
    if not runner.double and not attempt.agrees:
        run = replace(run, tolerance=_noise(runner, attempt))
        attempt = replace(attempt, run=run, compared=compare(run))
    return attempt


def _no_gradients(reference: PlainReference) -> PartGradients:
    empty = torch.full((reference.space.size,), torch.nan, dtype=torch.float64)
    return lambda step, part: empty


def _with_part_losses(
    reference: PlainReference, ranks: Sequence[RankRecord], layout: Layout
) -> tuple[ReferenceStep, ...]:
    """Add the losses of the data parts, where the loss is a sum over rows: theirs must add up to that of the whole."""
    steps = []
    exact = reference.dtype == torch.float64
    eps = torch.finfo(reference.dtype).eps
    for number, step in enumerate(reference.steps):
        bound = FLOAT64_BOUND if exact else AGREES * layout.count * max(eps, HALF * step.loss_unit)
        losses = [ranks[layout.parts.index(part)].steps[number].loss for part in range(layout.count)]
        known = [loss.double() for loss in losses if loss is not None]
        sums = len(known) == layout.count > 1 and not step.part_losses
        if sums and difference(torch.stack(known).sum(), step.loss).relative <= bound:
            step = replace(step, part_losses=tuple(known))
        steps.append(step)
    return tuple(steps)


def _noise(runner: ScriptRunner, attempt: Attempt) -> Tolerance:
    """Run the same reference from parameters that are moved by a unit in the last place, with its sums taken in another
    order: a norm by which a script clips is such a sum, and so is what a cast to bfloat16 rounds."""
    material, truth = attempt.material, attempt.run.reference
    generator = torch.Generator().manual_seed(0)
    floor: dict[Key, float] = {("loss", number, ""): HALF * step.loss_unit for number, step in enumerate(truth.steps)}
    runs: list[tuple[PlainReference, PlainReference]] = []
    unknown: list[str] = []
    for draw in range(DRAWS):
        start = {
            name: value if is_whole(value) else moved(value, value.dtype, generator)
            for name, value in material.start.items()
        }
        for seed in (draw, None):  # a script may not run under what takes its sums in another order
            try:
                made = runner.fed(replace(material, start=start, reordered=seed), attempt.way)
                runs.append((reference_of(made, len(truth.steps), attempt.filled), truth))
                break
            except (NotMatched, Failed) as problem:
                unknown.append(first_line(problem, 300))
    found = largest_distances(runs)
    noise = {key: max(found.get(key, 0.0), floor.get(key, 0.0)) for key in {**floor, **found}}
    why = "" if runs else f"{UNKNOWN}: {unknown[0]}"
    return Tolerance(noise, torch.finfo(truth.dtype).eps, runner.double, why)


def _mean_of_parts(gradients: PartGradients, count: int, step: int) -> Tensor:
    return torch.stack([gradients(step, part) for part in range(count)]).mean(0)


def explained(runner: ScriptRunner, chosen: Attempt, made: Sequence[Attempt]) -> Attempt:
    """Judge again with the noise of an ill-conditioned model, and with the gradients of the data parts."""
    run = chosen.run
    if runner.double and all(d.relative < _ROUNDING for result in chosen.compared for d in result.differences):
        run = replace(run, tolerance=_noise(runner, chosen))
    if chosen.unclipped is not None:
        count = len(chosen.material.parts) if chosen.way == "part" else 1
        run = replace(run, unclipped=partial(_mean_of_parts, chosen.unclipped, count))
    parts = next((attempt.run for attempt in made if attempt.way == "part"), None)
    if parts is not None and parts.reference.space.names == run.reference.space.names:
        run = replace(run, part_gradients=parts.part_gradients)
    else:
        run = replace(run, part_gradients=_no_gradients(run.reference))
    return replace(chosen, run=run, compared=compare(run))


def _judged(
    chosen: Attempt, reasons: tuple[NoReference, ...], doubt: str | None, unseen: frozenset[str], idle: Sequence[str]
) -> Judged:
    double = chosen.run.reference.dtype == torch.float64
    level = Verdict.TESTED_EXACT if double else Verdict.TESTED_CALIBRATED
    compared = tuple(result for result in chosen.compared if result.name != "gradient norm" or result.count)
    checks = [result.check(level) for result in compared]
    unplaced = chosen.filled.unplaced
    if unplaced:  # some were not compared, whatever the others are
        checks = [
            replace(c, verdict=merge([c.verdict, Verdict.INCONCLUSIVE])) if c.name in ("gradients", LATE) else c
            for c in checks
        ]
    found = list(findings(chosen.run, compared, every_gradient=not unplaced))
    if not any(check.verdict is Verdict.REFUTED for check in checks):
        replicas = compare_replicas(chosen.run.records)
        checks += [replicas.check(Verdict.TESTED_EXACT)] if replicas.count else []
        found += findings(chosen.run, (replicas,))
    if doubt is not None:
        checks = [check.undecided() for check in checks]
        found = [replace(f, code="near_threshold", cause=f"{f.cause + '; ' if f.cause else ''}{doubt}") for f in found]
    mixed = next((one for one in reasons if one.way == "own" and one.mismatch == "mixed_rows"), None)
    for check, finding in left_open(chosen.run, unseen, idle, mixed if chosen.agrees else None, unplaced):
        checks.append(check)
        found.append(finding)
    return Judged(chosen, reasons, tuple(checks), tuple(found))


_SHARE = 0.02  # how far what is taken for a part's share may be from it, for rounding
_SUMMED = "let a SyncBatchNorm see the rows of all ranks; where each is to see its own, write a check file"
_PARTS = "where that mean is meant: --reference parts"


def _with_assumption(judged: Judged, made: Sequence[Attempt]) -> Judged:
    """Leave a script open that agrees with the mean over its data parts alone: losses over unequal counts, or
    statistics of each part, make such a script another one than that on one rank."""
    if judged.attempt is None or judged.attempt.way != "part" or not judged.attempt.run.reference.steps[0].part_losses:
        return judged
    kind = "sum" if judged.attempt.material.summed else "mean"
    message = f"the ranks agree with the {kind} over the data parts, each by itself, and "
    cause = "statistics of a part's rows alone, or rows that belong together on other ranks"
    cause = cause if judged.attempt.material.summed else f"a mean over unequal counts, {cause}"
    whole = next((attempt for attempt in made if attempt.way in ("own", "whole") and not attempt.agrees), None)
    if whole is not None:
        differences = [difference for result in whole.compared for difference in result.differences]
        parts = len(judged.attempt.run.reference.steps[0].part_losses)
        shares = [one for one in differences if abs(_factor(one) * parts - 1.0) < _SHARE]
        differing = (shares or differences)[0]
        message += f"not with the script on one rank, given the rows of all: {differing.name or 'the loss'} differs"
        if whole.run.tolerance.unknown:
            cause = whole.run.tolerance.unknown
        elif shares:
            cause = (
                f"it is 1/{parts} of that, as where a loss is a sum over rows, and gradients are averaged over parts"
            )
    else:
        message += f"the script could not be run on one rank with the rows of all: {why_not_whole(judged.reasons)}"
    help = _SUMMED if judged.attempt.material.summed else _PARTS
    check = Check(
        "whole batches", Verdict.INCONCLUSIVE, 1, 0, detail=f"the {kind} over data parts is assumed to be right"
    )
    return replace(
        judged,
        checks=(*judged.checks, check),
        findings=(*judged.findings, Finding("not_compared", message, cause=cause, help=help)),
    )


def _factor(differing: Difference) -> float:
    """Return how many times the right value it is; 0 where that is not known."""
    if differing.cause.kind == "scaled":
        return differing.cause.factor
    one = differing.name == "norm" and float(differing.expected)
    return float(differing.actual) / one if one else 0.0


# Ranks that hold the same elements.


def _with_dropout(
    runner: ScriptRunner, run: ProgramRun, layout: Layout
) -> tuple[tuple[Check, ...], tuple[Finding, ...]]:
    """Compare what ranks hold of the same elements once more, with dropout on: nothing else shows what they drop."""
    try:
        made = runner.on_ranks(dropout=True)
    except RanksFailed as failure:
        return (Check(COPIES, Verdict.INCONCLUSIVE, 0),), (
            Finding(failure.code, f"{failure.message}, with dropout on"),
        )
    result = compare_replicas(rank_records(made, layout, run.reference))
    found = tuple(
        of_dropout(f"copies of {one.name} on rank {one.rank} and others differ after step {one.step} with dropout on")
        for one in result.differences[:1]
    )
    check = replace(result.check(Verdict.TESTED_EXACT), name=COPIES, supporting=True)
    return (check,) if result.count else (), found
