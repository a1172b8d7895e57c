"""Find the ranks that train on the same rows: they work together on them, or several do the work of one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nnscaler.errors import few
from verify.external.torchrun.compare_with_one_rank import Judged
from verify.external.torchrun.match_one_rank import Layout, same_data
from verify.external.torchrun.replace_data_given_to_model import close
from verify.external.torchrun.watched_script_record import ScriptRecord, Tensors
from verify.results.finding import Finding
from verify.results.report import Check
from verify.results.verdict import Verdict

_DIVIDE = (
    "divide the rows: a DistributedSampler over all ranks in the loader, other seeds, or other places of the data set; "
    "where one batch for all is meant, to measure speed say, draw it whole by torch.randn or torch.randint"
)
_TOLD = "call `sampler.set_epoch(epoch)` before each epoch"


def replicas(judged: Judged, layout: Layout, records: Sequence[ScriptRecord]) -> tuple[int, ...] | None:
    """Return a number for each rank, equal for those that work together, where some take in the same data, compute the
    same loss, and average their gradients or should: a reduction that is missing does not show. None where none do.

    These are the ranks of DDP or FSDP; without either, those that hold the same elements of everything, as far as the
    script was compared.
    """
    if len(layout.parts) == 1:
        return None
    losses: dict[int, Tensor] = {}
    for part, record in zip(layout.parts, records, strict=True):
        own = record.steps[0].losses
        loss = torch.stack(own).sum() if own else None
        if loss is not None and not close(loss, losses.setdefault(part, loss)):
            return None  # each rank does a part of the work
    wrapped = [record.replica for record in records if record.replica is not None]
    if len(wrapped) == len(records):
        numbers = [number for number, _ in wrapped]
    elif layout.count > 1 or judged.attempt is None:
        return None
    else:
        holding = [
            sorted((p.name, p.key) for p in r.pieces if p.trained and p.kind == "parameter" and p.key is not None)
            for r in judged.attempt.run.records
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


def rows_of_others(judged: Judged, records: Sequence[ScriptRecord], layout: Layout) -> tuple[Check, Finding] | None:
    """Return what is open where a data part takes in, at another time, what another one does: not all of the data are
    divided by rank. None where one rank takes in the same data as all of them together, and for drawn stand-ins.

    A single row that is drawn twice is chance; what every part takes in at every time is not divided at all.
    """
    if judged.attempt is None or judged.attempt.way == "own" or layout.count == 1 or all(map(_drawn, records)):
        return None
    ranks = [layout.parts.index(part) for part in range(layout.count)]
    for kind in sorted(set.intersection(*(set(records[rank].events) for rank in ranks)) - {"target"}):
        taken = [records[rank].events[kind] for rank in ranks]
        for column in zip(*taken, strict=False):
            if len({len(event) for event in column}) > 1:
                return None  # of other tensors in each part
        places = min(len(event) for events in taken for event in events)
        for place in range(places):
            found = _found_twice([[event[place] for event in events] for events in taken])
            if found is not None:
                (part, number), (other, earlier) = found
                return _of_others(records, kind, (ranks[part], number), (ranks[other], earlier))
    return None


_Place = tuple[int, int]  # a data part or rank, and a number of what it takes in


def _found_twice(parts: Sequence[Sequence[Tensor]]) -> tuple[_Place, _Place] | None:
    """Return where a part takes in what another one has, and where that one does: rows that are not the same in all."""
    if all(all(torch.equal(own, others[0]) for own in others) for others in zip(*parts, strict=False)):
        return None
    places = [(part, number) for number in range(max(map(len, parts))) for part in range(len(parts))]
    seen: list[_Place] = []
    for part, number in places:
        own = parts[part][number] if number < len(parts[part]) else None
        if own is None or own.dim() < 2 or len(own) < 2 or len(own.unique()) < 2:
            continue
        for other, earlier in seen:
            if other != part and torch.equal(parts[other][earlier], own):
                return (part, number), (other, earlier)
        seen.append((part, number))
    return None


def _of_others(records: Sequence[ScriptRecord], kind: str, here: _Place, there: _Place) -> tuple[Check, Finding]:
    def told(at: _Place) -> str:
        rank, number = at
        step = sum(one.taken.get(kind, 0) <= number for one in records[rank].steps)
        return f"rank {rank} in step {step} ({'batch' if kind.startswith('batch') else kind} {number + 1})"

    message = f"ranks take in rows of each other: what comes in on {told(here)} comes in on {told(there)} as well"
    cause = (
        "rows are not divided by rank: where each rank goes on from its own place in the data, the next place is that "
        "of all ranks on; where rows are drawn, each rank draws others"
    )
    ranks = f"ranks {min(here[0], there[0])} and {max(here[0], there[0])}"
    check = Check("other rows on every rank", Verdict.INCONCLUSIVE, 0, detail=f"some are the same on {ranks}")
    return check, Finding("same_rows", message, cause=cause, help=_DIVIDE)


def sampled_twice(records: Sequence[ScriptRecord], layout: Layout) -> tuple[Check, Finding] | None:
    """Return what is open where the samplers of data parts give rows of an epoch to several of them, beside those that
    fill up the last batches: a few steps need not come to these."""
    ranks = [layout.parts.index(part) for part in range(layout.count)]
    for kind in sorted(set.intersection(*(set(records[rank].sampled) for rank in ranks))):
        sampled = [records[rank].sampled[kind] for rank in ranks]
        if any(one.replicas == 1 for one in sampled) or all(torch.equal(s.rows, sampled[0].rows) for s in sampled):
            continue  # all rows, or the same ones, on purpose
        rows = torch.cat([one.rows for one in sampled])
        if (twice := len(rows) - len(rows.unique())) <= sampled[0].padded:
            continue
        message = (
            f"samplers give rows to several ranks: of the {len(rows)} rows that all ranks take in the first epoch "
            f"(batch {int(kind.split()[1]) + 1}), {twice} are there already, and as many others may be left out"
        )
        seeds = [f"{one.shuffle} on rank {rank}" for rank, one in zip(ranks, sampled, strict=True)]
        shuffled = len({one.shuffle for one in sampled}) > 1
        cause = f"they shuffle by other numbers, seed and epoch together: {few(seeds)}" if shuffled else None
        help = "give the sampler of every rank the same seed and epoch, the same `num_replicas`, and its own `rank`"
        check = Check("other rows on every rank", Verdict.INCONCLUSIVE, 0, detail="samplers give some to several")
        return check, Finding("same_rows", message, cause=cause, help=help)
    return None


def same_order(records: Sequence[ScriptRecord]) -> tuple[Check, Finding] | None:
    """Return what is open where a sampler shuffles the rows of a later epoch as those of the first one."""
    if not any(one.again for record in records for one in record.sampled.values()):
        return None
    message = "a DistributedSampler shuffles, and a later epoch has the rows of the first one in the same order"
    check = Check("other rows on every rank", Verdict.INCONCLUSIVE, 0, detail="epochs have one order of the rows")
    return check, Finding("same_rows", message, cause="it goes by its seed and epoch alone", help=_TOLD)


def never_told(records: Sequence[ScriptRecord]) -> str | None:
    """Return the note on a sampler that shuffles, and that is not told the number of its first epoch."""
    sampled = [one for record in records for one in record.sampled.values() if one.shuffle is not None]
    if all(one.told or one.again for one in sampled):
        return None
    return (
        "a DistributedSampler that shuffles is not told the number of the first epoch (`set_epoch`): unless it is told "
        "later, every epoch has its rows in the same order; `--steps` beyond an epoch shows that"
    )


def same_where_trained(judged: Judged, records: Sequence[ScriptRecord], layout: Layout) -> tuple[Check, Finding] | None:
    """Return what is open where data parts train on the same rows, and differ in others that a loss takes no part in,
    as those that each rank measures its model on: a missing reduction does not show. None for drawn stand-ins."""
    if judged.attempt is None or layout.count == 1 or all(map(_drawn, records)):
        return None
    data = []
    for record in (records[layout.parts.index(part)] for part in range(layout.count)):
        trained = sorted(record.trained)
        data.append(
            (trained, {kind: tuple(record.events[k][n] for k, n in trained if k == kind) for kind, _ in trained})
        )
    for part, (numbers, events) in enumerate(data):
        twin = next((one for one in range(part) if data[one][0] == numbers and same_data(data[one][1], events)), None)
        if twin is not None and numbers:
            ranks = " and ".join(str(layout.parts.index(one)) for one in (twin, part))
            message = f"ranks {ranks} train on the same rows, and only data that no backward pass begins with differ"
            cause = "together they do the work of one, and a reduction between them that is missing does not show"
            check = Check("other rows on every rank", Verdict.INCONCLUSIVE, 0, detail=f"trained on the same on {ranks}")
            return check, Finding("same_rows", message, cause=cause, help=_DIVIDE)
    return None


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
