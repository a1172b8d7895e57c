"""The training of every rank: the loop that users write, with everything that it does recorded.

The same function runs on the simulator's threads and in processes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from nnscaler.codegen.compiled_program import Program
from nnscaler.runtime.communication.communicator import Communicator
from nnscaler.runtime.tensor_bits_and_differences import kept
from nnscaler.training.engine import Engine
from nnscaler.training.program_on_rank import EngineSettings
from nnscaler.training.programs_by_batch_size import SentProgram, SizeClass, Vouch
from verify.evidence.oracle.size_checked_kernels import CheckedKernels
from verify.programs.checks.assemble_logical_tensors import Layout
from verify.programs.training.resume import ResumableRun, Resumed, goes_on, reread
from verify.programs.training.training_recipe import Batch, Course, class_of, groups_of, make_scheduler, options_of


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step, of the model or of one rank (whose tensors are local).

    losses      of its batches
    gradients   before they are clipped
    norm        before they are clipped; None where they are not
    rates       of learning, by parameter
    parameters  after it
    states      of the optimizer, by parameter and name, after it
    """

    losses: tuple[Tensor, ...]
    gradients: Mapping[str, Tensor | None]
    norm: Tensor | None
    rates: Mapping[str, float]
    parameters: Mapping[str, Tensor]
    states: Mapping[str, Mapping[str, Tensor]]

    @property
    def rate(self) -> float:
        """The rate of the first parameter."""
        return next(iter(self.rates.values()))


@dataclass(frozen=True)
class TrainTask:
    """The work of all ranks.

    program   to be run; with its origin, sizes are compiled when they come
    course    of training
    cache     folder of texts
    sizes     programs that were compiled before, for processes that do not have the model
    vouch     called with each program for another size
    """

    program: Program
    course: Course
    cache: str
    sizes: Mapping[SizeClass, SentProgram]
    vouch: Vouch | None = None

    def plain(self) -> TrainTask:
        """Return the task without what another process cannot be sent."""
        return replace(self, program=replace(self.program, origin=None), vouch=None)


@dataclass(frozen=True)
class RankTraining:
    """The training of one rank. Tensors are local shards on the CPU.

    part          index and count of its data part
    layouts       of its parameters and buffers
    steps         as recorded
    buffers       after the steps, by name
    evaluation    the loss of the evaluation; None where there was none
    after         buffers after the evaluation, which changes none
    compilations  for batches of other sizes, in words
    resumed       what it found in the checkpoint that was made on the way
    """

    rank: int
    part: tuple[int, int]
    layouts: tuple[Layout, ...]
    steps: tuple[StepRecord, ...]
    buffers: Mapping[str, Tensor]
    evaluation: Tensor | None
    after: Mapping[str, Tensor]
    compilations: tuple[str, ...]
    resumed: Resumed = field(default_factory=Resumed)

    def layout(self, name: str) -> Layout | None:
        """Return where this rank's shard of a tensor lies; None where it has none."""
        return next((layout for layout in self.layouts if name in layout.names), None)


class Loop:
    """The loop of one rank."""

    def __init__(self, engine: Engine, course: Course) -> None:
        self.engine, self.course = engine, course
        self.optimizer: torch.optim.Optimizer = make_optimizer(engine, course, course.undecayed)
        self.scheduler: LRScheduler = make_scheduler(self.optimizer)

    def clear(self) -> None:
        """Forget the gradients of the step before."""
        self.optimizer.zero_grad()

    def rows(self, batch: Batch) -> dict[str, Tensor]:
        """Return this rank's rows of a batch."""
        part = self.engine.data_part
        return self.course.rows(batch, part.index, part.count)

    def batches(self, step: int) -> list[dict[str, Tensor]]:
        """Return the rows of the batches of one optimizer step."""
        return [self.rows(batch) for batch in self.course.steps[step]]

    def accumulate(self, step: int) -> list[Tensor]:
        """Add up the gradients of the step's batches; return their losses."""
        batches = self.batches(step)
        return [self.engine.step(rows, last=rows is batches[-1]) for rows in batches]

    def clip(self) -> Tensor | None:
        """Clip the gradients; return their norm before."""
        limit = self.course.max_norm
        return None if limit is None else self.engine.clip_grad_norm_(limit)

    def update(self) -> None:
        """Make the optimizer's step."""
        self.optimizer.step()

    def schedule(self) -> None:
        """Set the learning rate of the next step."""
        self.scheduler.step()

    def evaluate(self, batch: Batch) -> Tensor:
        """Return the loss in evaluation mode."""
        return self.engine.evaluate(self.rows(batch))

    def as_run(self) -> ResumableRun:
        """Return what a checkpoint keeps of it."""
        return ResumableRun(self.engine, self.optimizer, self.scheduler)

    def step(self, number: int) -> StepRecord:
        """Make one optimizer step."""
        self.clear()
        return self.updated(self.accumulate(number))

    def stream(self) -> list[StepRecord]:
        """Run the batches of all steps as a stream; return its updates."""
        made: list[StepRecord] = []
        batches = (self.rows(batch) for batch in self.course.batches())
        losses = self.engine.stream(batches, lambda: made.append(self.updated(())))
        if not made:  # nothing is trained here
            none = StepRecord((), {}, None, {}, {}, {})
            made = [none] * len(losses)
        return [replace(step, losses=(kept(loss),)) for step, loss in zip(made, losses, strict=True)]

    def updated(self, losses: Sequence[Tensor]) -> StepRecord:
        """Make the update of an optimizer step whose gradients are there."""
        parameters = self.engine.parameters
        gradients = {name: kept(p.grad) for name, p in parameters.items()}
        norm = self.clip()
        rates = rates_of(self.optimizer, parameters)
        self.update()
        self.schedule()
        return StepRecord(
            tuple(kept(loss) for loss in losses),
            gradients,
            kept(norm),
            rates,
            {name: kept(p) for name, p in parameters.items()},
            states_of(self.optimizer, parameters),
        )


