from __future__ import annotations

import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from verify.external.ranks.run_ranks_here_or_in_child import RanksFailed, run_ranks


def total(rank: int) -> float:
    value = torch.ones(1) * (rank + 1)
    dist.all_reduce(value)
    return float(functional.all_reduce(value, "max", dist.group.WORLD))


@pytest.mark.parametrize("executor", ["simulator", "gloo"])
def test_threads_of_a_rank_communicate_for_it(executor: str) -> None:
    def work(rank: int) -> list[float]:
        found: list[float] = []
        thread = threading.Thread(target=lambda: found.append(total(rank)))
        thread.start()
        thread.join()
        with ThreadPoolExecutor(1) as pool:
            found.append(pool.submit(total, rank).result())
        return found

    assert run_ranks(work, 3, executor).results == ([6.0, 6.0],) * 3


def test_a_rank_may_wait_for_its_thread_in_a_way_that_nobody_knows() -> None:
    def work(rank: int) -> float:
        answers: queue.Queue[float] = queue.Queue()
        threading.Thread(target=lambda: answers.put(total(rank))).start()
        return answers.get()

    assert run_ranks(work, 2).results == (3.0, 3.0)


def test_a_thread_that_waits_for_ever_is_a_deadlock() -> None:
    def work(rank: int) -> None:
        if rank == 0:
            thread = threading.Thread(target=dist.barrier)
            thread.start()
            thread.join()

    with pytest.raises(RanksFailed) as caught:
        run_ranks(work, 2)
    assert caught.value.code == "deadlock"
    assert "rank 0 waits in the end of a thread" in caught.value.message
    assert "rank 0 (a helper thread) waits in barrier" in caught.value.message


def test_a_pool_that_has_nothing_to_do_hides_no_deadlock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verify.external.ranks.threads.simulator._STALL", 1.0)

    def work(rank: int) -> None:
        pool = ThreadPoolExecutor(1)
        assert pool.submit(lambda: 1).result() == 1
        if rank == 0:
            dist.barrier()
        pool.shutdown()

    with pytest.raises(RanksFailed) as caught:
        run_ranks(work, 2)
    assert caught.value.code == "deadlock"


def test_patches_of_threads_end_with_the_run() -> None:
    before = threading.Thread.start, threading.Thread.join
    run_ranks(total, 2)
    assert (threading.Thread.start, threading.Thread.join) == before


def test_a_checkpoint_is_saved_beside_training_and_loaded(tmp_path: Path) -> None:
    def model(start: float) -> nn.Module:
        made = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        with torch.no_grad():
            for parameter in made.parameters():
                parameter.copy_(torch.arange(start, start + parameter.numel()).view_as(parameter))
        fully_shard(made, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        return made

    def work(_: int) -> list[bool]:
        saved, loaded = model(0.0), model(100.0)
        dcp.async_save({"model": get_model_state_dict(saved)}, checkpoint_id=tmp_path).result()
        state = {"model": get_model_state_dict(loaded)}
        dcp.load(state, checkpoint_id=tmp_path)
        set_model_state_dict(loaded, state["model"])
        return [
            torch.equal(one.full_tensor(), other.full_tensor())
            for one, other in zip(saved.parameters(), loaded.parameters(), strict=True)
        ]

    assert run_ranks(work, 2).results == ([True] * 4,) * 2
