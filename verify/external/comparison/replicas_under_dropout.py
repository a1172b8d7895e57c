"""Compare replicas with each other under dropout: their gradients and losses are equal only if they drop the same.

With dropout on no rank can be compared with the plain model, but copies can: the gradients of ranks that hold the same
elements and see the same rows, and the losses of ranks that see the same rows, whatever they hold.

Worked example. Under tensor parallelism every rank drops of the same activation after a row-parallel linear. Seeds that
depend on the rank drop other elements on each of them: the losses differ, and so do the gradients of every copy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from op_registry.source_location import SourceLocation

from nnscaler.global_random_generators import generators_kept, moved, states
from nnscaler.runtime.tensor_bits_and_differences import difference, distance_of_copies, family_scale, same_bits
from nnscaler.tracing.export.independent_module_copies import copied_with_hooks
from nnscaler.tracing.float64_run import exact
from verify.external.comparison.comparison_records import ComparisonResult, Difference
from verify.external.observe_rank_run import RankRecord
from verify.external.parameter_mapping import RankPiece
from verify.external.program import Batch, ExternalProgram
from verify.external.reference import copied
from verify.results.finding import Finding
from verify.results.verdict import Verdict

NAME = "copies with dropout"
_CLOSE = 1e-7  # relative; in float64 copies are equal up to rounding


@dataclass(frozen=True)
class Unequal:
    """A parameter whose copies on two ranks have different gradients, or "" for their losses."""

    name: str
    ranks: tuple[int, int]
    relative: float


def draws(program: ExternalProgram, model: nn.Module, batch: Batch) -> bool:
    """Return whether the plain model drops anything: whether its loss depends on the seed."""
    losses = []
    for seed in (1, 2):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            losses.append(_loss(program, model, batch, dropout=True))
    return any(loss is None or not torch.equal(loss, losses[0]) for loss in losses if losses[0] is not None)


def draws_beside_dropout(program: ExternalProgram, model: nn.Module, batch: Batch) -> bool:
    """Return whether a step draws random numbers with dropout off, from generators of torch, Python or its own."""
    with generators_kept():
        before = states()
        one = _loss(program, model, batch, dropout=False)
        drew = bool(moved(before, states()))
        other = _loss(program, model, batch, dropout=False)
    return drew or (one is not None and other is not None and not torch.equal(one, other))


def _loss(program: ExternalProgram, model: nn.Module, batch: Batch, dropout: bool) -> Tensor | None:
    step, mine = program.reference_step or program.step, copied_with_hooks(model)
    with exact(mine, dropout=dropout, generators=True, recorded=False):
        loss = step(mine, copied(batch, torch.float64))
    return None if loss is None else loss.detach().clone()


def finding(message: str, where: SourceLocation | None = None, facts: Mapping[str, str] | None = None) -> Finding:
    """Return the finding on ranks that drop other elements."""
    return Finding(
        "random_numbers_differ",
        message,
        where,
        {**(facts or {}), "cause": "random_numbers"},
        "ranks that hold copies and see the same rows do not drop the same elements",
        "seed the ranks of one data part alike before they draw for copies",
    )


def unequal_losses(
    records: Sequence[RankRecord], known: Sequence[RankRecord], parts: Sequence[int]
) -> tuple[int, tuple[Unequal, ...]]:
    """Compare the losses of ranks that see the same rows, in the first step; return as `unequal`.

    `known`: a run without dropout, in which those losses are equal; `parts`: the data part of each rank.
    """
    first: dict[int, int] = {}  # data part -> the position of a rank
    found: list[Unequal] = []
    count = 0
    for place, (record, part) in enumerate(zip(records, parts, strict=True)):
        loss, without = record.steps[0].loss, known[place].steps[0].loss
        if loss is None or without is None:
            continue
        other = first.setdefault(part, place)
        one, alike = records[other].steps[0].loss, known[other].steps[0].loss
        if other == place or one is None or alike is None or difference(without, alike).relative > _CLOSE:
            continue
        count += 1
        gap = difference(loss.detach(), one.detach())
        if gap.relative > _CLOSE:
            found.append(Unequal("", (records[other].rank, record.rank), gap.relative))
    return count, tuple(found)


def unequal(records: Sequence[RankRecord]) -> tuple[int, tuple[Unequal, ...]]:
    """Compare the gradients of copies in the first step; return how many were compared, and those that differ."""
    first: dict[tuple[str, bytes | None], tuple[int, Tensor]] = {}
    found: list[Unequal] = []
    count = 0
    scale = family_scale([g for record in records for g in record.steps[0].gradients.values()])
    for record in records:
        for piece in record.pieces:
            step = record.steps[0]  # an optimizer may add gradients up in its step
            gradient = step.late.get(piece.local, step.gradients.get(piece.local))
            if piece.kind != "parameter" or gradient is None or piece.addresses is None:
                continue
            rank, other = first.setdefault((piece.name, piece.key), (record.rank, gradient))
            if rank == record.rank:
                continue
            count += 1
            gap = difference(gradient, other, scale)
            if gap.relative > _CLOSE:
                found.append(Unequal(piece.name, (rank, record.rank), gap.relative))
    return count, tuple(found)


def compare_replicas(records: Sequence[RankRecord]) -> ComparisonResult:
    """Compare bitwise what ranks hold of the same elements after each step."""
    found: list[Difference] = []
    count = 0
    for steps in zip(*(record.steps for record in records), strict=True):
        number = next(i for i, step in enumerate(records[0].steps) if step is steps[0])
        first: dict[tuple[str, bytes | None], tuple[RankPiece, Tensor]] = {}
        for record, step in zip(records, steps, strict=True):
            for piece in record.pieces:
                value = step.state.get(piece.local)
                if value is None or piece.addresses is None or not value.numel() or piece.kind == "buffer":
                    continue
                key = (piece.name, piece.key)
                other = first.setdefault(key, (piece, value))
                if other[1] is value or other[1].shape != value.shape:
                    continue
                count += 1
                if not same_bits(other[1], value):
                    _, gap = distance_of_copies(other[1], value)
                    found.append(Difference("replicas_differ", piece.name, record.rank, number, Verdict.REFUTED, gap))
        if found:
            break
    return ComparisonResult("replicas bitwise equal", count, tuple(found))
