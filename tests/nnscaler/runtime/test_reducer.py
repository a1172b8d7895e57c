"""Who shares a gradient, in which buckets it travels, and in which order groups meet."""
# ruff: noqa: RUF012 - stages are written here as generated text writes them

from __future__ import annotations

import torch

from nnscaler.buckets import gathered_together, in_buckets
from nnscaler.runtime import Parameter, Sharded, Simulator, Stage
from nnscaler.runtime.communication.simulator import SimulatedCommunicator
from nnscaler.runtime.role import RunContext
from nnscaler.runtime.training.gradients.accumulate import Gradients
from nnscaler.runtime.training.gradients.buckets import Departures, Flat, SumBucket
from nnscaler.runtime.training.gradients.gradient_plan import holding, sums_of, wanted


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


def test_the_first_bucket_and_the_last_are_small_and_no_tensor_is_divided() -> None:
    mib = 2**20
    assert in_buckets([]) == [] and in_buckets([5 * mib]) == [[0]]
    assert in_buckets([mib // 4] * 8) == [[0, 1, 2, 3], [4, 5, 6, 7]]  # at least 1 MiB
    assert [len(bucket) for bucket in in_buckets([mib] * 64)] == [8, 24, 24, 8]
    assert in_buckets([4 * mib, 10 * mib, 2 * mib, mib, mib, 14 * mib]) == [[0], [1, 2], [3, 4], [5]]
    assert in_buckets([24 * mib] * 16) == [[i] for i in range(16)]  # at most 25 MiB
    assert [len(bucket) for bucket in gathered_together([mib] * 64)] == [25, 25, 14]


class Small(Stage):
    ranks = (0, 1, 2)
    axes = {"dp": 3}
    parameters = {f"p{i}": Parameter(f"p{i}", (2, 5), "float32", reduce=("dp",)) for i in range(3)}


class Tied(Stage):
    index = 1
    ranks = (0, 1, 2)
    axes = {"dp": 3}
    parameters = {
        "b": Parameter("b", (2,), "float32", reduce=("dp",), copies=((0, 1, 2), (1, 2, 0))),
        "a": Parameter("a", (2,), "float32", reduce=("dp",), copies=((0, 1, 2), (1, 2, 0))),
    }


def built(kind: type[Stage], rank: int) -> Stage:
    stage = kind(rank, RunContext())
    for name, described in kind.parameters.items():
        stage.at_rest[name] = torch.nn.Parameter(torch.zeros(described.shape))
        setattr(stage, name, stage.at_rest[name])
    return stage


def test_the_last_parameters_come_first_and_those_of_several_stages_by_name() -> None:
    stages = {0: built(Small, 1), 1: built(Tied, 1)}
    plan = sums_of(wanted(stages, (), None).values())
    assert [[slot[0].held.fqn for slot in bucket] for bucket in plan] == [["p2", "p1", "p0"], ["a", "b"]]
    assert sums_of(wanted({1: stages[1], 0: stages[0]}, (), None).values())[1][0][0].held.fqn == "a"


def test_buckets_of_a_group_leave_in_one_order_and_no_group_waits_for_another() -> None:
    """Ranks complete their buckets in different orders, and are in two groups each."""

    def run(communicator: SimulatedCommunicator) -> tuple[list[float], list[str]]:
        calls: list[str] = []
        communicator.listener = lambda call: calls.append(call.context.split()[-1])
        rank = communicator.rank
        groups = {"a": (0, 1, 2), "b": (0, 1, 2), "c": (0, 1), "d": (1, 2), "e": (0, 2)}
        groups = {name: group for name, group in groups.items() if rank in group}
        found = {n: SumBucket(g, (n,), [(3,)], torch.float32, torch.device("cpu"), Flat()) for n, g in groups.items()}
        departures = Departures(communicator)
        departures.expect(found.values())
        for name in ("acbe", "dcba", "bead")[rank]:
            found[name].place(0).fill_(10.0**rank)
            departures.filled(found[name])
        for name in sorted(groups, reverse=True):
            found[name].wait()
        return [found[name].place(0)[0].item() for name in "ab"], calls

    for (a, b), calls in Simulator(3).run(run):
        assert a == b == 111.0
        assert calls.index("`a`") < calls.index("`b`") and len(calls) == 4


def test_local_copies_are_added_before_the_sum_and_both_get_it() -> None:
    def run(communicator: SimulatedCommunicator) -> list[float]:
        stages = {}
        for index, (ranks, own) in enumerate((((0, 1), 1.0), ((1, 0), 10.0))):

            class Copy(Stage):
                parameters = {"w": Parameter("tied", (1,), "float32", reduce=("dp",), copies=((0, 1), (1, 0)))}

            Copy.index, Copy.ranks, Copy.axes = index, ranks, {"dp": 2}
            stages[index] = built(Copy, communicator.rank)
            stages[index].own = own
        gradients = Gradients(stages, (), communicator)
        gradients.begin()
        for stage in stages.values():
            stage.w.grad = torch.tensor([stage.own])
        gradients.finish()
        first, second = (stage.w.grad for stage in stages.values())
        assert first.data_ptr() != second.data_ptr()
        return [first.item(), second.item()]

    assert Simulator(2).run(run) == [[22.0, 22.0]] * 2
