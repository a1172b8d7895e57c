"""A program on this rank, ready to run batches of one size."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from nnscaler.errors import NnscalerError
from nnscaler.layout import Partial, Sharded
from nnscaler.manifest import MANIFEST
from nnscaler.runtime.communication.communicator import CommunicationError, Communicator, ProgramError
from nnscaler.runtime.communication.join_process_group import ProcessPlace, choose_device, join
from nnscaler.runtime.keep_freed_memory import keep_freed_memory
from nnscaler.runtime.program.import_role_and_user_files import letting_go, load_role
from nnscaler.runtime.program.program_directory import rank_with_loss
from nnscaler.runtime.shards import shard
from nnscaler.runtime.stage_base_class import INPUT_GRADIENT, Buffer, Parameter, Stage
from nnscaler.runtime.training.async_pipeline import executor_of
from nnscaler.runtime.training.autocast_on_any_device import dtype_named
from nnscaler.runtime.training.build_stages import one_tensor
from nnscaler.runtime.training.cut_batch import inputs_read_whole, part_axes
from nnscaler.runtime.training.executor import RankExecutor
from nnscaler.runtime.training.executor_settings import ExecutorSettings
from nnscaler.training.programs_by_batch_size import SentProgram, Vouch, folder_of
from nnscaler.training.run_ranks_as_processes import STORE

NO_LOSS, EVERY_RANK = -1, -2


def joined(place: ProcessPlace, choice: str) -> tuple[str, torch.device]:
    """Join the other ranks, where this process has not; return the backend and this rank's device. `choice`: auto, cpu
    or cuda. Raises NnscalerError: `wrong_ranks`, and `rank_lost` where some do not come."""
    try:
        backend, device = choose_device(choice, place)
        if not torch.distributed.is_initialized():
            store = os.environ.get(STORE)
            join(backend, place.rank, place.world_size, device, Path(store) if store else None)
    except CommunicationError as error:
        raise NnscalerError("rank_lost", str(error)) from error
    except ProgramError as error:
        raise NnscalerError("wrong_ranks", str(error)) from error
    return backend, device


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
    strays    what its ranks read and do not have from the programs whose tensors it shares, by name in the model
    """

    executor: RankExecutor
    source: int
    cut: bool
    whole: frozenset[str]
    program: SentProgram
    stages: tuple[type[Stage], ...]
    strays: frozenset[str] = frozenset()

    @property
    def has_loss(self) -> bool:
        return self.source != NO_LOSS

    def share_loss(self, loss: Tensor, communicator: Communicator) -> Tensor:
        """Return what the rank that knows the loss has, on every rank. Every rank calls it."""
        if self.source == EVERY_RANK:
            return loss
        return communicator.broadcast(loss, self.source, tuple(range(communicator.world_size)))

    def take(self, values: Mapping[str, Tensor]) -> None:
        """Go on with these values: logical tensors, by name in the model."""
        for stage in self.executor.stages.values():
            for name, description in _declared(stage):
                if description.fqn in values:
                    held = stage.at_rest.get(name, getattr(stage, name)).detach()
                    whole = values[description.fqn]
                    held.copy_(shard(whole, description.at_rest, stage.sizes(), stage.coordinates()))


def run_program(
    program: SentProgram,
    state: Mapping[str, Tensor],
    communicator: Communicator,
    settings: EngineSettings,
    device: torch.device,
    share: Sequence[Running] = (),
) -> Running:
    """Make what runs this rank's role. `share`: have the parameters already, under this or other programs.

    Raises NnscalerError("wrong_ranks") for a rank that the program does not have.
    """
    rank, folder = communicator.rank, _folder(program, settings.cache)
    role = program.manifest.role_of(rank)
    if role is None:
        raise NnscalerError("wrong_ranks", f"the program is for {program.manifest.ranks} ranks: no rank {rank}")
    stages = stages_of_roles(program, settings.cache)
    program = replace(program, data_axes=part_axes(stages, program.data_axes))
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
    strays = read_elsewhere([other.stages for other in share], stages) if share else frozenset[str]()
    if share:  # what is handed over before each run
        known = {e.fqns[0]: (e.shape, e.dtype) for e in program.manifest.buffers}
        known |= {e.fqns[0]: (e.shape, e.dtype) for e in program.manifest.parameters if e.fqns[0] in strays}
        state = {**{n: torch.zeros(shape, dtype=dtype_named(dtype)) for n, (shape, dtype) in known.items()}, **state}
    module = load_role(folder / role.file, transform=letting_go)
    shared = [other.executor for other in share]
    executor = executor_of(module)(module, rank, communicator, state, chosen, share=shared)
    keep_freed_memory()
    whole = inputs_read_whole(stages, program.data_axes)
    cut = bool(program.data_axes)
    return Running(executor, _source_of_loss(stages), cut, whole, program, tuple(stages), strays)


