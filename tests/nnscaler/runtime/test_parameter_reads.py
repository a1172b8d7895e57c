"""Parameters that lie in shards where they are read: when they are whole, and what backward gathers again (ZeRO-3)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from nnscaler import communication_buckets
from nnscaler.codegen.compiled_program import Program
from nnscaler.compile import WantedPlan, compile_traced
from nnscaler.instructions import Instruction
from nnscaler.ir.operation_annotations import signatures
from nnscaler.layout import Sharded
from nnscaler.performance.predict_step_time import replay
from nnscaler.planning.cluster.description import load_cluster
from nnscaler.planning.cost.analytic import AnalyticCost
from nnscaler.planning.cost.model_protocol import Overheads
from nnscaler.planning.plan_from_axes import make_plan
from nnscaler.runtime import Simulator
from nnscaler.runtime.communication.communicator import CommunicationCall, Communicator, ProgramError
from nnscaler.runtime.communication.sharded_parameter_gathers import ParameterReads, Read
from nnscaler.runtime.program.import_role_and_user_files import letting_go, load_role
from nnscaler.runtime.recompute_in_backward import SavedValues
from nnscaler.runtime.stage_base_class import Stage
from nnscaler.runtime.training.backward import BackwardPasses
from nnscaler.runtime.training.executor import RankExecutor
from nnscaler.runtime.training.executor_settings import ExecutorSettings
from nnscaler.tracing import trace
from tests.calls import check
from tests.timings import program_of, trained


class Adapted(nn.Module):
    """Frozen layers, whose weights backward reads as well, with small ones that are trained beside them."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.words = nn.Embedding(6, 8)
        self.base = nn.ModuleList(nn.Linear(8, 8) for _ in range(layers)).requires_grad_(False)
        self.down = nn.ModuleList(nn.Linear(8, 2, bias=False) for _ in range(layers))
        self.up = nn.ModuleList(nn.Linear(2, 8, bias=False) for _ in range(layers))
        self.norm = nn.LayerNorm(8)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        for base, down, up in zip(self.base, self.down, self.up, strict=True):
            x = torch.tanh(base(x) + up(down(x)))
        return self.norm(x).square().mean()


def run_step(program: Program, folder: Path) -> None:
    """Run a step on all ranks of the simulator, with values let go of as where ranks are processes."""
    path = program.save(folder / "program")
    roles = {
        r: load_role(path / role.file, transform=letting_go) for role in program.manifest.roles for r in role.ranks
    }

    def step(communicator: Communicator) -> None:
        rank = communicator.rank
        RankExecutor(roles[rank], rank, communicator, program.state, ExecutorSettings()).step(program.inputs)

    Simulator(program.manifest.ranks).run(step)


IDS = torch.arange(24).reshape(12, 2) % 6


@pytest.mark.long
@pytest.mark.parametrize("options", [{"micro_batches": 2}, {"plan": "dp=3,zero=3", "ranks": 3}])
def test_frozen_parameters_are_gathered_again_too(options: dict[str, Any], tmp_path: Path) -> None:
    """The profile counts what is made, of each parameter."""
    plan, ranks = options.pop("plan", "dp=2,zero=3"), options.pop("ranks", 2)
    torch.manual_seed(0)
    made = check(trace(Adapted(), {"ids": IDS}), plan, ranks, tmp_path, **options)
    gathered: Counter[str] = Counter()
    for (_, kind, _, _, _, phase), times in made.items():
        gathered[phase] += times * (kind == "all_gather")
    # of 19 parameters backward reads 4 frozen matrices and 8 others, but for the first layer's frozen one: its input
    # needs a gradient too, of the words
    passes = ranks * options.get("micro_batches", 1)
    assert gathered["F0"] == 19 * passes and gathered["B0"] == 12 * passes


class HidingCost(AnalyticCost):
    """A cost of ranks that begin collectives early: small parameters share messages there."""

    @property
    def overheads(self) -> Overheads:
        return Overheads(hidden=(0.5, 0.5))


def test_what_is_gathered_again_takes_its_time() -> None:
    """Also of small frozen parameters, which share messages with the trained ones and have no way back."""
    torch.manual_seed(0)
    graph = trace(Adapted(), {"ids": IDS}).graph
    known = dict(signatures(graph))
    plan = make_plan(graph, known, {"dp": 2, "zero": 3})
    found = replay(graph, known, plan, HidingCost(load_cluster("a100x8").scaled(2)))
    (price,) = found.prediction.prices
    again = [seconds for seconds in price.again if seconds]
    assert len(again) == 12 and all(0 < seconds < price.ahead for seconds in again)


