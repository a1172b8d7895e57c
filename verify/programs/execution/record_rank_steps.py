"""The program of every rank in a verification run: a few steps of training, with all results recorded.

The same function runs on the simulator's threads and in processes over gloo or NCCL. Imports torch and the runtime
only, so that a rank's process starts quickly.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from nnscaler.manifest import read_manifest
from nnscaler.runtime.communication.communicator import Communicator
from nnscaler.runtime.program.import_role_and_user_files import letting_go, load_role
from nnscaler.runtime.tensor_bits_and_differences import kept
from nnscaler.runtime.training.executor import RankExecutor
from nnscaler.runtime.training.executor_settings import ExecutorSettings
from nnscaler.runtime.training.saving.checkpoint import load_checkpoint, save_checkpoint
from verify.evidence.oracle.size_checked_kernels import CheckedKernels

# Observation parses the program's text, and Python 3.11's `ast` is not safe to use from several threads at once.
_BUILDING = threading.Lock()

Entry = tuple[int, str, str, Tensor | None]  # (stage, attribute, name in the model, this rank's shard)


@dataclass(frozen=True)
class TrialTask:
    """One more step from the initial state. `batch`: a file."""

    name: str
    batch: str
    loss_scale: float = 1.0


@dataclass(frozen=True)
class Task:
    """The work of all ranks in one run.

    program       folder of the program
    state, batch  files with the logical tensors
    steps         training steps
    precision     name of a dtype; None: the dtypes as written
    draws         random numbers are drawn by (seed, operation, step); False: nothing is dropped
    seed          of the draws
    max_norm      to which the gradients of the last step are clipped; None: not clipped
    trials        further runs after the steps
    forward_only  compute the first step's loss also without backward
    checkpoint    folder for the state before the last step, from which a new executor then makes the last step
    first_step    number of the first step, for draws
    loss_scale    of the steps
    compiled      the forward of each stage is compiled
    """

    program: str
    state: str
    batch: str
    steps: int
    learning_rate: float
    precision: str | None
    draws: bool = False
    seed: int = 0
    max_norm: float | None = None
    trials: tuple[TrialTask, ...] = ()
    forward_only: bool = False
    checkpoint: str | None = None
    first_step: int = 0
    loss_scale: float = 1.0
    compiled: bool = False

    def plain(self) -> Task:
        """Return the steps alone: nothing dropped, nothing clipped, nothing afterwards."""
        return replace(self, draws=False, max_norm=None, trials=(), forward_only=False, checkpoint=None)


@dataclass(frozen=True)
class TrialResult:
    loss: Tensor | None
    gradients: tuple[Entry, ...]


@dataclass(frozen=True)
class RankResult:
    """The results of one rank. Tensors are local shards on the CPU.

    losses        per step; None where the rank does not know the loss
    gradients     per step, one entry per stored shard
    parameters    after the last step
    buffers       after the last step
    norm          of the gradients of the last step, before clipping; None where they were not clipped
    trials        name -> result
    forward_loss  the first step's loss without backward; None where the rank does not know it
    returned      per step, the results besides the loss; of a program without a loss, those of its one forward
    gathered      name -> logical result of the first step, without backward
    resumed       parameters and buffers after the last step, made from the checkpoint
    """

    rank: int
    losses: tuple[Tensor | None, ...]
    gradients: tuple[tuple[Entry, ...], ...]
    parameters: tuple[Entry, ...]
    buffers: tuple[Entry, ...]
    norm: Tensor | None = None
    trials: Mapping[str, TrialResult] = field(default_factory=dict)
    forward_loss: Tensor | None = None
    resumed: tuple[Entry, ...] = ()
    returned: tuple[tuple[Entry, ...], ...] = ()
    gathered: Mapping[str, Tensor] = field(default_factory=dict)


def role_file(program: str | Path, rank: int) -> Path:
    """Return the file that this rank runs, by the manifest.

    Raises KeyError for a rank that the program does not have.
    """
    role = read_manifest(Path(program)).role_of(rank)
    if role is None:
        raise KeyError(f"the program has no rank {rank}")
    return Path(program) / role.file


def run_rank(communicator: Communicator, task: Task, observe: Callable[..., None] | None = None) -> RankResult:
    """Train this rank's part for `task.steps` steps of SGD, and do what else the task asks for."""
    with CheckedKernels():
        return _run_rank(communicator, task, observe)


