"""No result of a step depends on when what its ranks begin reads and writes memory."""

from __future__ import annotations

import pytest
import torch

from nnscaler.runtime import CommunicationError, Simulator
from nnscaler.runtime.communication.simulator import SimulatedCommunicator
from tests.timings import PLANS, program_of, small_buckets, trained


@pytest.mark.long
@pytest.mark.parametrize("seeds", [2, pytest.param(100, marks=pytest.mark.long)])
@pytest.mark.parametrize("plan", PLANS)
def test_random_timings_give_the_same_bits(plan: str, seeds: int) -> None:
    """A thousand timings: `python benchmarks/random_timings.py`."""
    program = program_of(plan)
    with small_buckets():
        right = trained(program, None)
        assert len(right[0].gradients) > 3
        for seed in range(seeds):
            for rank, (found, wanted) in enumerate(zip(trained(program, seed), right, strict=True)):
                assert not found.differences(wanted), f"seed {seed}, rank {rank}"


def write_early(c: SimulatedCommunicator) -> None:
    x = torch.ones(4)
    pending = c.start_all_reduce(x, (0, 1))
    x.add_(1)
    pending.wait()


def read_early(c: SimulatedCommunicator) -> None:
    x = torch.ones(4)
    pending = c.start_all_reduce(x, (0, 1))
    assert x[1:3].sum().item()
    pending.wait()


def read_what_arrives(c: SimulatedCommunicator) -> None:
    parts = list(torch.zeros(8).split(4))
    pending = c.start_all_gather(torch.ones(4), parts, (0, 1))
    assert (parts[1] + 1).numel()
    pending.wait()


def begin_twice(c: SimulatedCommunicator) -> None:
    x = torch.ones(4)
    waiting = [c.start_all_reduce(x, (0, 1)) for _ in range(2)]
    for pending in waiting:
        pending.wait()


def write_before_settled(c: SimulatedCommunicator) -> None:
    shard, parts = torch.ones(4), list(torch.zeros(8).split(4))
    with c.together(lasting=True):
        pending = c.start_all_gather(shard, parts, (0, 1))
    pending.wait()
    shard.add_(1)
    c.settle()


def write_what_is_sent(c: SimulatedCommunicator) -> None:
    x = torch.ones(4)
    if c.rank == 0:
        c.send(x, 1, ("x",), lasting=True)
        x.add_(1)
    else:
        c.recv((4,), x.dtype, 0, ("x",))
    c.finish()


@pytest.mark.parametrize(
    ("mistake", "said"),
    [
        (write_early, "is (read|written) by aten.add_.Tensor before the call was waited for"),
        (read_early, "is read by aten.sum.default before the call was waited for"),
        (read_what_arrives, "is read by aten.add.Tensor before the call was waited for"),
        (begin_twice, "is given to all_reduce"),
        (write_before_settled, "what it was given was written before it was settled"),
        (write_what_is_sent, "what it was given was written before it was settled"),
    ],
)
def test_memory_under_way_is_not_used(mistake: object, said: str) -> None:
    for seed in range(10):
        with pytest.raises(CommunicationError, match=said) as caught:
            Simulator(2, timings=seed).run(mistake)  # type: ignore[arg-type]
        assert f"{__file__}:" in str(caught.value)


def test_what_is_written_too_early_is_found_without_random_timings() -> None:
    with pytest.raises(CommunicationError, match="was written after it began, and before it was waited for"):
        Simulator(2).run(write_early)


def test_what_lasts_may_be_written_when_it_is_settled() -> None:
    def run(c: SimulatedCommunicator) -> list[float]:
        shard, parts = torch.ones(2), list(torch.zeros(4).split(2))
        for _ in range(2):
            with c.together(lasting=True):
                pending = c.start_all_gather(shard, parts, (0, 1))
            pending.wait()
            c.settle()
            shard.add_(1 + c.rank)
        return [float(part[0]) for part in parts]

    for seed in (None, *range(10)):
        assert Simulator(2, timings=seed).run(run) == [[2.0, 3.0]] * 2


def test_what_nothing_waits_for() -> None:
    def run(c: SimulatedCommunicator) -> None:
        c.start_all_reduce(torch.ones(4), (0, 1))
        c.finish()

    with pytest.raises(CommunicationError, match=r"all_reduce\(sum\) .*: it was begun, and nothing waited for it"):
        Simulator(2).run(run)


def test_other_memory_may_be_used() -> None:
    def run(c: SimulatedCommunicator) -> float:
        both = torch.ones(8)
        pending = c.start_all_reduce(both[:4], (0, 1))
        both[4:].add_(1)
        shard = torch.full((2,), 3.0)
        wholes = [torch.empty(2), torch.empty(2)]
        gathering = c.start_all_gather(shard, wholes, (0, 1))
        total = (shard * 2).sum() + both[4:].sum()  # what is only read may be read
        pending.wait()
        gathering.wait()
        return float(total + both[:4].sum() + wholes[1 - c.rank].sum())

    for seed in range(20):
        assert Simulator(2, timings=seed).run(run) == [12.0 + 8.0 + 8.0 + 6.0] * 2