@pytest.mark.long
def test_ranks_with_unequal_parts_of_a_batch_gather_once(tmp_path: Path) -> None:
    """Autograd may save other values for other sizes, and all ranks are to gather the same."""
    torch.manual_seed(0)
    made = check(trace(Adapted(), {"ids": IDS[:11]}), "dp=2,zero=3", 2, tmp_path)
    assert {phase for _, kind, _, _, _, phase in made if kind == "all_gather"} == {"F0"}


@pytest.mark.long
def test_what_is_whole_is_let_go_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """None of several dims is there when backward begins, and there is one at a time beside what comes next."""
    torch.manual_seed(0)
    traced = trace(Adapted(8), {"ids": IDS})
    program = compile_traced(traced, WantedPlan(2, "dp=2,zero=3", micro_batches=3), model={"name": "model"})
    wholes: dict[ParameterReads, list[StorageWeakRef]] = {}
    at_begin: list[int] = []
    in_all: list[int] = []

    def alive(reads: ParameterReads) -> int:
        return sum(not whole.expired() for whole in wholes[reads])

    def whole(self: ParameterReads, read: Read) -> Tensor:
        found = as_it_is(self, read)
        if found.dim() > 1:
            wholes.setdefault(self, []).append(StorageWeakRef(found.untyped_storage()))
            in_all.append(alive(self))
        return found

    def run(self: BackwardPasses, *given: Any) -> None:
        at_begin.append(alive(self._reads))
        backward(self, *given)

    as_it_is, backward = ParameterReads.whole, BackwardPasses.run
    monkeypatch.setattr(ParameterReads, "whole", whole)
    monkeypatch.setattr(BackwardPasses, "run", run)

    run_step(program, tmp_path)
    assert at_begin == [0] * 6
    assert max(in_all) <= 3, "of 25: a layer has three"


@pytest.mark.long
def test_what_the_second_half_of_a_backward_does_not_read_is_let_go_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I keeps its part of the graph, and with it the views: what it alone reads goes all the same."""
    torch.manual_seed(0)
    wanted = WantedPlan(4, "dp=2,pp=2,zero=3", schedule="zb-h1", micro_batches=3)
    program = compile_traced(trace(Adapted(), {"ids": IDS}), wanted, model={"name": "model"})
    wholes: dict[ParameterReads, list[tuple[bool, StorageWeakRef]]] = {}
    after: dict[bool, list[int]] = {False: [], True: []}

    def whole(self: ParameterReads, read: Read) -> Tensor:
        found = as_it_is(self, read)
        if found.dim() > 1:
            kept = read.parameter.requires_grad, StorageWeakRef(found.untyped_storage())
            wholes.setdefault(self, []).append(kept)
        return found

    def run(self: BackwardPasses, stage: Stage, instruction: Instruction, scale: float) -> None:
        backward(self, stage, instruction, scale)
        if instruction == Instruction("I", 1, (0,)):
            for trained, found in after.items():
                found.append(sum(t == trained and not storage.expired() for t, storage in wholes[self._reads]))

    as_it_is, backward = ParameterReads.whole, BackwardPasses.run
    monkeypatch.setattr(ParameterReads, "whole", whole)
    monkeypatch.setattr(BackwardPasses, "run", run)

    run_step(program, tmp_path)
    assert after[False] == [0, 0] and min(after[True]) == 4


@pytest.mark.parametrize(("fails", "at"), [("whole", 60), ("give", 25)])
def test_a_step_after_one_that_failed(fails: str, at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for what the failed one had begun, and add it to no gradient of the next."""
    torch.manual_seed(0)
    program = compile_traced(trace(Adapted(), {"ids": IDS}), WantedPlan(2, "dp=2,zero=3"), model={"name": "model"})
    path = program.save(tmp_path / "program")
    role = load_role(path / program.manifest.roles[0].file)
    as_it_is, calls = getattr(ParameterReads, fails), Counter[ParameterReads]()

    def failing(self: ParameterReads, *given: Any) -> Any:
        calls[self] += 1
        if calls[self] == at:  # in a later step, whose gathers are begun before
            raise RuntimeError("planted")
        return as_it_is(self, *given)

    def steps(communicator: Communicator) -> dict[str, Tensor]:
        rank = communicator.rank
        executor = RankExecutor(role, rank, communicator, program.state, ExecutorSettings())
        for _ in range(5):
            executor.zero_grad()
            try:
                executor.step(program.inputs)
            except ProgramError as error:
                assert "planted" in str(error)
        return {name: p.grad for (_, name), p in executor.parameters.items() if p.grad is not None}

    monkeypatch.setattr(communication_buckets, "LEAST_BYTES", 512)
    right = Simulator(2).run(steps)
    monkeypatch.setattr(ParameterReads, fails, failing)
    for found, wanted in zip(Simulator(2).run(steps), right, strict=True):
        assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert min(calls.values()) > at


