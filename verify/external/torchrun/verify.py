"""Verify an unmodified script that torchrun starts: its ranks against the same script on one rank."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from op_registry.call import dtype_name

from nnscaler.errors import few
from nnscaler.exception_in_one_line import first_line
from verify.external.ranks.attention_and_float64_of_torch import exact_throughout
from verify.external.ranks.run_result import RanksFailed
from verify.external.torchrun.compare_with_one_rank import SAID, SAID_OF_SUM, Judged, judge
from verify.external.torchrun.cuda_on_cpu import WITHOUT_GPU, asks_for_gpu
from verify.external.torchrun.find_comparison_gaps import other_rows_on_shards
from verify.external.torchrun.find_ranks_with_same_rows import (
    counts_for_each_rank,
    never_told,
    replicas,
    rows_of_others,
    same_order,
    same_rows,
    same_where_trained,
    sampled_twice,
)
from verify.external.torchrun.match_one_rank import Layout, NoParts, material_of, parts_of, unequal_starts
from verify.external.torchrun.rerun_with_other_gradient_sizes import (
    with_early_norms,
    with_larger_gradients,
    without_limits,
)
from verify.external.torchrun.rerun_with_unequal_labels import with_unequal_labels
from verify.external.torchrun.run_ranks_and_reference import Failed, ScriptRunner
from verify.external.torchrun.watched_script_record import ScriptRecord
from verify.external.unequal_label_counts import NAME
from verify.results.finding import Finding
from verify.results.report import Check, Report, environment
from verify.results.verdict import Verdict

TOOL = "verify-external"
_EQUAL_BY_SEED = (
    "every rank takes in the same data, by its seed alone: each gradient is that of the rows of all ranks, so that "
    "each rank was given other data, made from its own"
)
_CHECK_FILE = (
    "let it run as `torchrun --nproc-per-node 1` would start it, with WORLD_SIZE=1, which a test of the number of "
    "ranks, or a stage that always sends to the next one, may forbid; or write a check file, whose `model()` is the "
    "plain model, and whose `step` may send and receive: docs/verify-external.md"
)
_NO_STEPS = (
    "steps of a `torch.optim.Optimizer` are watched: let the script make one before it ends, derive an optimizer of "
    "its own from that class, or write a check file, for a program that only infers one whose `step` returns a number "
    "that is made of its output: docs/verify-external.md"
)
_MORE = 4  # steps
_UNEQUAL_STEPS = (
    "let all ranks make as many steps, or watch no more than the fewest (`--steps`): where one of them has fewer "
    "batches than others, those go on without it"
)
_STARTS = (
    "copies: broadcast the parameters of rank 0, or seed every rank alike, before the first step; shards: cut them "
    "out of whole tensors that every rank makes alike"
)
_SAME_ROWS = "ranks that average their gradients take in the same data, and do the work of one"
_LABELS = (
    "every data part counts as many labels in these batches: a mean of the parts' means, which is another loss where "
    "they count different numbers, does not show (a check file tries such numbers)"
)
Progress = Callable[[str], None]


def verify_script(
    words: Sequence[str],
    *,
    ranks: int,
    steps: int = 2,
    dtype: str = "float64",
    timeout: float = 120.0,
    reference: str = "whole",
    progress: Progress = lambda text: None,
) -> Report:
    """Run a script on `ranks` processes over gloo until each optimizer has made its steps; compare it with one rank.

    dtype      "float64": every floating-point tensor is, where the script allows it; "own": those that it has
    timeout    seconds of each run of the script; there are up to six
    words      as `words_of_script` returns them
    reference  "whole": the script on one rank, with the rows of all; "parts": or the mean over the data parts

    """
    started = time.perf_counter()
    exact_throughout()
    with tempfile.TemporaryDirectory(prefix="nnscaler-torchrun-", ignore_cleanup_errors=True) as folder:
        double, parts = dtype == "float64", reference == "parts"
        runner = ScriptRunner(tuple(words), ranks, steps, timeout, Path(folder), double, parts)
        checks, found, notes, used = _verify(runner, progress)
    return Report(
        tool=TOOL,
        subject=runner.name,
        setting=f"on {ranks} ranks, in {used}",
        seed=0,
        checks=checks,
        findings=found,
        notes=tuple(dict.fromkeys(notes)),
        environment=environment() | {"executor": "gloo", "dtype": used},
        seconds=time.perf_counter() - started,
    )


Outcome = tuple[tuple[Check, ...], tuple[Finding, ...], tuple[str, ...], str]


def _verify(runner: ScriptRunner, progress: Progress) -> Outcome:
    name, notes = runner.name, list[str]()
    progress(f"{name} on {runner.ranks} ranks")
    try:
        records, runner = _run(runner, notes)
    except RanksFailed as failure:
        return _failed(runner, failure)
    used = "float64" if runner.double else dtype_name(records[0].dtype)
    notes += [note for record in records for note in record.notes]
    ended = ("the script runs to its steps", tuple(len(record.steps) for record in records))
    if min(ended[1]) == 0 or len(set(ended[1])) > 1:
        message = f"the ranks made {', '.join(map(str, ended[1]))} optimizer steps, so that nothing can be compared"
        help = _UNEQUAL_STEPS if min(ended[1]) else _NO_STEPS
        return *_undecided(message, runner.output(), help=help), tuple(notes), used
    try:
        layout = Layout(parts_of(records))
    except NoParts as problem:
        return *_undecided(f"the data cannot be matched: {problem}", None), tuple(notes), used
    unequal = _unequal_starts(records)
    if unequal is not None:
        return *unequal, tuple(notes), used
    progress(f"{name} on one rank")
    judged = judge(runner, records, layout, material_of(records, layout.parts))
    apart = replicas(judged, layout, records)
    if apart is not None and (judged.passes or judged.attempt is None):
        progress(f"{name}, with other data on every rank")
        again = same_rows(records, layout, apart)
        return _varied(runner, [*notes, *([] if again else [_SAME_ROWS])], used, apart, again)
    if counts_for_each_rank(judged, layout):
        progress(f"{name}, with other data on every rank")
        other = _on_other_data(runner, range(runner.ranks))
        if not isinstance(other, str) and other.judged.passes:
            # equal seeds make equal data: what looks like one batch, counted twice, may be rows of two ranks
            notes.append(_EQUAL_BY_SEED)
            return *_outcome(other.judged), (*notes, *_said(other.judged, other.layout, other.records)), used
    judged = with_larger_gradients(runner, judged, records, layout)
    judged = with_unequal_labels(runner, judged, records, layout)
    judged = with_early_norms(without_limits(runner, judged, layout), records, layout)
    notes += _said(judged, layout, records)
    checks, found = _outcome(judged)
    if judged.attempt is not None:
        cause = other_rows_on_shards(records, judged.attempt.run, layout)
        found = tuple(finding if finding.cause else replace(finding, cause=cause) for finding in found)
    others = rows_of_others(judged, records, layout) or same_where_trained(judged, records, layout)
    others = others or sampled_twice(records, layout) or same_order(records)
    if judged.passes and others is not None:
        checks, found = (*checks, others[0]), (*found, others[1])
    return checks, found, tuple(notes), used


def _varied(
    runner: ScriptRunner, notes: list[str], used: str, apart: Sequence[int], again: tuple[Check, Finding] | None
) -> Outcome:
    """Verify a script whose ranks do the same once more, with other data on ranks of other numbers.

    As they are, they agree with one rank: that would hide a missing reduction. Where they disagree with other data,
    nothing is decided, for the script may rely on equal ones. `again`: what is open though they agree.
    """
    message = "ranks take in the same data and compute the same loss: an average over them changes nothing"
    other = _on_other_data(runner, apart)
    if isinstance(other, str):
        return *_undecided(f"{message}{other}", None, "not_compared"), tuple(notes), used
    judged = other.judged
    if judged.passes:
        notes.append("with other data on every rank, made from its own, all of the following agrees")
        judged = with_larger_gradients(runner, judged, other.records, other.layout, apart)
        checks, found = _outcome(judged)
        checks, found = (checks, found) if again is None else ((*checks, again[0]), (*found, again[1]))
        return checks, found, (*notes, *_said(judged, other.layout, other.records)), used
    why = [f"{finding.message}: {finding.cause}" for finding in judged.findings[:1]]
    why += [reason.text for reason in judged.reasons[:1]] if not why else []
    refuted = any(check.verdict is Verdict.REFUTED for check in judged.checks)
    words = "they do not work together: " if refuted else ""
    message = f"{message}. With other data on every rank {words}{'; '.join(why)}"
    help = next((finding.help for finding in judged.findings), None)
    return *_undecided(message, None, "not_compared", help), tuple(notes), used


@dataclass(frozen=True)
class _Other:
    """The run of a script with other data on every rank."""

    records: tuple[ScriptRecord, ...]
    layout: Layout
    judged: Judged


def _on_other_data(runner: ScriptRunner, apart: Sequence[int]) -> _Other | str:
    """Run the script with other data on ranks of other numbers, and judge it; return why not, as the end of a sentence,
    where it cannot be."""
    try:
        records = runner.on_ranks(vary=apart)
        layout = Layout(parts_of(records))
    except (RanksFailed, NoParts) as problem:
        return f", and with other data on every rank the script does not run: {first_line(problem, 300)}"
    if layout.count < len(set(apart)) or len({len(record.steps) for record in records}) > 1:
        return ""
    return _Other(records, layout, judge(runner, records, layout, material_of(records, layout.parts)))


def _outcome(judged: Judged) -> tuple[tuple[Check, ...], tuple[Finding, ...]]:
    if judged.attempt is not None:
        return judged.checks, judged.findings
    reasons = sorted(judged.reasons, key=lambda reason: reason.mismatch != "unequal_starts")
    texts = dict.fromkeys(reason.text for reason in reasons)
    message = f"the script on one rank is no reference for the ranks: {'; '.join(texts)}"
    return _undecided(message, None, help=_STARTS if reasons[0].mismatch == "unequal_starts" else _CHECK_FILE)


def _on_ranks(runner: ScriptRunner) -> tuple[ScriptRecord, ...]:
    """Run the script on all ranks. Where one was stopped after its steps, and others wait for it before theirs, it goes
    on for a few more: a deadlock is one that the script makes by itself."""
    steps = runner.steps
    for more in (0, _MORE):
        try:
            return replace(runner, steps=steps + more).on_ranks()
        except RanksFailed as failure:
            if failure.code != "deadlock" or not (stopped := runner.stopped()):
                raise
    named = f"ranks {', '.join(map(str, stopped))} had" if len(stopped) > 1 else f"rank {stopped[0]} had"
    raise RanksFailed(
        "timed_out", f"{named} made {steps + _MORE} steps, and others wait in fewer: these may be all of theirs"
    )


def _run(runner: ScriptRunner, notes: list[str]) -> tuple[tuple[ScriptRecord, ...], ScriptRunner]:
    """Run the script on all ranks, in float64 if it can; return what they did, and how it was run."""
    told = ""
    if runner.double:
        try:
            return _on_ranks(runner), runner
        except RanksFailed as failure:
            if failure.code != "rank_raises":
                raise
            told = f"the script does not run in float64 ({first_line(failure.message, 300)}): its own dtypes were used"
    runner = replace(runner, double=False)
    records = _on_ranks(runner)
    notes += [told] if told else []
    return records, runner


def _undecided(
    message: str, output: str | None, code: str = "nothing_checked", help: str | None = None
) -> tuple[tuple[Check, ...], tuple[Finding, ...]]:
    example = {"output": output} if output else {}
    check = Check("the script on one rank", Verdict.INCONCLUSIVE, 0, detail="nothing was compared")
    return (check,), (Finding(code, message, counter_example=example, help=help),)


def _failed(runner: ScriptRunner, failure: RanksFailed) -> Outcome:
    """Judge a run of the ranks that did not end: it refutes the script where one rank ends well."""
    verdict = Verdict.INCONCLUSIVE if failure.code == "timed_out" else Verdict.REFUTED
    code, message = failure.code, failure.message
    help = _UNEQUAL_STEPS if code == "timed_out" and runner.stopped() else None
    if failure.code == "rank_raises" and asks_for_gpu(message):
        verdict, code, help = Verdict.INCONCLUSIVE, "nothing_checked", WITHOUT_GPU
        message = f"the script asks for a GPU, and there is none here: {message}"
    elif failure.code in ("rank_raises", "rank_died"):
        try:
            replace(runner, double=False).alone()
        except Failed as alone:
            verdict, code = Verdict.INCONCLUSIVE, "nothing_checked"
            message = f"the script fails on one rank as well: {alone}; on its ranks: {message}"
    example = {} if failure.rank is None else {"rank": str(failure.rank)}
    example |= {f"rank {rank}": text for rank, text in failure.by_rank.items() if text}
    output = runner.output()
    example |= {"output": output} if output else {}
    check = Check("ranks run to their end", verdict, 1, int(verdict is Verdict.REFUTED))
    finding = Finding(code, message, failure.where, example, help=help)
    return (check,), (finding,), (), "float64" if runner.double else "its own dtypes"


def _unequal_starts(records: Sequence[ScriptRecord]) -> tuple[tuple[Check, ...], tuple[Finding, ...]] | None:
    """Refute replicas that start from other values and are given the same gradients: nobody made them equal.

    None where there are none. Where gradients differ too, they may be parts of something larger.
    """
    first, *others = records
    unequal = unequal_starts(records)
    shards = {held.name for held in first.held if held.filled}  # of an optimizer's own, which are to differ
    replicas = [
        name for name in unequal if name not in shards and all(_same_gradient(first, other, name) for other in others)
    ]
    if not replicas:
        return None
    named = few(replicas, 4)
    message = f"ranks start from different values of {named}, and add the same gradients to them"
    check = Check("replicas start equal", Verdict.REFUTED, len(first.held), len(replicas))
    help = "broadcast the parameters of rank 0, or seed every rank alike, before the first step"
    return (check,), (Finding("replicas_differ", message, None, {"tensors": ", ".join(replicas)}, help=help),)


def _same_gradient(one: ScriptRecord, other: ScriptRecord, name: str) -> bool:
    a, b = one.steps[0].gradients.get(name), other.steps[0].gradients.get(name)
    return a is not None and b is not None and bool(a.abs().max() > 0) and torch.equal(a, b)


def _unequal_settings(records: Sequence[ScriptRecord]) -> str | None:
    """Say which number of the optimizer is another one on some rank, in the first step in which one is."""
    for number, steps in enumerate(zip(*(record.steps for record in records), strict=False)):
        first = steps[0].settings
        for record, step in zip(records, steps, strict=True):
            for here, there in zip(step.settings, first, strict=False):
                for name in here:
                    if name in there and here[name] != there[name]:
                        values = f"{here[name]} on rank {record.rank}, and {there[name]} on rank 0"
                        return f"in step {number}, the optimizer's {name} is {values}"
    return None


def _as_many_labels(layout: Layout, records: Sequence[ScriptRecord]) -> bool:
    """Return whether the data hold integers, and as many negative ones, which losses ignore, in every data part."""
    counts = [
        [int((t < 0).sum()) for kind in sorted(own) for event in own[kind] for t in event if t.dtype == torch.int64]
        for own in layout.events(records)
    ]
    return bool(counts[0]) and all(own == counts[0] for own in counts)


def _said(judged: Judged, layout: Layout, records: Sequence[ScriptRecord]) -> list[str]:
    """Say what was assumed."""
    notes = []
    if layout.count > 1:
        by_part = [[str(r) for r, part in enumerate(layout.parts) if part == p] for p in range(layout.count)]
        text = "; ".join(" ".join(ranks) for ranks in by_part)
        notes.append(f"data parts, by what the ranks took in: {text} (ranks)")
    elif len(records) > 1:
        notes.append(
            "every rank takes in the same data, which is right for tensor and pipeline parallelism; with data "
            "parallelism a missing reduction does not show"
        )
    tried = any(check.name == NAME for check in judged.checks)
    if judged.passes and not tried and layout.count > 1 and _as_many_labels(layout, records):
        notes.append(_LABELS)
    groups = sorted({group for record in records for group in record.groups})
    if groups:
        notes.append(f"process groups: {', '.join(str(list(group)) for group in groups)}")
    if judged.attempt is not None:
        notes.append(SAID_OF_SUM if judged.attempt.material.summed else SAID[judged.attempt.way])
        notes += judged.attempt.notes
        pieces = [piece for record in judged.attempt.run.records for piece in record.pieces]
        by_value = sorted({piece.local for piece in pieces if piece.found == "value"})
        if by_value:
            notes.append(f"which part a rank holds was found from the values at the start: {few(by_value)}")
    if not judged.passes and (unequal := _unequal_settings(records)) is not None:
        notes.append(unequal)
    if (untold := never_told(records)) is not None:
        notes.append(untold)
    if any(record.drew for record in records):
        notes.append("the forward pass draws random numbers")
    return notes