def train_rank(communicator: Communicator, task: TrainTask) -> RankTraining:
    """Train this rank's part of the course."""
    course = task.course
    with CheckedKernels():
        loop, resumed = Loop(_engine(communicator, task), course), Resumed()
        steps: list[StepRecord] = [] if course.delays is None else loop.stream()
        for number in range(len(course.steps) if course.delays is None else 0):
            if number and number == course.saved_before:
                again = Loop(_engine(communicator, task), course)
                resumed = reread(loop.as_run(), again.as_run(), Path(task.cache) / "checkpoints")
                loop = again if goes_on(resumed, loop.engine) else loop
            steps.append(loop.step(number))
        engine = loop.engine
        buffers = _buffers(engine)
        evaluation = None if course.evaluation is None else kept(loop.evaluate(course.evaluation))
        layouts = tuple(
            Layout(s.names, s.shape, dict(s.states), dict(s.sizes), dict(s.coordinates)) for s in engine.stored()
        )
        part = (engine.data_part.index, engine.data_part.count)
        after, told = _buffers(engine), tuple(engine.compilations)
    return RankTraining(communicator.rank, part, layouts, tuple(steps), buffers, evaluation, after, told, resumed)


def _engine(communicator: Communicator, task: TrainTask) -> Engine:
    device, course = str(getattr(communicator, "device", "cpu")), task.course
    settings = EngineSettings(course.precision, device, course.seed, course.compiled, Path(task.cache), task.vouch)
    engine = Engine(task.program, communicator, settings)
    engine.context.dropout = course.draws
    for size, program in task.sizes.items():
        engine.add_size(size, program)
    return engine


def make_optimizer(engine: Engine, course: Course, undecayed: frozenset[str]) -> torch.optim.Optimizer:
    """Make the optimizer of a rank as users do, with the groups of `undecayed`."""
    options = options_of(course.optimizer)
    return engine.optimizer(
        class_of(course.optimizer), groups_of(course, undecayed), lr=course.learning_rate, **options
    )


def rates_of(optimizer: torch.optim.Optimizer, parameters: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the learning rate of each parameter that the optimizer has."""
    names = {id(parameter): name for name, parameter in parameters.items()}
    found = {names[id(p)]: float(group["lr"]) for group in optimizer.param_groups for p in group["params"]}
    return {name: found[name] for name in parameters if name in found}


def states_of(optimizer: torch.optim.Optimizer, parameters: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Return copies of the optimizer's tensors and numbers, by parameter and name."""
    found: dict[str, dict[str, Tensor]] = {}
    for name, parameter in parameters.items():
        state: Mapping[str, Any] = optimizer.state.get(parameter, {})
        found[name] = {
            key: kept(value) if isinstance(value, Tensor) else torch.tensor(float(value), dtype=torch.float64)
            for key, value in state.items()
            if isinstance(value, Tensor | int | float)
        }
    return found


def _buffers(engine: Engine) -> dict[str, Tensor]:
    return {s.fqn: kept(s.tensor) for s in engine.stored() if s.kind == "buffer"}