@pytest.mark.long
def test_ranks_with_unequal_shards_gather_as_far_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """They begin their calls in one order, which follows from what is under way: from wholes, and not from shards."""
    monkeypatch.setattr(communication_buckets, "LEAST_BYTES", 1)
    program = program_of("dp=3,zero=3")
    reads: set[ParameterReads] = set()
    as_it_is = ParameterReads.know

    def know(self: ParameterReads, parameters: Iterable[nn.Parameter]) -> None:
        reads.add(self)
        as_it_is(self, parameters)

    monkeypatch.setattr(ParameterReads, "know", know)
    trained(program, None)
    shards = {sum(p.nbytes for p in each._known) for each in reads}
    found = [each._ahead_bytes for each in reads]
    assert len(shards) > 1 and len(found) == 3, "shards of different sizes"
    assert found[0] == found[1] == found[2] and all(found[0].values())


class _ReadTwice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w.T

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        x, _ = ctx.saved_tensors
        _, w = ctx.saved_tensors
        return gradients[0] @ w, gradients[0].T @ x


class OneRank:
    """A communicator of one rank whose gathers are counted."""

    def __init__(self) -> None:
        self.calls: list[CommunicationCall] = []

    def reads(self) -> ParameterReads:
        def run(communicator: Communicator) -> ParameterReads:
            communicator.listener = self.calls.append
            return ParameterReads(communicator)

        return Simulator(1).run(run)[0]


def read_of(parameter: nn.Parameter) -> Read:
    return Read(parameter, (0,), 0, Sharded(0), None)


def test_values_may_be_read_twice_and_show_parts_of_a_whole() -> None:
    one = OneRank()
    reads, weight, x = one.reads(), nn.Parameter(torch.randn(6, 4)), torch.randn(3, 4, requires_grad=True)
    values = SavedValues(reads)
    with reads.passing((0, "F")), values.hooks():
        whole = reads.whole(read_of(weight)).requires_grad_()
        y = _ReadTwice.apply(x, whole[1:5]) @ whole[:4]  # type: ignore[no-untyped-call]
    assert len(one.calls) == 1
    with reads.passing((0, "B")):
        found = torch.autograd.grad(y.sum(), (x, whole))
    assert len(one.calls) >= 2
    wanted = torch.autograd.grad((x @ weight[1:5].T @ weight[:4]).sum(), (x, weight))
    assert all(torch.allclose(a, b) for a, b in zip(found, wanted, strict=True))


def test_what_lies_where_a_whole_lay_is_kept() -> None:
    """An address is used again as soon as it is free; what is saved there is no parameter."""
    reads, weight = OneRank().reads(), nn.Parameter(torch.randn(64, 64))
    places: set[int] = set()
    with reads.passing((0, "F")):
        for _ in range(50):
            whole = reads.whole(read_of(weight))
            places.add(whole.data_ptr())
            assert reads.view_of_whole(whole.T) is not None
            del whole
            others = [torch.zeros(64, 64) for _ in range(3)]
            assert all(reads.view_of_whole(other) is None for other in others)
            assert reads.view_of_whole(torch.zeros(3).to_sparse()) is None
            places.difference_update(other.data_ptr() for other in others)
    assert len(places) < 50, "no address was used again, so nothing is shown"


def test_conjugates_are_kept() -> None:
    """A bit of theirs is no part of the memory."""
    reads, weight = OneRank().reads(), nn.Parameter(torch.randn(4, 4, dtype=torch.complex64))
    with reads.passing((0, "F")):
        whole = reads.whole(read_of(weight))
        assert reads.view_of_whole(whole.mH) is None is reads.view_of_whole(whole.conj().imag)
        assert reads.view_of_whole(whole.mT) is not None


def test_small_ones_and_other_views_are_kept() -> None:
    reads, bias, weight = OneRank().reads(), nn.Parameter(torch.randn(8)), nn.Parameter(torch.randn(4, 4))
    with reads.passing((0, "F")):
        assert reads.view_of_whole(reads.whole(read_of(bias))) is None
        whole = reads.whole(read_of(weight))
        assert reads.view_of_whole(whole.view(torch.int32)) is None
    assert reads.view_of_whole(whole) is None, "the pass is over"


def test_what_is_changed_in_place_is_found() -> None:
    """Autograd makes no check of its own of values that hooks save."""
    reads, x = OneRank().reads(), torch.randn(3, requires_grad=True)
    with SavedValues(reads).hooks():
        y = x.exp()
        z = (y * y).sum()
    y.detach().add_(1)
    with pytest.raises(RuntimeError, match=r"a tensor of shape \[3\] that backward needs was modified in place"):
        z.backward()
