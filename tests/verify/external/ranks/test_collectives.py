"""Every collective, on both executors: the same results to the last bit."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor

from verify.external.ranks.run_ranks_here_or_in_child import run_ranks

SIZE = 3


def reductions(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in ("SUM", "AVG", "MIN", "MAX", "PRODUCT"):
        value = torch.arange(4.0) + rank
        dist.all_reduce(value, op=getattr(dist.ReduceOp, name))
        found[name] = value
    for name in ("BAND", "BOR", "BXOR"):
        bits = torch.arange(4) + rank
        dist.all_reduce(bits, op=getattr(dist.ReduceOp, name))
        found[name] = bits
    value = torch.arange(4.0) + rank
    dist.all_reduce(value, op=dist._make_nccl_premul_sum(0.5))  # type: ignore[attr-defined]
    found["PREMUL_SUM"] = value
    half = torch.full((3,), 0.1 * (rank + 1), dtype=torch.bfloat16)
    dist.all_reduce(half)
    scalar = torch.ones(()) if rank else torch.ones(1)
    dist.all_reduce(scalar)
    reduced = torch.ones(2) * rank
    dist.reduce(reduced, 1)
    average = (torch.ones(2, requires_grad=True) * rank).sum()  # gloo itself would record that it divides
    dist.all_reduce(average, op=dist.ReduceOp.AVG)
    found["of a graph"] = [average.detach(), type(average.grad_fn).__name__]
    return {**found, "bfloat16": half, "scalar": scalar.reshape(()), "reduce": reduced if rank == 1 else None}


def moves(rank: int) -> dict[str, Any]:
    value, whole = torch.arange(2.0) + 10 * rank, torch.arange(2.0 * SIZE) + 10 * rank
    gathered, listed = torch.zeros(2 * SIZE), [torch.zeros(2) for _ in range(SIZE)]
    dist.all_gather_into_tensor(gathered, value)
    dist.all_gather(listed, value)
    scattered, averaged = torch.zeros(2), torch.zeros(2)
    dist.reduce_scatter_tensor(scattered, whole)
    dist.reduce_scatter(averaged, list(whole.chunk(SIZE)), op=dist.ReduceOp.AVG)
    uneven_list = [torch.zeros(other + 1) for other in range(SIZE)]
    dist.all_gather(uneven_list, torch.full((rank + 1,), float(rank)))
    turned, turned_list = torch.zeros(2 * SIZE), [torch.zeros(2) for _ in range(SIZE)]
    dist.all_to_all_single(turned, whole)
    if torch.__version__ >= "2.12":  # before that, gloo exchanges no lists
        dist.all_to_all(turned_list, list(whole.chunk(SIZE)))
    uneven = torch.zeros(sum(range(1, SIZE + 1)))
    dist.all_to_all_single(uneven, torch.full(((rank + 1) * SIZE,), float(rank)), [1, 2, 3], [rank + 1] * SIZE)
    told, part = value.clone(), torch.zeros(2)
    dist.broadcast(told, 1)
    dist.scatter(part, list(whole.chunk(SIZE)) if rank == 2 else None, src=2)
    collected = [torch.zeros(2) for _ in range(SIZE)] if rank == 1 else None
    dist.gather(value, collected, dst=1)
    return {
        "all_gather": [gathered, *listed, *uneven_list],
        "reduce_scatter": [scattered, averaged],
        "all_to_all": [turned, *turned_list, uneven],
        "rooted": [told, part, *(collected or [])],
    }


def objects(rank: int) -> dict[str, Any]:
    gathered: list[Any] = [None] * SIZE
    dist.all_gather_object(gathered, {"rank": rank})
    told = [rank, "x"]
    dist.broadcast_object_list(told, 1)
    part: list[Any] = [None]
    dist.scatter_object_list(part, [f"for {i}" for i in range(SIZE)] if rank == 0 else None, src=0)
    sent: list[Any] = ["from 0"] if rank == 0 else [None]
    if rank == 0:
        dist.send_object_list(sent, 1)
    if rank == 1:
        dist.recv_object_list(sent, 0)
    return {"all_gather": gathered, "broadcast": told, "scatter": part, "message": sent}


def messages(rank: int) -> dict[str, Any]:
    after, before = (rank + 1) % SIZE, (rank - 1) % SIZE
    taken = torch.zeros(2)
    ring = [dist.P2POp(dist.isend, torch.ones(2) * rank, after), dist.P2POp(dist.irecv, taken, before)]
    for work in dist.batch_isend_irecv(ring):
        work.wait()
    any_source, source = torch.zeros(1), -1
    if rank == 0:
        source = dist.recv(any_source, tag=5)
    if rank == 2:
        dist.send(torch.full((1,), 2.0), 0, tag=5)
    first, second = torch.zeros(1), torch.zeros(1)
    if rank == 0:  # waited for in the other order than they were asked for
        one, two = dist.irecv(first, 1, tag=1), dist.irecv(second, 1, tag=1)
        assert one is not None
        assert two is not None
        two.wait()
        one.wait()
    if rank == 1:
        for work in [dist.isend(torch.full((1,), float(i)), 0, tag=1) for i in (1, 2)]:
            assert work is not None
            work.wait()
    return {"ring": taken, "any": (any_source, source), "in order": (first, second)}


def asynchronous(rank: int) -> dict[str, Any]:
    value = torch.ones(2) * rank
    future = dist.all_reduce(value, async_op=True).get_future().then(lambda done: done.value()[0] + 1)
    found = {"then": future.wait()}
    one, two = torch.ones(2) * rank, torch.ones(3) * rank
    with dist._coalescing_manager():  # type: ignore[attr-defined]
        dist.all_reduce(one)
        dist.all_reduce(two)
    left, right = torch.zeros(2 * SIZE), torch.zeros(2 * SIZE)
    with dist._coalescing_manager(device=torch.device("cpu"), async_ops=True) as coalesced:  # type: ignore[attr-defined]
        dist.all_gather_into_tensor(left, one)
        dist.all_gather_into_tensor(right, one + 1)
    coalesced.wait()
    dist.barrier(async_op=True).wait()
    dist.monitored_barrier()
    return {**found, "coalesced": [one, two, left, right]}


def groups(rank: int) -> dict[str, Any]:
    local = dist.new_group([0, 1, 2], use_local_synchronization=True)
    pair = dist.new_group([0, 2])
    unsorted: dict[str, Any] = (
        {"sort_ranks": False} if "sort_ranks" in inspect.signature(dist.new_group).parameters else {}
    )
    turned = dist.new_group([2, 1, 0], **unsorted)
    value = torch.ones(1) * rank
    dist.all_reduce(value, group=local)
    if rank != 1:
        dist.all_reduce(value, group=pair)
    order = [torch.zeros(1) for _ in range(SIZE)]
    dist.all_gather(order, torch.ones(1) * rank, group=turned)
    store = dist.distributed_c10d._get_default_store()
    store.set(f"rank {rank}", str(rank))
    return {"value": value, "order": order, "store": [store.get(f"rank {other}") for other in range(SIZE)]}


def functionals(rank: int) -> dict[str, Any]:
    world = dist.group.WORLD
    assert world is not None
    value, whole = torch.arange(2.0) + rank, torch.arange(2.0 * SIZE) + rank
    leaf = value.clone().requires_grad_()
    functional.all_gather_tensor_autograd(leaf, 0, world).pow(2).sum().backward()
    other = value.clone().requires_grad_()
    dist.nn.functional.all_reduce(other * 2).sum().backward()
    return {
        "all_reduce": functional.all_reduce(value, "sum", world) + 0,
        "all_gather": functional.all_gather_tensor(value, 0, world) + 0,
        "reduce_scatter": functional.reduce_scatter_tensor(whole, "sum", 0, world) + 0,
        "all_to_all": functional.all_to_all_single(whole, None, None, world) + 0,
        "broadcast": functional.broadcast(value, 1, world) + 0,
        "coalesced": [t + 0 for t in functional.all_reduce_coalesced([value, value + 1], "avg", world)],
        "gradients": [leaf.grad, other.grad],
    }


SETS = (reductions, moves, objects, messages, asynchronous, groups, functionals)


def everything(rank: int) -> list[dict[str, Any]]:
    return [part(rank) for part in SETS]


@pytest.fixture(scope="module")
def simulated() -> tuple[list[dict[str, Any]], ...]:
    return run_ranks(everything, SIZE).results


@pytest.fixture(scope="module")
def real() -> tuple[list[dict[str, Any]], ...]:
    return run_ranks(everything, SIZE, "gloo").results


def flat(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [part for key in value for part in (key, *flat(value[key]))]
    if isinstance(value, list | tuple):
        return [part for item in value for part in flat(item)]
    return [value]


@pytest.mark.parametrize("part", range(len(SETS)), ids=[one.__name__ for one in SETS])
def test_simulator_and_gloo_agree(part: int, simulated: Any, real: Any) -> None:
    for mine, other in zip(simulated, real, strict=True):
        left, right = flat(mine[part]), flat(other[part])
        assert len(left) == len(right) > 3
        for one, two in zip(left, right, strict=True):
            assert torch.equal(one, two) if isinstance(one, Tensor) else one == two


def test_results_are_right(simulated: Any) -> None:
    reduced, moved, _, sent = (simulated[0][SETS.index(part)] for part in (reductions, moves, objects, messages))
    assert reduced["SUM"].tolist() == [3.0, 6.0, 9.0, 12.0]
    assert reduced["AVG"].tolist() == [1.0, 2.0, 3.0, 4.0]
    assert reduced["PREMUL_SUM"].tolist() == [1.5, 3.0, 4.5, 6.0]
    assert moved["all_gather"][0].tolist() == [0.0, 1.0, 10.0, 11.0, 20.0, 21.0]
    assert moved["reduce_scatter"][0].tolist() == [30.0, 33.0]
    assert moved["all_to_all"][-1].tolist() == [0.0, 1.0, 1.0, 2.0, 2.0, 2.0]
    assert sent["in order"][0].item() == 1.0
    assert sent["any"][1] == 2


def test_large_sums_are_taken_in_the_order_of_the_ranks() -> None:
    torch.manual_seed(0)
    terms = [torch.randn(100_003) for _ in range(4)]

    def work(rank: int) -> Tensor:
        value = terms[rank].clone()
        dist.all_reduce(value, op=dist.ReduceOp.AVG)
        return value

    right = (((terms[0] + terms[1]) + terms[2]) + terms[3]) / 4
    assert all(torch.equal(result, right) for result in run_ranks(work, 4).results)


@pytest.mark.parametrize("executor", ["simulator", "gloo"])
def test_sparse_gradients_are_summed(executor: str) -> None:
    def work(rank: int) -> Tensor:
        table = torch.nn.Embedding.from_pretrained(torch.ones(4, 2), freeze=False, sparse=True)
        wrapped = torch.nn.parallel.DistributedDataParallel(table)
        wrapped(torch.tensor([rank, 3])).sum().backward()
        assert table.weight.grad is not None
        return table.weight.grad.to_dense()

    for result in run_ranks(work, 2, executor).results:
        assert result[:, 0].tolist() == [0.5, 0.5, 0.0, 1.0]


def test_an_input_may_be_a_part_of_the_output() -> None:
    def work(rank: int) -> tuple[Tensor, Tensor]:
        gathered = torch.zeros(4)
        own = gathered.view(2, 2)[rank]
        own.fill_(rank + 1)
        dist.all_gather_into_tensor(gathered, own)
        whole = torch.arange(4.0)
        dist.reduce_scatter_tensor(whole.view(2, 2)[rank], whole)
        return gathered, whole.view(2, 2)[rank].clone()

    results = run_ranks(work, 2).results
    assert results[0][0].tolist() == results[1][0].tolist() == [1.0, 1.0, 2.0, 2.0]
    assert [result[1].tolist() for result in results] == [[0.0, 2.0], [4.0, 6.0]]


def test_collectives_are_no_changes_that_autograd_sees() -> None:
    def work(rank: int) -> int:
        weight = torch.ones(2, requires_grad=True)
        product = (weight * 2).exp()
        with torch.no_grad():
            buffer = product.detach()
        before = buffer._version
        dist.broadcast(buffer, 0)
        product.sum().backward()  # would complain of a tensor that it needs and that was changed
        return buffer._version - before

    assert run_ranks(work, 2).results == (0, 0)
