"""Try what a script does to gradients by their size where they are too small to show it.

A limit that no gradient reaches hides two mistakes: the norm of the wrong elements, of a shard or before a reduction,
and another limit on every number of ranks. Norms that torch's functions take, and limits that they are given, are
compared by themselves: where limits differ, larger gradients show what they do. So they do where a script takes norms
in code of its own, which is seen in the gradients that it scales.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, inf, isclose, isfinite, log2

from verify.external.comparison.comparison_records import ComparisonResult
from verify.external.comparison.findings import findings
from verify.external.ranks.run_result import RanksFailed
from verify.external.torchrun.compare_with_one_rank import Attempt, Judged, attempt_of, explained
from verify.external.torchrun.match_one_rank import Layout, NoParts, material_of, parts_of
from verify.external.torchrun.records import Clipped, ScriptRecord
from verify.external.torchrun.reference_processes import Failed, NotMatched, first_line
from verify.external.torchrun.run_ranks_and_reference import ScriptRunner
from verify.results.finding import Finding
from verify.results.report import Check
from verify.results.verdict import Verdict

NAME = "gradients beyond a limit"
_LOUDER = 14  # bits: a power of 2 is exact in every dtype
_LOUDEST = 60
_SAME = 1e-3  # a relative difference of limits that are computed of gradients, by rounding
_BY_ITSELF = "the script takes their norm by itself"
_BY_HAND = "clip by `torch.nn.utils.clip_grad_norm_`, or by `clip_grads_with_norm_`, whose norms are compared"
_ONE_LIMIT = "clip by a limit that does not depend on the number of ranks"


def with_larger_gradients(
    runner: ScriptRunner,
    name: str,
    judged: Judged,
    records: Sequence[ScriptRecord],
    layout: Layout,
    double: bool,
    vary: Sequence[int] | None = None,
) -> Judged:
    """Compare the first steps once more with larger gradients where all agrees, and the script measures gradients or
    clips by other limits than on one rank.

    vary  as in the run that is judged: the data are others on ranks of other numbers
    """
    agreed = judged.attempt
    if agreed is None or not judged.passes:
        return judged
    limits = _first_unequal(records, agreed)
    if limits is None and not any(record.measured for record in records):
        return judged
    why = _BY_ITSELF if limits is None else limits.text
    louder = 2.0 ** (_LOUDER if limits is None else limits.bits)
    words = f"with gradients {louder:.0f} times as large, for {why}"
    loud = replace(runner, steps=1 if limits is None else limits.step + 1, louder=louder)
    try:
        made = loud.on_ranks(double, vary)
        if not all(record.steps for record in made) or parts_of(made) != layout.parts:
            raise NotMatched("the ranks make no step, or take in other data")
        material = material_of(made, layout.parts)
        material = material if agreed.material.draws else replace(material, draws=())
        attempt = attempt_of(loud, name, made, layout, material, double, agreed.way)
    except (RanksFailed, NoParts, NotMatched, Failed) as problem:
        check = Check(NAME, Verdict.INCONCLUSIVE, 0, detail=why)
        message = f"{words}, nothing was compared: {first_line(str(problem))}"
        help = _BY_HAND if limits is None else _ONE_LIMIT
        return _with(judged, check, (Finding("not_compared", message, help=help),))
    if not attempt.agrees:
        attempt = explained(loud, attempt, [attempt], double)
    compared = [r for r in attempt.compared if not r.name.endswith("after steps")]  # a first step may have a rate of 0
    differences = tuple(one for result in compared for one in result.differences)
    worst = max(result.worst for result in compared)
    whole = ComparisonResult(NAME, sum(result.count for result in compared), differences, worst)
    found = tuple(replace(f, message=f"{words}: {f.message}") for f in findings(attempt.run, compared))
    return _with(judged, whole.check(Verdict.TESTED_EXACT if double else Verdict.TESTED_CALIBRATED), found)


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
