from __future__ import annotations

import os
import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.sampling import every
from tests.verify.external.ranks.programs import (
    PROGRAMS,
    fully_sharded,
    replicated,
    tensor_parallel,
    tensor_parallel_and_sharded,
)
from verify.external.ranks.run_ranks_here_or_in_child import RanksFailed, run_ranks
from verify.external.ranks.unwaited_async_calls import note_of_forgotten


@pytest.mark.parametrize("ranks", every(2, [2, 4]))
@pytest.mark.parametrize("program", PROGRAMS)
def test_gradients_are_those_of_the_plain_model(program: Callable[[int], float], ranks: int) -> None:
    run = run_ranks(program, ranks)
    assert len(run.results) == ranks
    assert max(run.results) < 1e-15
    assert all(run.calls)
    assert run.unwaited == 0


@pytest.mark.parametrize("program", every(2, [tensor_parallel_and_sharded, fully_sharded, replicated]))
def test_processes_over_gloo_compute_the_same_and_make_the_same_calls(program: Callable[[int], float]) -> None:
    simulated, real = run_ranks(program, 4), run_ranks(program, 4, "gloo")
    assert max(*simulated.results, *real.results) < 1e-15
    assert simulated.calls == real.calls


def trained(rank: int) -> list[torch.Tensor]:
    torch.manual_seed(rank)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 8))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).pow(2).mean().backward()
        optimizer.step()
    return [parameter.full_tensor().detach() for parameter in model.parameters()]  # type: ignore[attr-defined]


@pytest.mark.long
@pytest.mark.parametrize("runs", [6, pytest.param(20, marks=pytest.mark.long)])
def test_runs_are_equal_to_the_last_bit(runs: int) -> None:
    first = run_ranks(trained, 2)
    for _ in range(runs - 1):
        again = run_ranks(trained, 2)
        assert again.calls == first.calls
        for mine, other in zip(again.results, first.results, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(mine, other, strict=True))


def draws(rank: int) -> tuple[list[float], str | None, str | None]:
    found = []
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    for _ in range(3):
        dist.barrier()
        found += [float(torch.rand(())), random.random(), float(np.random.rand())]
    torch.set_default_dtype(torch.float64 if rank else torch.float32)
    dist.barrier()
    assert torch.get_default_dtype() == (torch.float64 if rank else torch.float32)
    return found, os.environ.get("RANK"), os.environ.get("WORLD_SIZE")


@pytest.mark.parametrize("executor", ["simulator", "gloo"])
def test_each_rank_has_its_own_random_numbers_and_variables(executor: str) -> None:
    torch.manual_seed(11)
    before = torch.get_rng_state()
    run = run_ranks(draws, 3, executor)
    assert run.results[0][0] == run.results[1][0] == run.results[2][0]
    assert [result[1:] for result in run.results] == [("0", "3"), ("1", "3"), ("2", "3")]
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_default_dtype() == torch.float32
    assert "RANK" not in os.environ or os.environ["RANK"] == "0"


def initialises(rank: int) -> tuple[float, str]:
    dist.init_process_group("gloo")
    assert dist.get_rank() == rank
    value = torch.ones(())
    dist.all_reduce(value)
    name = dist.get_backend()
    dist.destroy_process_group()
    return float(value), name


@pytest.mark.parametrize("executor", ["simulator", "gloo"])
def test_a_program_that_makes_its_own_group(executor: str) -> None:
    assert run_ranks(initialises, 2, executor, initialise=False).results == ((2.0, "gloo"),) * 2
    assert not dist.is_initialized()


def test_calls_say_what_was_communicated_and_where() -> None:
    def work(rank: int) -> None:
        dist.all_reduce(torch.zeros(2, 3), op=dist.ReduceOp.MAX)
        if rank == 0:
            dist.send(torch.zeros(5, dtype=torch.int64), 1)
        else:
            dist.recv(torch.zeros(5, dtype=torch.int64), 0)

    first, second = run_ranks(work, 2).calls
    line = work.__code__.co_firstlineno
    assert (first[0].kind, first[0].group, first[0].shapes, first[0].dtype) == (
        "all_reduce",
        (0, 1),
        ((2, 3),),
        torch.float32,
    )
    assert (first[0].reduction, first[0].bytes, first[0].place) == ("max", 24, f"{__file__}:{line + 1}")
    assert (first[1].kind, first[1].group, first[1].bytes) == ("send", (0, 1), 40)
    assert (second[1].kind, second[1].bytes, second[1].place) == ("recv", 0, f"{__file__}:{line + 5}")


def test_functional_collectives_that_nobody_waits_for_are_counted() -> None:
    def work(rank: int) -> torch.Tensor:
        world = dist.group.WORLD
        assert world is not None
        found = torch.ops._c10d_functional.all_reduce(torch.ones(2), "sum", world.group_name)
        return torch.ops._c10d_functional.wait_tensor(found) if rank == 0 else found

    assert run_ranks(work, 3).unwaited == 2


@pytest.mark.parametrize("executor", ["simulator", "gloo"])
def test_lines_that_begin_calls_and_never_wait_are_known(executor: str) -> None:
    def work(rank: int) -> None:
        numbers = torch.ones(2)
        for step in range(2):
            dist.all_reduce(numbers.clone(), async_op=True)
            overlapped = dist.all_reduce(numbers.clone(), async_op=True)
            dist.all_reduce(numbers)
            if step == 0:
                overlapped.wait()
            asked = dist.broadcast(numbers, 0, async_op=True)
            while not asked.is_completed():
                pass
        module = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
        module(numbers).sum().backward()

    line = work.__code__.co_firstlineno + 3
    found = run_ranks(work, 2, executor).forgotten
    assert found == (f"all_reduce at test_run_ranks_here_or_in_child.py:{line}",)
    (note,) = note_of_forgotten(found)
    assert note.startswith("nobody waits for all_reduce at test_run_ranks_here_or_in_child.py:")
    assert note_of_forgotten(()) == ()


@pytest.mark.parametrize("executor", ["simulator", "gloo"])
def test_results_of_an_isolated_run_come_back(executor: str) -> None:
    assert max(run_ranks(tensor_parallel, 2, executor, isolate=True).results) < 1e-15


def test_a_failure_of_an_isolated_run_comes_back_whole() -> None:
    def work(rank: int) -> None:
        if rank == 1:
            raise ValueError("no such thing")
        dist.barrier()

    with pytest.raises(RanksFailed, match="rank 1 raised ValueError: no such thing") as caught:
        run_ranks(work, 2, isolate=True)
    assert (caught.value.code, caught.value.rank) == ("rank_raises", 1)
    assert caught.value.place == f"{__file__}:{work.__code__.co_firstlineno + 2}"
    assert "waits in barrier" in caught.value.by_rank[0]
