"""Run a script once more with gradients of another size, where limits on gradients hide a mistake.

Gradients are made larger where they are too small to show what a script does to them by their size, and smaller where
that hides what else differs.

A limit that no gradient reaches hides two mistakes: the norm of the wrong elements, of a shard or before a reduction,
and another limit on every number of ranks. One that all gradients exceed hides a factor of all of them. Norms that
torch's functions take, and limits that they are given, are compared by themselves: where limits differ, larger
gradients show what they do. So they do where a script takes norms in code of its own, which is seen in the gradients
that it scales.

What scales all gradients by their norm mixes up what differs: one that is not reduced makes each of them another
number, of which no cause can be told. Gradients that no limit reaches have their causes.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import ceil, inf, isclose, isfinite, log2

from nnscaler.errors import few
from nnscaler.exception_in_one_line import first_line
from verify.external.comparison.compare import LATE
from verify.external.comparison.comparison_records import ComparisonResult
from verify.external.comparison.findings_from_differences import findings
from verify.external.ranks.run_result import RanksFailed
from verify.external.torchrun.compare_with_one_rank import Attempt, Judged, attempt_of, explained
from verify.external.torchrun.feed_data_of_all_ranks import Material
from verify.external.torchrun.match_one_rank import Layout, NoParts, material_of, parts_of
from verify.external.torchrun.run_ranks_and_reference import Failed, NotMatched, ScriptRunner
from verify.external.torchrun.watched_script_record import Clipped, ScriptRecord
from verify.programs.causes.wrong_tensor import VAGUE
from verify.results.finding import Finding
from verify.results.report import Check
from verify.results.verdict import Verdict

BEYOND, WITHIN = "gradients beyond a limit", "gradients within a limit"
_LOUDER = 14  # bits: a power of 2 is exact in every dtype
_LOUDEST = 60
_QUIETER = 24
_MIXED = frozenset((*VAGUE, "scaled"))  # kinds of cause that a limit may make of others
_UNLIMITED = "with gradients that no limit reaches"
_LIMIT = "what limits it differs, a norm of other elements or another limit: where no limit is reached, gradients agree"
_EARLY = (
    "the first norm that is taken in the step is that of the rank's own gradients: they are clipped before they are "
    "averaged over the data parts"
)
_SAME = 1e-3  # a relative difference of limits that are computed of gradients, by rounding
_BY_ITSELF = "the script takes their norm by itself"
_BY_HAND = "clip by `torch.nn.utils.clip_grad_norm_`, or by `clip_grads_with_norm_`, whose norms are compared"
_ONE_LIMIT = "clip by a limit that does not depend on the number of ranks"


def with_larger_gradients(
    runner: ScriptRunner,
    judged: Judged,
    records: Sequence[ScriptRecord],
    layout: Layout,
    vary: Sequence[int] | None = None,
) -> Judged:
    """Compare the first steps once more with larger gradients where all agrees, and the script clips by other limits
    than on one rank; with larger and with smaller ones where it measures gradients by itself.

    vary  as in the run that is judged: the data are others on ranks of other numbers
    """
    agreed = judged.attempt
    if agreed is None or not judged.passes:
        return judged
    limits = _first_unequal(records, agreed)
    if limits is None and not any(record.measured for record in records):
        return judged
    if limits is not None:
        words = f"with gradients {2.0**limits.bits:.0f} times as large, for {limits.text}"
        size = _Size(BEYOND, limits.bits, limits.step + 1, words, limits.text, _ONE_LIMIT)
        return _compared_at(size, runner, judged, layout, vary)
    for check, bits, words in ((BEYOND, _LOUDER, f"{2**_LOUDER} times as large"), (WITHIN, -_QUIETER, "so small")):
        if judged.passes:
            size = _Size(check, bits, 1, f"with gradients {words}, for {_BY_ITSELF}", _BY_ITSELF, _BY_HAND)
            judged = _compared_at(size, runner, judged, layout, vary)
    return judged


@dataclass(frozen=True)
class _Size:
    """Gradients of another size.

    check  that is made of them
    bits   of the factor
    steps  that are run
    words  that say so
    why    it is tried
    help   where nothing can be compared
    """

    check: str
    bits: int
    steps: int
    words: str
    why: str
    help: str


def _compared_at(
    size: _Size, runner: ScriptRunner, judged: Judged, layout: Layout, vary: Sequence[int] | None
) -> Judged:
    """Compare gradients of another size, too."""
    agreed = judged.attempt
    assert agreed is not None
    other = replace(runner, steps=size.steps, louder=2.0**size.bits)
    try:
        made = other.on_ranks(vary)
        if not all(record.steps for record in made) or parts_of(made) != layout.parts:
            raise NotMatched("the ranks make no step, or take in other data")
        attempt = attempt_of(other, made, layout, _material_like(agreed, made, layout), agreed.way)
        if attempt.filled.unplaced:
            raise NotMatched(f"{few(attempt.filled.unplaced)} cannot be found on one rank")
    except (RanksFailed, NoParts, NotMatched, Failed) as problem:
        check = Check(size.check, Verdict.INCONCLUSIVE, 0, detail=size.why)
        message = f"{size.words}, nothing was compared: {first_line(problem, 300)}"
        return _with(judged, check, (Finding("not_compared", message, help=size.help),))
    if not attempt.agrees:
        attempt = explained(other, attempt, [attempt])
    compared = [r for r in attempt.compared if not r.name.endswith("after steps")]  # a first step may have a rate of 0
    whole = ComparisonResult.of_all(size.check, compared)
    found = tuple(replace(f, message=f"{size.words}: {f.message}") for f in findings(attempt.run, compared))
    return _with(judged, whole.check(Verdict.TESTED_EXACT if runner.double else Verdict.TESTED_CALIBRATED), found)


def _material_like(agreed: Attempt, made: Sequence[ScriptRecord], layout: Layout) -> Material:
    """Return what a run on one rank is fed with of these records, as it was in the attempt that agreed."""
    material = material_of(made, layout.parts)
    draws = material.draws if agreed.material.draws else ()
    return replace(material, draws=draws, scalars=agreed.material.scalars)


def without_limits(runner: ScriptRunner, judged: Judged, layout: Layout) -> Judged:
    """Find the causes of gradients that differ after something has limited them, in a run in which nothing does."""
    agreed = judged.attempt
    vague = [f for f in judged.findings if f.code == "gradient_differs" and f.counter_example.get("cause") in _MIXED]
    if agreed is None or not vague:
        return judged
    steps = 1 + max(int(finding.counter_example.get("step", 0)) for finding in vague)
    quiet = replace(runner, steps=steps, louder=2.0**-_QUIETER)
    try:
        made = quiet.on_ranks()
        material = _material_like(agreed, made, layout)
        attempt = attempt_of(quiet, made, layout, material, agreed.way)
    except (RanksFailed, NoParts, NotMatched, Failed):
        return judged
    if not attempt.agrees:
        attempts = [attempt]
        with suppress(NotMatched, Failed):  # it says whose rows a gradient is of
            attempts.append(attempt_of(quiet, made, layout, material, "part"))
        attempt = explained(quiet, attempt, attempts)
    compared = [result for result in attempt.compared if result.name in ("gradients", LATE)]
    causes = findings(attempt.run, compared)
    if causes:
        limited = any(record.measured or any(step.clipped for step in record.steps) for record in made)
        words = f"{_UNLIMITED}, " if limited else ""
        told = tuple(replace(finding, message=f"{words}{finding.message}") for finding in causes)
        return replace(judged, findings=(*told, *(f for f in judged.findings if f not in vague)))
    told = tuple(replace(f, cause=_LIMIT) if f in vague else f for f in judged.findings)
    return replace(judged, findings=told)


def with_early_norms(judged: Judged, records: Sequence[ScriptRecord], layout: Layout) -> Judged:
    """Say of norms that differ whether the first one of a step is that of a rank's own gradients: of micro-batches that
    are clipped before they are averaged, the later ones are norms of what this has made of them."""
    attempt = judged.attempt
    if attempt is None or not attempt.own_norms:
        return judged
    told = []
    for finding in judged.findings:
        example = finding.counter_example
        if finding.code == "gradient_norm_differs" and example.get("cause") in VAGUE:
            step, rank = int(example["step"]), int(example["rank"])
            calls, right = records[rank].steps[step].clipped, attempt.clipped[step]
            own = attempt.own_norms[layout.parts[rank]][step]
            if calls and right and own and own[0] is not None and _is_own(calls[0].size, own[0], right[0].size):
                finding = replace(finding, cause=_EARLY, counter_example={**example, "cause": "missing_reduction"})
        told.append(finding)
    return replace(judged, findings=tuple(told))


def _is_own(size: float, own: float, right: float) -> bool:
    return isclose(size, own, rel_tol=_SAME) and not isclose(size, right, rel_tol=_SAME)


@dataclass(frozen=True)
class _UnequalLimits:
    """The first step in which ranks clip by another limit than one rank does.

    text  what they are
    bits  of a factor that takes every gradient beyond them
    """

    step: int
    text: str
    bits: int


def _first_unequal(records: Sequence[ScriptRecord], agreed: Attempt) -> _UnequalLimits | None:
    for number, alone in enumerate(agreed.clipped):
        for record in records:
            ranks = record.steps[number].clipped
            pairs = [(one, other) for one, other in _pairs(ranks, alone) if not _same(one, other)]
            if pairs:
                one, other = pairs[0]
                text = f"rank {record.rank} clips by {one.limit:.3g}, and one rank by {other.limit:.3g}"
                return _UnequalLimits(number, text, max(_bits(call) for pair in pairs for call in pair))
    return None


def _pairs(ranks: Sequence[Clipped], alone: Sequence[Clipped]) -> list[tuple[Clipped, Clipped]]:
    """Return each call of a rank with that of one rank, which may make other numbers of them: of stages, say.

    Who makes no call has no limit.
    """
    if len(ranks) == len(alone):
        return list(zip(ranks, alone, strict=True))
    if not alone:
        return [(one, replace(one, limit=inf)) for one in ranks]
    if not ranks:
        return [(replace(other, limit=inf), other) for other in alone]
    return [(one, next((other for other in alone if _same(one, other)), alone[0])) for one in ranks]


def _same(one: Clipped, other: Clipped) -> bool:
    return one.kind == other.kind and isclose(one.limit, other.limit, rel_tol=_SAME)


def _bits(call: Clipped) -> int:
    """Return the power of 2 that takes gradients beyond a limit, where there is one."""
    if call.size <= 0 or call.limit <= 0 or not isfinite(call.limit / call.size):
        return _LOUDER
    return min(_LOUDEST, max(_LOUDER, ceil(log2(call.limit / call.size)) + 1))


def _with(judged: Judged, check: Check, found: tuple[Finding, ...]) -> Judged:
    return replace(judged, checks=(*judged.checks, check), findings=(*judged.findings, *found))
