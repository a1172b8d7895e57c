"""A program on this rank, ready to run batches of one size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from nnscaler.errors import NnscalerError
from nnscaler.layout import Partial
from nnscaler.runtime.communication.communicator import Communicator
from nnscaler.runtime.freed_memory import keep_freed_memory
from nnscaler.runtime.program.load_python import letting_go, load_role
from nnscaler.runtime.program.program_directory import rank_with_loss
from nnscaler.runtime.role import Stage
from nnscaler.runtime.training.async_pipeline import executor_of
from nnscaler.runtime.training.autocast import dtype_named
from nnscaler.runtime.training.batch import inputs_read_whole
from nnscaler.runtime.training.executor import RankExecutor
from nnscaler.runtime.training.executor_settings import ExecutorSettings
from nnscaler.training.recompilation import SentProgram, Vouch, folder_of

NO_LOSS, EVERY_RANK = -1, -2


@dataclass(frozen=True)
class EngineSettings:
    """How an engine runs its program.

    dtype     replaces every floating dtype of the program ("float64"); None: as written
    device    of this rank: "auto", "cpu" or "cuda"
    seed      of dropout
    compiled  compile the forward of each stage with torch.compile
    cache     folder of the texts that are run; None: a temporary one
    vouch     called on rank 0 with each program for another size, before it runs; raises where it is not the model's
    """

    dtype: str | None = None
    device: str = "auto"
    seed: int = 0
    compiled: bool = False
    cache: Path | None = None
    vouch: Vouch | None = None


@dataclass(frozen=True)
class Running:
    """A program on this rank.

    executor  of its role
    source    the rank that tells all others the loss; NO_LOSS where the program has none, EVERY_RANK where it is summed
              over all ranks
    cut       batches are cut into data parts; else each rank computes the whole of them
    whole     inputs that a rank reads whole all the same, because the model mixes their rows
    program   itself
    stages    of all roles
    """

    executor: RankExecutor
    source: int
    cut: bool
    whole: frozenset[str]
    program: SentProgram
    stages: tuple[type[Stage], ...]

    @property
    def has_loss(self) -> bool:
        return self.source != NO_LOSS

    def share_loss(self, loss: Tensor, communicator: Communicator) -> Tensor:
        """Return what the rank that knows the loss has, on every rank. Every rank calls it."""
        if self.source == EVERY_RANK:
            return loss
        return communicator.broadcast(loss, self.source, tuple(range(communicator.world_size)))


def run_program(
    program: SentProgram,
    state: Mapping[str, Tensor],
    communicator: Communicator,
    settings: EngineSettings,
    device: torch.device,
    share: RankExecutor | None = None,
) -> Running:
    """Make what runs this rank's role. `share`: has the parameters already, under this or another program.

    Raises NnscalerError("wrong_ranks") for a rank that the program does not have.
    """
    rank, folder = communicator.rank, folder_of(program.sources, settings.cache)
    role = program.manifest.role_of(rank)
    if role is None:
        raise NnscalerError("wrong_ranks", f"the program is for {program.manifest.ranks} ranks: no rank {rank}")
    chosen = ExecutorSettings(
        precision=settings.dtype,
        device=device,
        seed=settings.seed,
        shapes=program.manifest.shapes,
        tied=program.manifest.tied,
        returns=program.manifest.returns,
        compiled=settings.compiled,
        cut_axes=program.data_axes,
    )
    if share is not None:  # buffers of the other program are handed over before each run
        buffers = {entry.fqns[0]: entry for entry in program.manifest.buffers}
        state = {**{n: torch.zeros(b.shape, dtype=dtype_named(b.dtype)) for n, b in buffers.items()}, **state}
    module = load_role(folder / role.file, transform=letting_go)
    executor = executor_of(module)(module, rank, communicator, state, chosen, share=share)
    stages = stages_of_roles(program, settings.cache)
    keep_freed_memory()
    whole = inputs_read_whole(stages, program.data_axes)
    return Running(executor, _source_of_loss(stages), bool(program.data_axes), whole, program, tuple(stages))


def _source_of_loss(stages: Sequence[type[Stage]]) -> int:
    if not any(stage.loss is not None for stage in stages):
        return NO_LOSS
    summed = (
        stage.loss is not None and all(isinstance(stage.loss.states.get(axis), Partial) for axis in stage.axes)
        for stage in stages
    )
    return EVERY_RANK if len(stages) == 1 and all(summed) else rank_with_loss(list(stages))


def named_buffers(executor: RankExecutor) -> dict[str, Tensor]:
    """Return this rank's buffers by name in the model, as of now."""
    return {d.fqn: getattr(s, name) for s in executor.stages.values() for name, d in s.buffers.items()}


def stages_of_roles(program: SentProgram, cache: Path | None) -> list[type[Stage]]:
    """Return the stages of all roles of a program."""
    folder = folder_of(program.sources, cache)
    return [stage for file in program.manifest.role_files for stage in load_role(folder / file).STAGES]