def read_elsewhere(before: Iterable[Sequence[type[Stage]]], after: Sequence[type[Stage]]) -> frozenset[str]:
    """Return what a rank reads in the stages `after` that it does not have in those of the programs `before`, or has
    unread and cut otherwise; by name in the model."""
    held: dict[tuple[str, int], list[Parameter | Buffer]] = {}
    for stage in (stage for stages in before for stage in stages):
        for _, described in _declared(stage):
            for rank in stage.ranks:
                held.setdefault((described.fqn, rank), []).append(described)
    found = set[str]()
    for stage in after:
        for described in (d for _, d in _declared(stage) if _is_read(d)):
            known = (held.get((described.fqn, rank), []) for rank in stage.ranks)
            if not all(any(_is_read(d) or d.at_rest == described.at_rest for d in own) for own in known):
                found.add(described.fqn)
    return frozenset(found)


def check_alike(first: Sequence[type[Stage]], second: Sequence[type[Stage]]) -> None:
    """Check that two programs, by their stages, have what they share in one shape and layout, and what either of them
    changes on the same ranks; a layout may be another one where only one of them reads the tensor. Raises
    NnscalerError("layouts_differ")."""
    known, found = _places(first), _places(second)
    changed = _changed(first), _changed(second)
    for name in (name for name in found if name in known):
        (there, before), (here, described) = known[name], found[name]
        if isinstance(described, Buffer) or isinstance(before, Buffer):
            alike = dict(described.at_rest) == dict(before.at_rest)
        else:
            alike = one_tensor((before, name in changed[0]), (described, name in changed[1]))
            alike = alike or not (before.used and described.used)
        moved = here != there and any(name in names for names in changed)
        if described.shape != before.shape or not alike or moved:
            message = f"{name!r} is {before.shape} as {dict(before.at_rest)} on ranks {sorted(there)} in the program "
            message += f"before, and {described.shape} as {dict(described.at_rest)} on {sorted(here)} in the other one"
            help = "compile both under one plan, for one model; where it has stages, with each layer in the same stage"
            lain = (*before.at_rest.values(), *described.at_rest.values())
            if any(isinstance(state, Sharded) and 0 in state.sizes for state in lain):  # whole, on its owner
                help += "; without `owned=1`, which lays out anew what another program trains"
            elif not moved and changed[0] != changed[1]:
                help += "; and with the same parameters frozen in both, those that one does not read among them"
            raise NnscalerError("layouts_differ", message, help=help)


def _places(stages: Sequence[type[Stage]]) -> dict[str, tuple[set[int], Parameter | Buffer]]:
    """Return the ranks that have each tensor of the model, and how."""
    found: dict[str, tuple[set[int], Parameter | Buffer]] = {}
    for stage in stages:
        for _, described in _declared(stage):
            found.setdefault(described.fqn, (set(), described))[0].update(stage.ranks)
    return found


def _declared(stage: type[Stage] | Stage) -> Iterator[tuple[str, Parameter | Buffer]]:
    """Yield the tensors of the model that a stage has."""
    for declared in (stage.parameters, stage.frozen, stage.buffers):
        yield from ((name, d) for name, d in declared.items() if not d.fqn.startswith(INPUT_GRADIENT))


def _changed(stages: Sequence[type[Stage]]) -> set[str]:
    """Return the names of what a step changes: what is trained, and buffers."""
    trained = {d.fqn for stage in stages for d in stage.parameters.values() if not d.fqn.startswith(INPUT_GRADIENT)}
    return trained | {stage.buffers[name].fqn for stage in stages for name in stage.updates.values()}


def _is_read(described: Parameter | Buffer) -> bool:
    return isinstance(described, Buffer) or described.used


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
    folder = _folder(program, cache)
    return [stage for file in program.manifest.role_files for stage in load_role(folder / file).STAGES]


def _folder(program: SentProgram, cache: Path | None) -> Path:
    """Write the role files, and where the files of their operators are, which only rank 0 has imported for sure."""
    texts, files = dict(program.sources), program.manifest.operator_files
    if files:
        found = {name: replace(entry, imports=None) for name, entry in files.items()}
        texts[MANIFEST] = replace(program.manifest, operator_files=found, state={}, batch={}).to_json()
    return folder_of(texts, cache)
