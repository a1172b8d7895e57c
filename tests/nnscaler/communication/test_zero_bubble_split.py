"""What each half of a backward does, keeps and costs, by the compiler, is what the runtime does."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from nnscaler.communication.communicated_graph import CommunicatedGraph, Compute
from nnscaler.communication.insert_conversions import materialise
from nnscaler.communication.stage_memory_and_work import kept_bytes, kept_for_weights, stage_memory, stage_work
from nnscaler.communication.statements_of_backward_halves import BOTH, statement_halves
from nnscaler.compile import WantedPlan, compile_traced
from nnscaler.instructions import Instruction
from nnscaler.ir.operation_annotations import signatures
from nnscaler.runtime import recompute_in_backward, split_backward
from nnscaler.runtime.communication.communicator import Communicator
from nnscaler.runtime.communication.sharded_parameter_gathers import WholeView
from nnscaler.runtime.communication.simulator import Simulator
from nnscaler.runtime.program.import_role_and_user_files import load_role
from nnscaler.runtime.stage_base_class import Stage
from nnscaler.runtime.training.backward import BackwardPasses
from nnscaler.runtime.training.executor import RankExecutor
from nnscaler.runtime.training.executor_settings import ExecutorSettings
from nnscaler.scheduling.registry import get_schedule
from nnscaler.scheduling.timeline import peak_of_stage
from nnscaler.tracing import Traced, trace
from nnscaler.transform.apply import apply_plan
from nnscaler.transform.plan import AssignStep, Plan, RecomputeStep
from tests import halves, traced_examples
from tests.sampling import only


def communicated(traced: Traced, plan: Plan) -> CommunicatedGraph:
    known = dict(signatures(traced.graph))
    return materialise(apply_plan(traced.graph, known, plan), known)


class Shared(torch.nn.Module):
    """Its weight is used twice in the second stage, and its bias by two operators that do not follow each other."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(6, 6)
        self.second = torch.nn.Linear(6, 6, bias=False)
        self.third = torch.nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(torch.tanh(self.second(self.first(x))))
        loss: Tensor = self.third(x.sin()).square().mean()
        return loss


def test_a_parameter_that_is_used_again_is_left_to_the_first_half() -> None:
    torch.manual_seed(0)
    traced = trace(Shared(), {"x": torch.randn(4, 6)}, self_check=False)
    names = [o.name for o in traced.graph.operations]
    plan = Plan((("pp", 2),), (AssignStep((names[0],), (0,)), AssignStep(tuple(names[1:]), (1,))), micro_batches=2)
    made = communicated(traced, plan)
    found = []
    for program in made.stages:
        shares = statement_halves(made.partitioned.graph, program)
        found.append(
            {
                s.operation.name: half.gradients
                for s, half in zip(program.forward, shares, strict=True)
                if isinstance(s, Compute)
            }
        )
    assert found[0] == {"linear": 1.0}
    linears = [share for name, share in found[1].items() if name.startswith("linear")]
    assert linears == [0.0, 0.0, BOTH]
    assert all(share == 0 for name, share in found[1].items() if not name.startswith("linear"))


class Watched(recompute_in_backward.Saved):
    """A saved value that can be referred to weakly."""


