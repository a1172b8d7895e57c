"""Which rows of a data set the samplers of ranks give to them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils.data import DistributedSampler

from verify.external.torchrun.cuda_on_cpu import replaced
from verify.external.torchrun.find_ranks_with_same_rows import never_told, same_order, sampled_twice
from verify.external.torchrun.match_one_rank import Layout
from verify.external.torchrun.watched_script_record import SampledEpochs, SampledRows, ScriptRecord


def records(*samplers: DistributedSampler[int]) -> list[ScriptRecord]:
    """Return the records of ranks with a loader each."""
    blank = ScriptRecord(0, (), {}, (), {}, (), (), False, torch.float64)
    sampled = [SampledRows.of(sampler) for sampler in samplers]
    assert None not in sampled
    return [replace(blank, rank=r, sampled={"batch 0": rows}) for r, rows in enumerate(sampled) if rows is not None]


def sampler(rank: int, replicas: int = 3, rows: int = 31, seed: int = 0, last: bool = False) -> DistributedSampler[int]:
    """Return a sampler over `rows`."""
    return DistributedSampler(range(rows), replicas, rank, seed=seed, drop_last=last)  # type: ignore[arg-type]


@pytest.mark.parametrize("rows", [2, 30, 31])
@pytest.mark.parametrize("last", [False, True])
def test_rows_that_fill_up_the_last_batch_are_no_mistake(rows: int, last: bool) -> None:
    assert (
        sampled_twice(records(*(sampler(rank, rows=rows, last=last) for rank in range(3))), Layout((0, 1, 2))) is None
    )


def test_all_rows_on_every_rank_are_meant() -> None:
    assert sampled_twice(records(*(sampler(0, 1, seed=rank) for rank in range(2))), Layout((0, 1))) is None
    assert sampled_twice(records(*(sampler(rank // 2, 2) for rank in range(4))), Layout((0, 0, 1, 1))) is None


def test_a_seed_that_depends_on_the_rank_is_told() -> None:
    found = sampled_twice(records(*(sampler(rank, seed=rank) for rank in range(3))), Layout((0, 1, 2)))
    assert found is not None
    assert "of the 33 rows that all ranks take in the first epoch (batch 1), " in found[1].message
    assert (
        found[1].cause
        == "they shuffle by other numbers, seed and epoch together: 0 on rank 0, 1 on rank 1, 2 on rank 2"
    )


def test_a_place_that_two_of_three_ranks_have_is_told() -> None:
    found = sampled_twice(records(*(sampler(place, rows=30) for place in (0, 1, 1))), Layout((0, 1, 2)))
    assert found is not None and ", 10 are there already" in found[1].message and found[1].cause is None


@pytest.mark.parametrize(
    ("tell", "shuffle"), [("each", True), ("after a look", True), ("late", True), ("never", True), ("never", False)]
)
def test_a_sampler_that_is_not_told_the_epoch_is_told(tell: str, shuffle: bool) -> None:
    rows: DistributedSampler[int] = DistributedSampler(range(30), 3, 1, shuffle)  # type: ignore[arg-type]
    seen = SampledEpochs()
    with replaced(seen.changes()):
        for epoch in range(2):
            if tell == "each":
                rows.set_epoch(epoch)
            seen.begin("batch 0", rows)
            if tell == "after a look":  # at the size of the first batch, say
                rows.set_epoch(epoch)
                seen.begin("batch 0", rows)
            seen.end("batch 0")
            if tell == "late":
                rows.set_epoch(epoch + 1)
    made = [replace(one, sampled=seen.found) for one in records(rows)]
    assert never_told(made) is None  # where a second epoch shows it, that is told
    assert (same_order(made) is None) == (tell != "never" or not shuffle)


def test_a_look_at_a_batch_is_no_epoch() -> None:
    rows, seen = sampler(0), SampledEpochs()
    seen.begin("batch 0", rows)
    seen.begin("batch 0", rows)
    made = [replace(one, sampled=seen.found) for one in records(rows)]
    assert same_order(made) is None and "`set_epoch`" in str(never_told(made))
