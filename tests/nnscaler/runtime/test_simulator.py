"""The in-process communicator: values, disagreement, deadlock, and which failure is reported."""

from __future__ import annotations

import os
import threading
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from nnscaler.runtime import CommunicationError, Simulator
from nnscaler.runtime.communication.simulator import SimulatedCommunicator


def test_collectives_of_three_ranks() -> None:
    def run(c: SimulatedCommunicator) -> list[object]:
        everyone = (0, 1, 2)
        x = torch.tensor([1.0, 10.0, 100.0]) * (c.rank + 1)
        return [
            c.all_reduce(x, everyone).tolist(),
            c.all_reduce(x, everyone, "max").tolist(),
            [t.tolist() for t in c.all_gather(x[:1], everyone)],
            c.reduce_scatter([x + i for i in range(3)], everyone).tolist(),
            [t.item() for t in c.all_to_all(list(x), everyone)],
            c.broadcast(x, 2, everyone).tolist(),
        ]

    for rank, result in enumerate(Simulator(3).run(run)):
        total = [6.0, 60.0, 600.0]
        assert result == [
            total,
            [3.0, 30.0, 300.0],
            [[1.0], [2.0], [3.0]],
            [v + 3 * rank for v in total],
            [10.0**rank * k for k in (1, 2, 3)],
            [3.0, 30.0, 300.0],
        ]


def test_sums_do_not_depend_on_who_comes_first() -> None:
    values = [torch.tensor([1e16]), torch.tensor([1.0]), torch.tensor([-1e16])]

    def run(c: SimulatedCommunicator) -> list[float]:
        results = []
        for turn in range(6):
            time.sleep(0.002 * ((c.rank + turn) % 3))
            results.append(c.all_reduce(values[c.rank].double(), (0, 1, 2)).item())
        return results

    first, *others = Simulator(3).run(run)
    assert all(o == first for o in others)
    assert set(first) == {0.0}  # (1e16 + 1) - 1e16, in the order of ranks


def test_results_and_arguments_share_no_memory() -> None:
    def run(c: SimulatedCommunicator) -> None:
        sent = torch.ones(2)
        c.send(sent, 1 - c.rank, ("x",))
        sent.add_(1)
        c.barrier((0, 1))
        assert c.recv((2,), torch.float32, 1 - c.rank, ("x",)).tolist() == [1, 1]
        x = torch.ones(2)
        for y in (c.all_reduce(x, (0, 1)), c.all_gather(x, (0, 1))[c.rank], c.all_reduce(x, (c.rank,))):
            y.add_(1)
        c.barrier((0, 1))
        assert x.tolist() == [1, 1]

    Simulator(2).run(run)


def test_messages_are_matched_by_key_and_sent_without_waiting() -> None:
    def run(c: SimulatedCommunicator) -> list[float]:
        if c.rank == 0:
            c.send(torch.tensor(1.0), 1, ("a",))
            c.send(torch.tensor(2.0), 1, ("b",))
            c.send(torch.tensor(3.0), 1, ("a",))
            return []
        return [c.recv((), torch.float32, 0, (k,)).item() for k in ("b", "a", "a")]

    assert Simulator(2).run(run)[1] == [2.0, 1.0, 3.0]


MISMATCHES = {
    "different collectives": lambda c: (c.all_reduce, c.all_gather)[c.rank](torch.ones(2), (0, 1)),
    "different shapes": lambda c: c.all_reduce(torch.ones(2 + c.rank), (0, 1)),
    "different dtypes": lambda c: c.all_reduce(torch.ones(2, dtype=(torch.float32, torch.float64)[c.rank]), (0, 1)),
    "reduce differently": lambda c: c.all_reduce(torch.ones(2), (0, 1), ("sum", "max")[c.rank]),
    "broadcast from different": lambda c: c.broadcast(torch.ones(2), c.rank, (0, 1)),
    "order it differently": lambda c: c.all_gather(torch.ones(2), ((0, 1), (1, 0))[c.rank]),
}


@pytest.mark.parametrize("reason", MISMATCHES)
def test_ranks_that_disagree(reason: str) -> None:
    with pytest.raises(CommunicationError, match=reason) as caught:
        Simulator(2).run(MISMATCHES[reason])
    assert f"{__file__}:" in str(caught.value)
    assert "rank 0" in str(caught.value) and "rank 1" in str(caught.value)


def test_a_deadlock_is_found_at_once_and_says_who_waits_where() -> None:
    def run(c: SimulatedCommunicator) -> None:
        if c.rank < 2:
            c.recv((2,), torch.float32, 1 - c.rank, ("h", c.rank))
        elif c.rank == 2:
            c.all_reduce(torch.ones(1), (2, 3))

    with pytest.raises(CommunicationError, match="deadlock") as caught:
        Simulator(4).run(run)
    first = run.__code__.co_firstlineno
    assert sorted(caught.value.waiting) == [0, 1, 2]
    assert caught.value.waiting[0] == f"recv float32[2] 1 -> 0 key (h 0) at {__file__}:{first + 2}"
    assert caught.value.waiting[2] == f"all_reduce(sum) float32[1] over ranks (2, 3) at {__file__}:{first + 4}"
    assert "finished: ranks [3]" in str(caught.value)