def _run_rank(communicator: Communicator, task: Task, observe: Callable[..., None] | None) -> RankResult:
    state = torch.load(task.state, mmap=True, weights_only=True)
    batch = torch.load(task.batch, mmap=True, weights_only=True)
    executor = _executor(
        communicator, task, state, loss_scale=task.loss_scale, first_step=task.first_step, observe=observe
    )
    losses: list[Tensor | None] = []
    gradients: list[tuple[Entry, ...]] = []
    returned: list[tuple[Entry, ...]] = []
    norm = None
    for step in range(task.steps):
        last = step == task.steps - 1
        if last and task.checkpoint is not None:
            save_checkpoint(executor, task.checkpoint)
        loss, found, norm = _step(executor, batch, task, clip=last)
        losses.append(loss)
        gradients.append(found)
        returned.append(_returned(executor))
    if not task.steps:  # without a loss a forward is all that there is, and what it makes of buffers is the program's
        executor.forward_only(batch, keep=None, update=True)
        returned.append(_returned(executor))
    parameters, buffers = _entries(executor, "parameter"), _entries(executor, "buffer")
    trials = {trial.name: _trial(communicator, task, state, trial) for trial in task.trials}
    forward, gathered = None, dict[str, Tensor]()
    if task.forward_only:
        executor = _executor(communicator, task, state)
        forward = kept(executor.forward_only(batch, keep=None))
        gathered = {name: tensor.cpu() for name, tensor in executor.gather_results().items()}
    resumed = () if task.checkpoint is None else _resume(communicator, task, state, batch)
    return RankResult(
        communicator.rank, tuple(losses), tuple(gradients), parameters, buffers, norm, trials, forward, resumed,
        tuple(returned), gathered,
    )  # fmt: skip


def _executor(
    communicator: Communicator,
    task: Task,
    state: Mapping[str, Tensor],
    *,
    loss_scale: float = 1.0,
    first_step: int = 0,
    observe: Callable[..., None] | None = None,
) -> RankExecutor:
    module = load_role(role_file(task.program, communicator.rank), transform=letting_go)
    settings = ExecutorSettings(
        precision=task.precision,
        device=getattr(communicator, "device", "cpu"),
        dropout=task.draws,
        seed=task.seed,
        first_step=first_step,
        loss_scale=loss_scale,
        returns=read_manifest(Path(task.program)).returns,
        compiled=task.compiled,
    )
    with _BUILDING:
        return RankExecutor(module, communicator.rank, communicator, state, settings, observe=observe)


def _step(
    executor: RankExecutor, batch: Mapping[str, Tensor], task: Task, *, clip: bool
) -> tuple[Tensor | None, tuple[Entry, ...], Tensor | None]:
    """Make one step of SGD; return the loss, the gradients before clipping, and their norm where they are clipped."""
    executor.zero_grad()
    loss = kept(executor.step(batch, keep=None))
    gradients = _entries(executor, "gradient")
    norm = executor.clip_grad_norm(task.max_norm).cpu() if clip and task.max_norm is not None else None
    parameters = {id(p): p for p in executor.parameters.values()}  # a tied one may be there twice
    _descend(list(parameters.values()), task.learning_rate)
    return loss, gradients, norm


def _trial(communicator: Communicator, task: Task, state: Mapping[str, Tensor], trial: TrialTask) -> TrialResult:
    executor = _executor(communicator, task, state, loss_scale=trial.loss_scale)
    loss = kept(executor.step(torch.load(trial.batch, mmap=True, weights_only=True)))
    return TrialResult(loss, _entries(executor, "gradient"))


def _resume(
    communicator: Communicator, task: Task, state: Mapping[str, Tensor], batch: Mapping[str, Tensor]
) -> tuple[Entry, ...]:
    """Return the parameters and buffers after the last step, which starts from the checkpoint."""
    communicator.barrier(range(communicator.world_size))
    checkpoint = load_checkpoint(str(task.checkpoint))
    executor = _executor(communicator, task, {**state, **checkpoint.state}, first_step=checkpoint.step)
    _step(executor, batch, task, clip=True)
    return (*_entries(executor, "parameter"), *_entries(executor, "buffer"))


def _descend(parameters: Sequence[torch.nn.Parameter], learning_rate: float) -> None:
    """Make a step of plain SGD.

    Written out, because the first use of `torch.optim` costs every process 1.5 s of imports.
    """
    with torch.no_grad():
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.add_(parameter.grad.to(parameter.dtype), alpha=-learning_rate)


def _entries(executor: RankExecutor, kind: str) -> tuple[Entry, ...]:
    return tuple((stage, attribute, name, kept(t)) for stage, attribute, name, t in executor.local_tensors(kind))


def _returned(executor: RankExecutor) -> tuple[Entry, ...]:
    made = {name: index for index, stage in executor.stages.items() for name in stage.results}
    return tuple((made[name], name, name, kept(tensor)) for name, tensor in executor.results.items())
