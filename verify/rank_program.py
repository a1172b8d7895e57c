"""What every rank runs when a program is verified: a few steps of training, and everything that came out.

The same function runs on the simulator's threads and in processes over gloo or NCCL. Imports torch and the runtime
only, so that a rank's process starts quickly.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from nnscaler.runtime.communicator import Communicator
from nnscaler.runtime.executor import RankExecutor
from nnscaler.runtime.loader import load_role

# Observation parses the program's text, and Python 3.11's `ast` is not safe to use from several threads at once.
_BUILDING = threading.Lock()

Entry = tuple[int, str, str, Tensor | None]  # (stage, attribute, name in the model, this rank's shard)


@dataclass(frozen=True)
class Task:
    """`program`: its directory. `state` and `batch`: files with the logical tensors. `precision`: a dtype's name."""

    program: str
    state: str
    batch: str
    steps: int
    learning_rate: float
    precision: str


@dataclass(frozen=True)
class RankResult:
    """`losses`: None where the rank does not know the loss. Shards are on the CPU."""

    rank: int
    losses: tuple[Tensor | None, ...]
    gradients: tuple[tuple[Entry, ...], ...]
    parameters: tuple[Entry, ...]
    buffers: tuple[Entry, ...]


def role_file(program: str | Path, rank: int) -> Path:
    """The file that this rank runs, by the manifest. Raises KeyError for a rank that the program does not have."""
    manifest = json.loads((Path(program) / "manifest.json").read_text(encoding="utf-8"))
    for role in manifest["roles"]:
        if rank in role["ranks"]:
            return Path(program) / str(role["file"])
    raise KeyError(f"the program has no rank {rank}")


def run_rank(communicator: Communicator, task: Task, observe: Callable[..., None] | None = None) -> RankResult:
    """Trains this rank's part for `task.steps` steps of SGD."""
    module = load_role(role_file(task.program, communicator.rank))
    state = torch.load(task.state, mmap=True, weights_only=True)
    batch = torch.load(task.batch, mmap=True, weights_only=True)
    with _BUILDING:
        executor = RankExecutor(
            module,
            communicator.rank,
            communicator,
            state,
            precision=task.precision,
            device=getattr(communicator, "device", "cpu"),
            dropout=False,
            observe=observe,
        )
    parameters = list({id(p): p for p in executor.parameters.values()}.values())  # a tied one may be there twice
    losses: list[Tensor | None] = []
    gradients: list[tuple[Entry, ...]] = []
    for _ in range(task.steps):
        executor.zero_grad()
        loss = executor.step(batch)
        losses.append(None if loss is None else loss.detach().cpu().clone())
        gradients.append(_entries(executor, "gradient"))
        _descend(parameters, task.learning_rate)
    return RankResult(
        communicator.rank,
        tuple(losses),
        tuple(gradients),
        _entries(executor, "parameter"),
        _entries(executor, "buffer"),
    )


def _descend(parameters: Sequence[torch.nn.Parameter], learning_rate: float) -> None:
    """A step of plain SGD. Written out, because the first use of `torch.optim` costs every process 1.5 s of imports."""
    with torch.no_grad():
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.add_(parameter.grad.to(parameter.dtype), alpha=-learning_rate)


def _entries(executor: RankExecutor, kind: str) -> tuple[Entry, ...]:
    return tuple(
        (stage, attribute, name, None if tensor is None else tensor.detach().cpu().clone())
        for stage, attribute, name, tensor in executor.local_tensors(kind)
    )
