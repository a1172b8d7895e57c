"""Who shares a gradient, in which buckets it travels, and in which order groups meet."""
# ruff: noqa: RUF012 - stages are written here as generated text writes them

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nnscaler.communication_buckets import gathered_together, in_buckets
from nnscaler.runtime import ExecutorSettings, Input, Loss, Parameter, RankExecutor, Sharded, Simulator, Stage
from nnscaler.runtime.communication.communicator import Communicator
from nnscaler.runtime.communication.simulator import SimulatedCommunicator
from nnscaler.runtime.stage_base_class import RunContext
from nnscaler.runtime.training.gradients.accumulate_and_reduce import Gradients
from nnscaler.runtime.training.gradients.buckets import Departures, SumBucket
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
    assert [len(bucket) for bucket in in_buckets([mib] * 64)] == [8, 16, 16, 16, 8]
    assert in_buckets([4 * mib, 10 * mib, 2 * mib, mib, mib, 14 * mib]) == [[0], [1], [2, 3, 4], [5]]
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
        found = {n: SumBucket(g, (n,), [(3,)], torch.float32, torch.device("cpu")) for n, g in groups.items()}
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


def test_what_a_step_leaves_that_fails_is_not_written_over() -> None:
    stage = built(Small, 0)
    gradients, left = Gradients({0: stage}, (), Communicator(0, 3)), []
    for value in (1.0, 5.0):
        gradients.begin()  # the step before has not come to its end
        stage.p0.grad = torch.full((2, 5), value)
        gradients.widen()
        left.append(stage.p0.grad)
    assert left[0].eq(1).all() and left[1].eq(5).all()


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


class Once(Stage):
    index = 0
    ranks = (0,)
    axes = {}
    parameters = {"w": Parameter("w", (3,), "bfloat16", {})}
    inputs = {"x": Input("x", {})}
    loss = Loss({})

    def forward(self, x):
        return {"loss": (self.w * x).pow(2).sum()}


class Dtypes(TorchDispatchMode):
    """Notes the dtypes of all that is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[torch.dtype] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.seen |= {t.dtype for t in tree_leaves(result) if isinstance(t, Tensor)}
        return result


@pytest.mark.parametrize("scale", [1.0, 3.0])
@pytest.mark.parametrize("schedule", ["F0.0 B0.0", "F0.0 I0.0 W0.0"])
def test_what_one_backward_makes_stays_in_half_precision(
    role: Callable[..., ModuleType], schedule: str, scale: float
) -> None:
    """Bit for bit what is added up in float32 and rounded once; and no gradient in float32 unless it is divided, or its
    backward is in halves."""
    torch.manual_seed(0)
    w, x = torch.randn(3).bfloat16(), torch.randn(8, 3).bfloat16()
    leaf = w.clone().requires_grad_()
    ((leaf * x).pow(2).sum() * scale).backward()
    assert leaf.grad is not None

    def work(communicator) -> tuple[Tensor, Tensor]:
        settings = ExecutorSettings(loss_scale=scale)
        executor = RankExecutor(role(schedule, Once), 0, communicator, {"w": w}, settings)
        with Dtypes() as dtypes_of:
            executor.step({"x": x})
        assert (torch.float32 in dtypes_of.seen) == (scale != 1 or "W" in schedule)
        first = executor.parameters[0, "w"].grad.clone()
        executor.step({"x": x}, last=False)
        return first, executor.parameters[0, "w"].grad

    ((first, second),) = Simulator(1).run(work)
    wide = leaf.grad.float() / scale
    assert torch.equal(first, wide.bfloat16())
    assert torch.equal(second, (wide + first.float()).bfloat16())
