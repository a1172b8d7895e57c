"""Find the ranks that average their gradients and train on the same rows: the work of one, done by several."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from verify.external.torchrun.compare_with_one_rank import Judged
from verify.external.torchrun.find_and_replace_data import close
from verify.external.torchrun.match_one_rank import Layout
from verify.external.torchrun.watched_script_record import ScriptRecord, Tensors
from verify.results.finding import Finding
from verify.results.report import Check
from verify.results.verdict import Verdict

_DIVIDE = (
    "divide the rows: a DistributedSampler over all ranks in the loader, other seeds, or other places of the data set; "
    "where one batch for all is meant, to measure speed say, draw it whole by torch.randn or torch.randint"
)


def replicas(judged: Judged, layout: Layout, records: Sequence[ScriptRecord]) -> tuple[int, ...] | None:
    """Return a number for each rank, equal for those that work together, where some take in the same data, compute the
    same loss, and average their gradients or should: a reduction that is missing does not show. None where none do.

    These are the ranks of DDP or FSDP; without either, those that hold the same elements of everything.
    """
    if judged.attempt is None or len(layout.parts) == 1:
        return None
    run = judged.attempt.run
    losses: dict[int, Tensor] = {}
    for part, record in zip(layout.parts, run.records, strict=True):
        loss = record.steps[0].loss
        if loss is not None and not close(loss, losses.setdefault(part, loss)):
            return None  # each rank does a part of the work
    wrapped = [record.replica for record in records if record.replica is not None]
    if len(wrapped) == len(records):
        numbers = [number for number, _ in wrapped]
    elif layout.count > 1:
        return None
    else:
        holding = [
            sorted((p.name, p.key) for p in r.pieces if p.trained and p.kind == "parameter" and p.key is not None)
            for r in run.records
        ]
        numbers = [holding[:rank].count(own) for rank, own in enumerate(holding)]
    return tuple(numbers) if len(set(zip(layout.parts, numbers, strict=True))) > layout.count else None


def counts_for_each_rank(judged: Judged, layout: Layout) -> bool:
    """Return whether every rank takes in the same data, and all that differs is that many times the right value."""
    if judged.attempt is None or layout.count > 1:
        return False
    causes = [d.cause for result in judged.attempt.compared for d in result.differences]
    return bool(causes) and all(c.kind == "scaled" and abs(c.factor - len(layout.parts)) < 1e-3 for c in causes)


def same_rows(records: Sequence[ScriptRecord], layout: Layout, apart: Sequence[int]) -> tuple[Check, Finding] | None:
    """Return what is open where ranks of numbers that are `apart` take in the same rows; None where the script draws
    all of them, as stand-ins for data."""
    groups: list[list[int]] = [[] for _ in range(layout.count)]
    for rank, part in enumerate(layout.parts):
        if all(apart[rank] != apart[other] for other in groups[part]):
            groups[part].append(rank)
    if all(_drawn(record) for record in records):
        return None
    ranks = "ranks " + ", ranks ".join(" and ".join(map(str, group)) for group in groups if len(group) > 1)
    message = f"{ranks} take in the same rows and average their gradients: together they do the work of one"
    cause = "the average is the gradient of each of them, so that more ranks train on no more rows in a step"
    check = Check("other rows on every rank", Verdict.INCONCLUSIVE, 0, detail=f"the same on {ranks}")
    return check, Finding("same_rows", message, cause=cause, help=_DIVIDE)


def _drawn(record: ScriptRecord) -> bool:
    """Return whether a script draws what its model takes in: the numbers of each input are those of as many rows that
    it draws, and no loader gives any."""
    loaded = any(kind.startswith("batch") for kind in record.events)
    return not loaded and all(_is_drawn(event, record.draws) for event in record.events.get("input", ()))


def _is_drawn(event: Tensors, draws: Tensors) -> bool:
    return any(
        len(drawn) == len(tensor) and bool(torch.isin(tensor, drawn.to(tensor.dtype)).all())
        for tensor in event
        if tensor.dim() and not (tensor.is_complex() or tensor.dtype == torch.bool)
        for drawn in draws
        if drawn.dim() and not drawn.is_complex()
    )
