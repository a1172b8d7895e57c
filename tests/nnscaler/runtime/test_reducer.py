"""Who shares a gradient, in which buckets it travels, and in which order groups meet."""
# ruff: noqa: RUF012 - stages are written here as generated text writes them

from __future__ import annotations

import torch
from torch import Tensor

from nnscaler.runtime import Parameter, Sharded, Simulator, Stage
from nnscaler.runtime.role import RunContext
from nnscaler.runtime.training.gradients import Holding, holding, reduce_gradients


class Meshed(Stage):
    ranks = (4, 5, 6, 7, 8, 9)
    axes = {"dp": 3, "tp": 2}


def group(rank: int, description: Parameter) -> tuple[int, ...]:
    return holding(Meshed(rank, RunContext()), description).group


def test_a_group_varies_on_the_reduced_axes_in_every_stage_that_holds_a_copy() -> None:
    sharded = Parameter("w", (4,), "float32", {"tp": Sharded(0)}, reduce=("dp",))
    assert group(6, sharded) == (4, 6, 8) and group(9, sharded) == (5, 7, 9)
    assert group(6, Parameter("w", (4,), "float32")) == (6,)
    assert group(6, Parameter("w", (4,), "float32", reduce=("tp", "dp"))) == (4, 5, 6, 7, 8, 9)
    copies = ((4, 5, 6, 7, 8, 9), (5, 4, 0, 1, 2, 3))
    assert group(4, Parameter("w", (4,), "float32", reduce=("dp",), copies=copies)) == (0, 2, 4, 5, 6, 8)


def test_buckets_and_order() -> None:
    """Two groups overlap on every rank, gradients come in another order on each, and buckets hold two tensors."""
    holdings = [Holding(f"p{i}", (0, 1, 2)) for i in range(3)]

    def run(communicator) -> tuple[list[Tensor], list[str]]:
        calls: list[str] = []
        communicator.listener = lambda call: calls.append(f"{call.shapes[0]} {call.ranks}")
        rank = communicator.rank
        gradients = [(h, torch.full((2, 5), 10.0**rank * (i + 1))) for i, h in enumerate(holdings)]
        pairs = {0: [(0, 1), (0, 2)], 1: [(0, 1), (1, 2)], 2: [(0, 2), (1, 2)]}[rank]
        gradients += [(Holding("q", pair), torch.full((3,), rank + 1.0)) for pair in reversed(pairs)]
        gradients.append((Holding("alone", (rank,)), torch.tensor(7.0)))
        turned = gradients[rank:] + gradients[:rank]
        summed = reduce_gradients(turned, communicator, bucket_bytes=80)
        return summed[len(summed) - rank :] + summed[: len(summed) - rank], calls

    results = Simulator(3).run(run)
    for rank, (summed, calls) in enumerate(results):
        assert [s.unique().tolist() for s in summed[:3]] == [[111.0], [222.0], [333.0]]
        assert summed[5].item() == 7.0 and all(s.shape == (2, 5) for s in summed[:3])
        pairs = [pair for pair in ((0, 1), (0, 2), (1, 2)) if rank in pair]
        assert [s.tolist() for s in summed[3:5]] == [[a + b + 2.0] * 3 for a, b in reversed(pairs)]
        groups = sorted([*pairs, (0, 1, 2), (0, 1, 2)])
        shapes = {(0, 1, 2): ["(20,)", "(2, 5)"]}
        assert calls == [f"{shapes[g].pop(0) if g in shapes else '(3,)'} {g}" for g in groups]


def test_local_copies_are_added_before_the_sum_and_both_get_it() -> None:
    def run(communicator) -> list[Tensor]:
        held = Holding("tied", (0, 1))
        return reduce_gradients([(held, torch.tensor([1.0])), (held, torch.tensor([10.0]))], communicator)

    assert [[t.item() for t in r] for r in Simulator(2).run(run)] == [[22.0, 22.0]] * 2
