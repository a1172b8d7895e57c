"""Planted faults: each is named, with the lines of the ranks that disagree, on both executors."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from verify.external.ranks.run_ranks_here_or_in_child import RanksFailed, run_ranks

Function = Callable[[int], object]


def other_order(rank: int) -> None:
    value = torch.ones(3)
    if rank == 0:
        dist.all_reduce(value)  # here
        dist.broadcast(value, 0)
    else:
        dist.broadcast(value, 0)  # here
        dist.all_reduce(value)


def other_shape(rank: int) -> None:
    dist.all_reduce(torch.ones(3 + rank))  # here


def other_dtype(rank: int) -> None:
    dist.all_reduce(torch.ones(3, dtype=torch.float64 if rank else torch.float32))  # here


def other_root(rank: int) -> None:
    dist.broadcast(torch.ones(3), rank)  # here


def other_reduction(rank: int) -> None:
    dist.all_reduce(torch.ones(3), op=dist.ReduceOp.MAX if rank else dist.ReduceOp.SUM)  # here


def other_length(rank: int) -> None:
    dist.all_gather_into_tensor(torch.zeros(4 + 2 * rank), torch.zeros(2 + rank))  # here


def never_received(rank: int) -> None:
    if rank == 0:
        dist.isend(torch.ones(2), 1)  # here


def one_call_more(rank: int) -> None:
    dist.barrier()
    if rank == 0:
        dist.all_reduce(torch.ones(3))  # here


def wrong_peer(rank: int) -> None:
    if rank == 0:
        dist.send(torch.ones(3), 1)  # here
    else:
        dist.recv(torch.ones(3), 3 - rank)  # here


def both_send_first(rank: int) -> None:
    if rank < 2:
        dist.send(torch.ones(1), 1 - rank)  # here
        dist.recv(torch.ones(1), 1 - rank)


def crossed_groups(rank: int) -> None:
    one, two = dist.new_group([0, 1]), dist.new_group([0, 1, 2])
    if rank != 2:
        dist.all_reduce(torch.ones(1), group=two if rank else one)  # here
    dist.all_reduce(torch.ones(1), group=one if rank == 1 else two)


def key_never_set(rank: int) -> None:
    if rank == 0:
        dist.distributed_c10d._get_default_store().get("nothing")  # here
    dist.barrier()  # here


MISMATCHES: tuple[Function, ...] = (
    other_order,
    other_shape,
    other_dtype,
    other_root,
    other_reduction,
    never_received,
)
DEADLOCKS: tuple[Function, ...] = (one_call_more, wrong_peer, both_send_first, crossed_groups, key_never_set)


def lines(function: Function) -> list[int]:
    code = function.__code__  # type: ignore[attr-defined]
    text = Path(__file__).read_text(encoding="utf-8").splitlines()
    numbers = sorted({line for _, _, line in code.co_lines() if line is not None})
    return [number for number in numbers if text[number - 1].endswith("# here")]


def failure(function: Function, executor: str, ranks: int = 3) -> RanksFailed:
    with pytest.raises(RanksFailed) as caught:
        run_ranks(function, ranks, executor)
    return caught.value


@pytest.mark.parametrize("executor", ["simulator", "gloo"])
@pytest.mark.parametrize("function", MISMATCHES)
def test_ranks_that_disagree(function: Function, executor: str) -> None:
    found = failure(function, executor)
    assert found.code == "communication_mismatch"
    assert [f"{__file__}:{line}" in found.message for line in lines(function)] == [True] * len(lines(function))


def test_gathered_tensors_of_other_lengths() -> None:
    found = failure(other_length, "simulator", 2)
    assert found.code == "communication_mismatch"
    line = lines(other_length)[0]
    assert "rank 0 gives float32[2] where rank 1 takes float32[3]" in found.message
    assert found.message.count(f"{__file__}:{line}") == 2


@pytest.mark.parametrize("function", DEADLOCKS)
def test_ranks_that_wait_for_ever(function: Function) -> None:
    check_deadlock(function, failure(function, "simulator"))


@pytest.mark.parametrize("function", [one_call_more, wrong_peer, key_never_set])
def test_processes_that_wait_for_ever(function: Function, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verify.external.ranks.processes.rank_watchdog._STALL", 1.0)
    check_deadlock(function, failure(function, "gloo"))


def check_deadlock(function: Function, found: RanksFailed) -> None:
    assert found.code == "deadlock"
    assert found.place in {f"{__file__}:{line}" for line in lines(function)}
    assert all(f"{__file__}:{line}" in found.message for line in lines(function))
    assert set(found.by_rank) == {0, 1, 2}
    assert found.rank is not None
    assert found.by_rank[found.rank].startswith("waits in")


def test_a_rank_that_has_finished_is_told_with_its_last_call() -> None:
    found = failure(one_call_more, "simulator")
    assert re.search(r"rank 1 finished; its last communication call was barrier over ranks \(0, 1, 2\)", found.message)


def test_groups_that_are_made_in_another_order_are_told() -> None:
    def work(rank: int) -> None:
        if rank == 0:
            dist.new_group([0, 1], use_local_synchronization=True)
        group = dist.new_group([0, 1, 2], use_local_synchronization=True)
        dist.all_reduce(torch.ones(1), group=group)

    found = failure(work, "simulator")
    assert found.code == "deadlock"
    assert "groups of ranks (0, 1, 2) that were not made in the same order" in found.message


def test_a_message_of_another_shape() -> None:
    def work(rank: int) -> None:
        if rank == 0:
            dist.send(torch.ones(2), 1)
        if rank == 1:
            dist.recv(torch.ones(3), 0)

    found = failure(work, "simulator")
    assert found.code == "communication_mismatch"
    assert "send float32[2] 0 -> 1" in found.message
    assert "recv float32[3] 0 -> 1" in found.message


def test_parts_of_an_all_to_all_that_do_not_fit() -> None:
    def work(rank: int) -> None:
        given, taken = ([1, 2], [1, 2]) if rank == 0 else ([1, 2], [2, 1])
        dist.all_to_all_single(torch.zeros(3), torch.zeros(3), taken, given)

    found = failure(work, "simulator", 2)
    assert found.code == "communication_mismatch"
    assert "rank 1 gives float32[1] where rank 0 takes float32[2]" in found.message


def test_an_input_that_is_changed_before_the_call_has_ended() -> None:
    def work(_: int) -> None:
        value = torch.ones(100_000)
        handle = dist.all_reduce(value, async_op=True)
        value.mul_(2)
        handle.wait()

    found = failure(work, "simulator")
    assert found.code == "communication_mismatch"
    assert "was changed between the start of an asynchronous call and its end" in found.message
    assert (found.rank, found.place) == (0, f"{__file__}:{work.__code__.co_firstlineno + 2}")


def test_another_part_of_the_buffer_may_be_changed_meanwhile() -> None:
    def work(_: int) -> float:
        buffer = torch.ones(10)
        handle = dist.all_reduce(buffer[:5], async_op=True)
        buffer[5:].mul_(2)
        handle.wait()
        return float(buffer.sum())

    assert run_ranks(work, 3).results == (25.0,) * 3


@pytest.mark.parametrize("executor", ["simulator", "gloo"])
def test_a_rank_that_raises(executor: str) -> None:
    def work(rank: int) -> None:
        if rank == 1:
            raise ValueError("no such layer")
        dist.barrier()

    found = failure(work, executor)
    assert (found.code, found.rank) == ("rank_raises", 1)
    assert found.message == "rank 1 raised ValueError: no such layer"
    assert found.place == f"{__file__}:{work.__code__.co_firstlineno + 2}"
    assert "Traceback" in found.by_rank[1]


def test_a_program_cannot_catch_the_end_of_its_rank() -> None:
    def work(rank: int) -> None:
        if rank == 1:
            raise ValueError("first")
        try:
            dist.barrier()
        except Exception as error:
            raise RuntimeError("second") from error

    assert failure(work, "simulator").message == "rank 1 raised ValueError: first"


@pytest.mark.parametrize("executor", ["simulator", "gloo"])
@pytest.mark.parametrize("how", ["segfault", "exit"])
def test_a_rank_that_ends_its_process(executor: str, how: str) -> None:
    def work(rank: int) -> None:
        dist.barrier()
        if rank == 1:
            ctypes.string_at(0) if how == "segfault" else os._exit(3)
        dist.barrier()

    with pytest.raises(RanksFailed) as caught:
        run_ranks(work, 3, executor, isolate=True)
    found = caught.value
    assert (found.code, found.rank) == ("rank_died", 1)
    assert ("SIGSEGV" if how == "segfault" else "code 3") in found.message
    if how == "segfault":
        assert found.place == f"{__file__}:{work.__code__.co_firstlineno + 3}"


@pytest.mark.parametrize("executor", ["simulator", "gloo"])
def test_a_rank_that_computes_for_ever(executor: str) -> None:
    def work(rank: int) -> None:
        while rank == 1:
            rank = 1
        dist.barrier()

    with pytest.raises(RanksFailed) as caught:
        run_ranks(work, 2, executor, timeout=0.5)
    found = caught.value
    assert (found.code, found.rank) == ("timed_out", 1)
    start = work.__code__.co_firstlineno
    assert found.place in (f"{__file__}:{start + 1}", f"{__file__}:{start + 2}")


def test_after_a_failure_the_next_run_is_right() -> None:
    failure(other_order, "simulator")
    assert run_ranks(lambda rank: dist.get_rank() == rank, 2).results == (True, True)
    assert not dist.is_initialized()


def test_a_group_of_another_rank_is_refused() -> None:
    groups: dict[int, dist.ProcessGroup] = {}

    def work(rank: int) -> None:
        world = dist.group.WORLD
        assert world is not None
        groups[rank] = world
        dist.barrier()
        groups[0].barrier()

    found = failure(work, "simulator", 2)
    assert found.code == "rank_raises"
    assert "the group of rank 0 is used on rank 1" in found.message


def test_a_message_to_a_rank_that_is_not_there() -> None:
    with pytest.raises(RanksFailed, match="ValueError: a message to or from rank 2, in a group of 2 ranks"):
        run_ranks(lambda rank: dist.isend(torch.ones(1), rank + 2), 2)
