"""Run a script once more with unequal numbers of labels in its data parts, where they count as many by chance.

A mean over labels is a sum and a count, and the mean of the parts' means is right only where all parts count as many. A
script that pads its labels may have it so in the batches that are watched. Its ranks run once more with ever more of
the labels ignored from part to part, wherever they come in, and the script on one rank is given the same ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from verify.external.ranks.run_result import RanksFailed
from verify.external.torchrun.compare_with_one_rank import Judged, attempt_of, judge
from verify.external.torchrun.match_one_rank import Layout, NoParts, material_of, parts_of
from verify.external.torchrun.replace_data_given_to_model import ignored_in
from verify.external.torchrun.run_ranks_and_reference import Failed, NotMatched, ScriptRunner
from verify.external.torchrun.watched_script_record import ScriptRecord
from verify.external.unequal_label_counts import NAME
from verify.results.report import Check
from verify.results.verdict import Verdict, merge

_SAID = "with unequal numbers of labels in the data parts"


def with_unequal_labels(
    runner: ScriptRunner, judged: Judged, records: Sequence[ScriptRecord], layout: Layout
) -> Judged:
    """Compare once more with other numbers of labels in each data part, where all agrees, some are ignored, and as many
    count in each. What shows nothing is left out: labels that no mean is taken over, and runs that do not end well."""
    constants = tuple(sorted({value for record in records for value in record.ignored}))
    if not judged.passes or runner.parts or layout.count == 1 or not _counted_alike(records, layout, constants):
        return judged
    kept = [(part + 1) / layout.count for part in layout.parts]
    try:
        made = runner.on_ranks(kept=kept, ignored=constants)
        if parts_of(made) != layout.parts or not all(record.steps for record in made):
            return judged
        again = judge(runner, made, layout, material_of(made, layout.parts))
        if again.attempt is None or not (again.attempt.agrees or _refuted(again)):
            return judged
        own = replace(again.attempt.material, scalars=False)
        if again.passes and attempt_of(runner, made, layout, own, "part").agrees:
            return judged
    except (RanksFailed, NoParts, NotMatched, Failed):
        return judged
    verdict = merge([check.verdict for check in again.checks])
    count, refuted = sum(check.count for check in again.checks), sum(check.refuted for check in again.checks)
    found = tuple(replace(finding, message=f"{_SAID}, {finding.message}") for finding in again.findings)
    check = Check(NAME, verdict, count, refuted)
    return replace(judged, checks=(*judged.checks, check), findings=(*judged.findings, *found))


def _refuted(judged: Judged) -> bool:
    return any(check.verdict is Verdict.REFUTED for check in judged.checks)


def _counted_alike(records: Sequence[ScriptRecord], layout: Layout, constants: Sequence[int]) -> bool:
    """Return whether some labels that come in are ignored, and as many count in every data part."""
    counts = [
        [_counts(t, constants) for kind in sorted(own) for event in own[kind] for t in event]
        for own in layout.events(records)
    ]
    return any(count for count in counts[0]) and all(own == counts[0] for own in counts)


def _counts(tensor: Tensor, constants: Sequence[int]) -> dict[int, int]:
    return {value: int((tensor == value).sum()) for value in ignored_in(tensor, constants)}
