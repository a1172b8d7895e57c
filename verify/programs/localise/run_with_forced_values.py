"""Run a program on the simulator with right values forced on it, and single statements again on other operands."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import CodeType
from typing import Any, TypeVar

import torch
from torch import Tensor

from nnscaler.ir.graph import Graph
from nnscaler.runtime.communication.communicator import Communicator
from nnscaler.runtime.communication.simulator import Simulator
from nnscaler.runtime.jobs.load_adjusted_clock import join_within
from nnscaler.runtime.program.import_role_and_user_files import load_role
from nnscaler.runtime.shards import shard
from nnscaler.runtime.stage_base_class import Stage
from nnscaler.runtime.tensor_bits_and_differences import same_bits
from nnscaler.runtime.training.executor import RankExecutor
from nnscaler.runtime.training.executor_settings import ExecutorSettings
from verify.programs.execution.compare_variables import variables_of
from verify.programs.execution.record_rank_steps import Task
from verify.programs.localise.instrument_statements import Foreign, Instrumented, Statement, instrument
from verify.programs.localise.interpret_graph_on_whole_batch import Dealer, Logical, interpret, next_state
from verify.programs.localise.teacher_forcing import Teacher
from verify.programs.opened_program import OpenedProgram

T = TypeVar("T")


class TimeUp(Exception):
    """The ranks were still computing when the time was up."""


@dataclass
class TaughtRun:
    """A program that can be taught one step after another. Not frozen: executors have state."""

    task: Task
    graph: Graph
    teacher: Teacher
    statements: Mapping[int, Statement]
    foreign: tuple[Foreign, ...]
    simulator: Simulator
    executors: dict[int, RankExecutor]
    state: dict[str, Tensor]
    inputs: dict[str, Tensor]
    timeout: float
    dealer: Dealer
    before: dict[str, Tensor] | None = None  # the state that the last update changed
    earlier: dict[str, Tensor] | None = None  # the same, as of when the step that was taught last began

    def step(self, number: int) -> Logical:
        """Teach one step; the observations are in `teacher.seen`. Raises TimeUp, and what a rank raises."""
        self.earlier = self.before
        logical = interpret(self.graph, self.state, self.inputs, self.dealer, number)
        self.teacher.begin(logical, self.dealer)

        def work(communicator: Communicator) -> None:
            self._step(self.executors[communicator.rank], number)

        self.together(work)
        self.before, self.state = self.state, next_state(logical, self.state, self.task.learning_rate)
        return logical

    def together(self, work: Callable[[Any], T]) -> list[T]:
        """Run `work` on every rank."""
        found: list[list[T]] = []
        errors: list[BaseException] = []

        def run() -> None:
            try:
                found.append(self.simulator.run(work))
            except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
                errors.append(error)

        thread = threading.Thread(target=run, name="taught run", daemon=True)
        thread.start()
        join_within(thread, self.timeout)
        if errors:
            raise errors[0]
        if not found:
            raise TimeUp
        return found[0]

    def _step(self, executor: RankExecutor, number: int) -> None:
        seen, rank = self.teacher.seen, executor.rank
        with torch.no_grad():
            for stage in executor.stages.values():
                for name, declared in stage.parameters.items():
                    right = shard(self.state[declared.fqn], declared.at_rest, stage.sizes(), stage.coordinates())
                    stage.at_rest[name].copy_(right)
        before = {(i, n): t.clone() for i, n, t in _stored(executor)}
        executor.zero_grad()
        loss = executor.step(self.inputs)
        if loss is not None:
            seen.losses[rank] = loss.detach().clone()
        for index, name, _, gradient in executor.local_tensors("gradient"):
            kept = None if gradient is None else gradient.detach().clone()
            seen.gradients.setdefault((index, name), {})[rank] = kept
        for key, buffer in executor.buffers.items():
            seen.buffers.setdefault(key, {})[rank] = buffer.detach().clone()
        for index, name, tensor in _stored(executor):
            if not same_bits(before[index, name], tensor):
                seen.changed.setdefault((index, name), []).append(rank)


def _stored(executor: RankExecutor) -> list[tuple[int, str, Tensor]]:
    return [(i, n, t) for i, n, _, t in executor.local_tensors("parameter") if t is not None]


def prepare_run(task: Task, graph: Graph, program: OpenedProgram, timeout: float) -> TaughtRun:
    """Load the roles to be taught. Raises what loading or building them raises."""
    statements: dict[int, Statement] = {}
    foreign: list[Foreign] = []
    modules: dict[int, Any] = {}
    stages: dict[int, type[Stage]] = {}
    for role in program.manifest.roles:
        found: list[Instrumented] = []

        def transform(source: str, filename: str, found: list[Instrumented] = found) -> CodeType:
            found.append(instrument(source, filename, len(statements)))
            return compile(found[0].tree, filename, "exec", dont_inherit=True)

        module = load_role(program.path / role.file, transform=transform)
        statements.update({s.number: s for s in found[0].statements})
        foreign += found[0].foreign
        modules.update(dict.fromkeys(role.ranks, module))
        stages.update({stage.index: stage for stage in module.STAGES})
    teacher = Teacher(statements, variables_of(program.manifest, stages), stages)
    for module in modules.values():
        module.__dict__.update(teacher.names())
    state = torch.load(task.state, weights_only=True)
    inputs = torch.load(task.batch, weights_only=True)
    simulator = Simulator(program.ranks)
    settings = ExecutorSettings(precision="float64", dropout=False, seed=task.seed)
    executors = {
        rank: RankExecutor(modules[rank], rank, simulator.communicators[rank], state, settings)
        for rank in range(program.ranks)
    }
    return TaughtRun(
        task.plain(), graph, teacher, statements, tuple(foreign), simulator, executors, state, inputs, timeout,
        Dealer(),
    )  # fmt: skip
