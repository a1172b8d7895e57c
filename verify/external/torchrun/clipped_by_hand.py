"""Try what a script does to gradients by their norm, in code of its own, where gradients are too small to show it.

A limit that no gradient reaches hides a norm of the wrong elements: of a shard, or before a reduction. Norms that
torch's functions take are compared by themselves; what a script computes is seen in the gradients that it scales.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from verify.external.comparison.comparison_records import ComparisonResult
from verify.external.comparison.findings import findings
from verify.external.ranks.run_result import RanksFailed
from verify.external.torchrun.compare_with_one_rank import Judged, attempt_of, explained
from verify.external.torchrun.match_one_rank import Layout, NoParts, material_of, parts_of
from verify.external.torchrun.records import ScriptRecord
from verify.external.torchrun.reference_processes import Failed, NotMatched, first_line
from verify.external.torchrun.run_ranks_and_reference import ScriptRunner
from verify.results.finding import Finding
from verify.results.report import Check
from verify.results.verdict import Verdict

NAME = "gradients beyond a limit"
_LOUDER = 2.0**14  # exact in every dtype
_WORDS = f"with gradients {_LOUDER:.0f} times as large, for the script takes their norm by itself"


def with_larger_gradients(
    runner: ScriptRunner,
    name: str,
    judged: Judged,
    records: Sequence[ScriptRecord],
    layout: Layout,
    double: bool,
    vary: Sequence[int] | None = None,
) -> Judged:
    """Compare the first step once more with larger gradients where all agrees, and the script measures gradients.

    vary  as in the run that is judged: the data are others on ranks of other numbers
    """
    agreed = judged.attempt
    if agreed is None or not judged.passes or not any(record.measured for record in records):
        return judged
    loud = replace(runner, steps=1, louder=_LOUDER)
    try:
        made = loud.on_ranks(double, vary)
        if not all(record.steps for record in made) or parts_of(made) != layout.parts:
            raise NotMatched("the ranks make no step, or take in other data")
        material = material_of(made, layout.parts)
        material = material if agreed.material.draws else replace(material, draws=())
        attempt = attempt_of(loud, name, made, layout, material, double, agreed.way)
    except (RanksFailed, NoParts, NotMatched, Failed) as problem:
        check = Check(NAME, Verdict.INCONCLUSIVE, 0, detail="the script takes norms of gradients by itself")
        message = f"{_WORDS}, nothing was compared: {first_line(str(problem))}"
        help = "clip by `torch.nn.utils.clip_grad_norm_`, or by `clip_grads_with_norm_`, whose norms are compared"
        return _with(judged, check, (Finding("not_compared", message, help=help),))
    if not attempt.agrees:
        attempt = explained(loud, attempt, [attempt], double)
    compared = [r for r in attempt.compared if not r.name.endswith("after steps")]  # a first step may have a rate of 0
    differences = tuple(one for result in compared for one in result.differences)
    worst = max(result.worst for result in compared)
    whole = ComparisonResult(NAME, sum(result.count for result in compared), differences, worst)
    found = tuple(replace(f, message=f"{_WORDS}: {f.message}") for f in findings(attempt.run, compared))
    return _with(judged, whole.check(Verdict.TESTED_EXACT if double else Verdict.TESTED_CALIBRATED), found)


def _with(judged: Judged, check: Check, found: tuple[Finding, ...]) -> Judged:
    return replace(judged, checks=(*judged.checks, check), findings=(*judged.findings, *found))