def held_between(traced: Traced, ranks: int, plan: Plan, folder: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """Bytes that a rank of the second of two stages keeps of a micro-batch after I."""
    program = compile_traced(traced, WantedPlan(ranks, plan), model={"name": "model"})
    path = program.save(folder / "program")
    roles = [load_role(path / role.file) for role in program.manifest.roles]
    made: dict[recompute_in_backward.SavedValues, list[weakref.ref[recompute_in_backward.Saved]]] = {}
    gathered: dict[recompute_in_backward.SavedValues, list[WholeView]] = {}
    regions: weakref.WeakSet[recompute_in_backward._Region] = weakref.WeakSet()
    found: list[int] = []
    start, run = recompute_in_backward._Region.__init__, BackwardPasses.run

    def hooks(self: recompute_in_backward.SavedValues) -> saved_tensors_hooks:
        def pack(value: Tensor) -> Watched | WholeView:
            view = self.reads and self.reads.view_of_whole(value)
            if view is not None:
                gathered.setdefault(self, []).append(view)
                return view
            watched = Watched(value)
            made.setdefault(self, []).append(weakref.ref(watched))
            return watched

        return saved_tensors_hooks(pack, self.take)

    def begun(self: recompute_in_backward._Region, *given: object) -> None:
        start(self, *given)  # type: ignore[arg-type]
        regions.add(self)

    def watched_run(self: BackwardPasses, stage: Stage, instruction: Instruction, scale: float) -> None:
        run(self, stage, instruction, scale)
        if instruction == Instruction("I", 1, (0,)):
            gc.collect()
            split = self._split[instruction.of("F")]
            stored = {getattr(stage, name).untyped_storage().data_ptr() for name in (*stage.parameters, *stage.buffers)}
            values = [one.value for ref in made[split._saved] if (one := ref()) is not None and one.value is not None]
            for region in regions:
                values += region._values.values() if region._saved is split._saved else ()
            values += [
                view.gathered.whole for view in gathered.get(split._saved, []) if view.gathered.whole is not None
            ]
            for start in (start for group in split._later for start in group.starts):
                if isinstance(start, split_backward._Product):
                    values += [start.x, start.arrived]
                else:
                    values += [t for t in start.arrived if t is not None]
            storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in values}
            found.append(sum(size for pointer, size in storages.items() if pointer not in stored))

    monkeypatch.setattr(recompute_in_backward.SavedValues, "hooks", hooks)
    monkeypatch.setattr(recompute_in_backward._Region, "__init__", begun)
    monkeypatch.setattr(BackwardPasses, "run", watched_run)

    def step(communicator: Communicator) -> None:
        settings = ExecutorSettings(dropout=False)
        rank = communicator.rank
        RankExecutor(roles[rank * len(roles) // ranks], rank, communicator, program.state, settings).step(
            program.inputs
        )

    Simulator(ranks).run(step)
    return found[0]


@pytest.mark.parametrize(
    ("ranks", "axes", "again"),
    only((2,), [(2, "pp=2", False), (2, "pp=2", True), (4, "dp=2,pp=2,zero=3", False), (4, "dp=2,pp=2,zero=3", True)]),
)
def test_memory_between_the_halves(
    ranks: int, axes: str, again: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To 2 %: what autograd holds, recomputed or not, is what the profile counts; no parameter that was gathered."""
    traced = traced_examples.traced("gpt")
    schedule = halves.registered(monkeypatch, halves.late)
    wanted = WantedPlan(ranks, axes, micro_batches=2, schedule=schedule)
    plan = compile_traced(traced, wanted, model={"name": "model"}).plan
    if again:
        plan = replace(plan, steps=(*plan.steps, *(RecomputeStep((f"blocks.{i}",)) for i in range(4))))
    made = communicated(traced, plan)
    counted = kept_for_weights(made.partitioned.graph, made.stages[1])
    assert held_between(traced, ranks, plan, tmp_path, monkeypatch) == pytest.approx(counted, rel=0.02)
    first = made.stages[0]
    assert kept_for_weights(made.partitioned.graph, first) == kept_bytes(made.partitioned.graph, first)


def test_the_peak_counts_each_half() -> None:
    whole = get_schedule("1f1b")(2, 1, 4)
    adjacent, late = (halves.schedule_in_halves(whole, place) for place in (halves.adjacent, halves.late))
    assert [peak_of_stage(whole, s, 10, 3) for s in (0, 1)] == [20, 10]
    assert [peak_of_stage(adjacent, s, 10, 3) for s in (0, 1)] == [20, 10]
    assert [peak_of_stage(late, s, 10, 3) for s in (0, 1)] == [2 * 10 + 2 * 3, 10 + 3 * 3]
    assert [peak_of_stage(adjacent, s, 10, 13) for s in (0, 1)] == [10 + 13, 13]  # gradients are kept beside values
    assert [peak_of_stage(late, s) for s in (0, 1)] == [4, 4]


def test_memory_of_a_program_in_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    traced = traced_examples.traced("gpt")
    plan = compile_traced(traced, WantedPlan(2, "pp=2", micro_batches=4), model={"name": "model"}).plan
    made, order = communicated(traced, plan), get_schedule("1f1b")(2, 1, 4)
    whole = stage_memory(made, order)
    assert stage_memory(made, halves.schedule_in_halves(order, halves.late))[1].activations > whole[1].activations
    again = stage_memory(made, halves.schedule_in_halves(order, halves.adjacent))
    graph, last = made.partitioned.graph, made.stages[1]
    assert again[1].activations == max(kept_bytes(graph, last), kept_for_weights(graph, last))


def test_work_of_the_halves() -> None:
    """The first stage has nothing to send back: all of it is W. Elsewhere W is less than half."""
    traced = traced_examples.traced("gpt")
    known = dict(signatures(traced.graph))
    plan = compile_traced(traced, WantedPlan(2, "pp=2", micro_batches=4), model={"name": "model"}).plan
    first, last = stage_work(materialise(apply_plan(traced.graph, known, plan), known), known)
    assert 0.8 * first.backward < first.weights <= first.backward
    assert 0.25 * last.backward < last.weights < 0.5 * last.backward