def test_two_groups_in_opposite_order_are_a_deadlock() -> None:
    def run(c: SimulatedCommunicator) -> None:
        groups = [(0, 1), (0, 1, 2)] if c.rank == 0 else [(0, 1, 2), (0, 1)]
        for group in groups:
            if c.rank in group:
                c.barrier(group)

    with pytest.raises(CommunicationError, match="deadlock"):
        Simulator(3).run(run)


def test_a_message_nobody_receives() -> None:
    def run(c: SimulatedCommunicator) -> None:
        if c.rank == 0:
            c.send(torch.ones(3), 1, ("lost",))

    with pytest.raises(CommunicationError, match=r"never received: rank 0: send float32\[3\] 0 -> 1 key \(lost\)"):
        Simulator(2).run(run)


def test_a_message_of_another_shape() -> None:
    def run(c: SimulatedCommunicator) -> None:
        if c.rank == 0:
            c.send(torch.ones(3), 1, ("h",))
        else:
            c.recv((4,), torch.float32, 0, ("h",))

    with pytest.raises(CommunicationError, match="differs from what its receiver expects"):
        Simulator(2).run(run)


def test_the_real_failure_wins_and_the_simulator_can_be_used_again() -> None:
    def run(c: SimulatedCommunicator) -> None:
        if c.rank == 3:
            time.sleep(0.05)
            raise ZeroDivisionError("planted")
        c.barrier((0, 1, 2, 3))

    simulator = Simulator(4)
    with pytest.raises(ZeroDivisionError, match="planted"):
        simulator.run(run)
    assert simulator.run(lambda c: c.all_reduce(torch.ones(()), (0, 1, 2, 3)).item()) == [4.0] * 4


def test_other_ranks_learn_that_they_only_stopped() -> None:
    seen: dict[int, CommunicationError] = {}

    def run(c: SimulatedCommunicator) -> None:
        if c.rank == 0:
            raise ValueError("planted")
        try:
            c.barrier((0, 1))
        except CommunicationError as error:
            seen[c.rank] = error
            raise

    with pytest.raises(ValueError, match="planted"):
        Simulator(2).run(run)
    assert seen[1].secondary and "rank 0 failed" in str(seen[1])


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="the system does not tell its threads")
@pytest.mark.parametrize("fails", [False, True])
def test_its_threads_are_gone_when_it_returns(fails: bool) -> None:
    """A process that is forked while one still frees what MKL keeps for it spins in its first matrix product."""

    def work(communicator: SimulatedCommunicator) -> int:
        if fails:
            raise ValueError("no product")
        torch.ones(64, 64) @ torch.ones(64, 64)
        return threading.get_native_id()

    for _ in range(100):
        before = {int(task.name) for task in Path("/proc/self/task").iterdir()}
        with pytest.raises(ValueError, match="no product") if fails else nullcontext():
            assert len(set(Simulator(3).run(work))) == 3
        assert {int(task.name) for task in Path("/proc/self/task").iterdir()} <= before


def test_ranks_that_are_stopped_end_at_their_next_communication() -> None:
    simulator, began = Simulator(2), threading.Event()
    failures: list[CommunicationError] = []

    def run(c: SimulatedCommunicator) -> None:
        while True:
            c.barrier((0, 1))
            began.set()

    def work() -> None:
        try:
            simulator.run(run)
        except CommunicationError as error:
            failures.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    assert began.wait(240)
    simulator.stop()
    thread.join(240)
    assert str(failures[0]) == "the simulator was stopped"


@pytest.mark.parametrize("cores", [1, 2])
def test_no_more_ranks_work_than_there_are_cores(cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    working, most = set[int](), 0

    def work(rank: int) -> None:
        nonlocal most
        working.add(rank)
        time.sleep(0.002)  # without Python's lock, as an operator of torch
        most = max(most, len(working))
        working.remove(rank)

    def run(c: SimulatedCommunicator) -> float:
        total = torch.ones(1)
        for step in range(5):
            work(c.rank)
            total = c.all_reduce(total, (0, 1, 2, 3))
            if c.rank == step % 4:
                c.send(total, (c.rank + 1) % 4, key=(step,))
            if c.rank == (step + 1) % 4:
                c.recv((1,), torch.float32, step % 4, key=(step,))
        return total.item()

    simulator = Simulator(4)
    assert simulator.run(run) == [4.0**5] * 4
    assert most <= cores

    def stuck(c: SimulatedCommunicator) -> None:
        if c.rank:
            c.barrier((0, 1, 2, 3))

    with pytest.raises(CommunicationError, match="deadlock"):
        simulator.run(stuck)
    assert simulator.run(run) == [4.0**5] * 4  # those that failed gave their cores back
    assert most <= cores


@pytest.mark.parametrize("ranks", [(1, 2), (0, 7), (0, 0)])
def test_groups_that_make_no_sense(ranks: tuple[int, ...]) -> None:
    with pytest.raises(CommunicationError, match=r"group|not in it"):
        Simulator(1).run(lambda c: c.all_reduce(torch.ones(1), ranks))


def test_threads_record_gradients_even_if_the_caller_does_not() -> None:
    with torch.no_grad():
        assert Simulator(2).run(lambda c: torch.ones(1, requires_grad=True).mul(2).requires_grad) == [True, True]


def test_eight_ranks_are_fast() -> None:
    def run(c: SimulatedCommunicator) -> None:
        x = torch.ones(64)
        for _ in range(200):
            c.all_reduce(x, tuple(range(8)))

    begin = time.process_time()
    Simulator(8).run(run)
    assert time.process_time() - begin < 10.0  # 0.4 s on an idle machine
