"""The launcher reads exactly what a rank reports."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch

from nnscaler.runtime.communication.communicator import CommunicationCall, CommunicationError
from nnscaler.runtime.communication.long_waits import LongWaits
from nnscaler.runtime.communication.ordered_collective_thread import Lane
from nnscaler.runtime.communication.torch_communicator_base import TorchCommunicator
from nnscaler.runtime.jobs.job import Activity, RankStatus, StatusReader, StatusWriter, create_status_file


def test_reports(tmp_path: Path) -> None:
    file = tmp_path / "status"
    create_status_file(file, 3)
    reader, writer = StatusReader(file), StatusWriter(file, 1)
    assert reader.read(1) == RankStatus(0, Activity.STARTING, "")
    writer.communicating("recv → 2")
    first = reader.read(1)
    assert (first.activity, first.text) == (Activity.COMMUNICATING, "recv → 2")
    writer.computing()
    assert reader.read(1) == RankStatus(first.sequence + 2, Activity.COMPUTING, "recv → 2")
    writer.communicating("x" * 5000)
    assert 900 < len(reader.read(1).text) < 1024
    writer.finished()
    assert reader.read(1).activity == Activity.FINISHED
    assert {reader.read(rank) for rank in (0, 2)} == {RankStatus(0, Activity.STARTING, "")}
    reader.close()


def test_a_long_wait_is_told_once_with_the_users_line() -> None:
    told: list[str] = []
    communicator = TorchCommunicator(1, 2, torch.device("cpu"), LongWaits(1, 0.2, told.append))
    lane = Lane("waits")
    with communicator._inside("a gather"):
        lane.run(partial(time.sleep, 1.0)).wait()
    (text,) = told
    assert text.startswith("rank 1 has waited 0 s for other ranks: a gather, called by ")
    assert f"{__file__}:" in text and "`lane.run(partial(time.sleep, 1.0)).wait()`" in text
    for _ in range(20):  # none of them is long
        with communicator._inside("a sum"):
            time.sleep(0.02)
    time.sleep(0.4)
    with pytest.raises(CommunicationError), communicator._inside("a broadcast"):
        raise RuntimeError("closed by peer")
    time.sleep(0.4)
    assert len(told) == 1


class Shared(dict[str, bytes]):
    """A store of threads."""

    def set(self, key: str, value: str) -> None:
        self[key] = value.encode()

    def get(self, key: str) -> bytes:  # type: ignore[override]
        return self[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self for key in keys)

    def add(self, key: str, amount: int) -> int:
        self[key] = str(int(self.setdefault(key, b"0")) + amount).encode()
        return int(self[key])


@pytest.mark.parametrize("kind", ["all_gather", "all_reduce"])
def test_ranks_that_wait_in_unlike_calls_are_told_soon(kind: str) -> None:
    told: list[str] = []
    shared = Shared()

    def rank(number: int, kind: str) -> None:
        waits = LongWaits(number, write=told.append, store=shared, unlike=0.1)
        communicator, lane = TorchCommunicator(number, 2, torch.device("cpu"), waits), Lane("waits")
        for _ in range(3 - number):  # sends count for nothing: they are met when they are received
            with communicator._inside(CommunicationCall("send", (number, 1 - number))):
                pass
        with communicator._inside(CommunicationCall(kind, (0, 1))):
            lane.run(partial(time.sleep, 0.4)).wait()

    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(rank, 0, "all_gather"), pool.submit(rank, 1, kind)]:
            done.result()
    unlike = "ranks 0 and 1 wait for each other in unlike calls, for ever: rank 0 in all_gather over ranks (0, 1)"
    assert [text.partition(", called by")[0] for text in told] == ([] if kind == "all_gather" else [unlike])
    assert all("rank 1 in all_reduce over ranks (0, 1), called by" in text for text in told)


def test_what_was_said_through_another_communicator_counts_for_nothing() -> None:
    """Rank 1 has waited in the first call of one, and computes before the first of the next."""
    told: list[str] = []
    shared = Shared()
    for kind, ranks in (("all_reduce", (0, 1)), ("all_gather", (0,))):
        made = [LongWaits(rank, write=told.append, store=shared, unlike=0.1) for rank in (0, 1)]
        lane = Lane("waits")
        for rank in reversed(ranks):
            communicator = TorchCommunicator(rank, 2, torch.device("cpu"), made[rank])
            with communicator._inside(CommunicationCall(kind, (0, 1))):
                lane.run(partial(time.sleep, 0.25)).wait()
    assert not told
