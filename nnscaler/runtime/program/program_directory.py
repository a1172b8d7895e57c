"""A compiled program on disk, as a rank reads it: the manifest, its role, the model's state and the sample batch."""

from __future__ import annotations

import pickle
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from itertools import product
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from nnscaler.exception_in_one_line import first_line
from nnscaler.manifest import Manifest, ManifestError, NoManifest, StoredTensor, read_manifest
from nnscaler.runtime.communication.communicator import ProgramError
from nnscaler.runtime.program.import_role_and_user_files import letting_go, load_role
from nnscaler.runtime.shards import unravel
from nnscaler.runtime.stage_base_class import Exchange, Receive, RunContext, Stage
from nnscaler.runtime.tensor_bits_and_differences import bits_of, same_bits
from nnscaler.runtime.training.gradients.gradient_plan import holding

_CONSTANT = "_constants."  # of the names of tensors that the model's code makes
_AGAIN = "compile the model again"


@dataclass(frozen=True, slots=True)
class ProgramDirectory:
    """A program's folder and what its manifest says."""

    path: Path
    manifest: Manifest

    @property
    def ranks(self) -> int:
        return self.manifest.ranks

    def role(self, rank: int) -> ModuleType:
        """Return the role module that `rank` runs. Raises ProgramError for a rank that the program does not have."""
        role = self.manifest.role_of(rank)
        if role is None:
            raise ProgramError(f"{self.path} is a program for {self.ranks} ranks and has no rank {rank}")
        return load_role(self.path / role.file, transform=letting_go)

    def stages(self) -> list[type[Stage]]:
        """Return the stage classes of all roles."""
        return [stage for file in self.manifest.role_files for stage in load_role(self.path / file).STAGES]

    def changes(self) -> list[str]:
        """Return a note on each role file that is not as it was generated."""
        files = [(role, self.path / role.file) for role in self.manifest.roles]
        notes = (role.change(self.path, file.read_bytes()) for role, file in files if file.is_file())
        return [note for note in notes if note is not None]

    def state(self) -> dict[str, Tensor]:
        """Read the logical tensors of the model by name; their pages are read when they are used.

        Raises ProgramError.
        """
        return self._tensors("state.pt", "the model was compiled without values (on the meta device)")

    def check_state(
        self,
        state: Mapping[str, Tensor],
        *,
        own_weights: bool = False,
        without: Collection[str] = (),
        part: int = 0,
        of: int = 1,
    ) -> None:
        """Compares tensors with what the program was compiled with.

        `own_weights`: parameters and buffers may have other values; constants belong to the program. `without`: names
        that something else takes the place of. `part`, `of`: only so many of the names, so that ranks share the work.
        Raises ProgramError, which names the tensor.
        """
        recorded, file = self.manifest.state, self.path / "state.pt"
        for name in sorted(set(recorded) - set(without))[part::of]:
            if name not in state:
                raise ProgramError(f"{file} lacks `{name}`: {_AGAIN}")
            right, constant = recorded[name], name.startswith(_CONSTANT)
            hashed = right.sha256 is not None and (constant or not own_weights)
            found = _entry(state[name], hashed)
            if (found.dtype, found.shape) != (right.dtype, right.shape):
                kinds = [f"{entry.dtype}{list(entry.shape)}" for entry in (found, right)]
                raise ProgramError(f"`{name}` in {file} is {kinds[0]}, and the program's is {kinds[1]}")
            if right.sha256 is None and not own_weights:
                why = "it was compiled without values (on the meta device)"
                raise ProgramError(f"{self.path} has no hash of `{name}`, {why}: weights of yours need --own-weights")
            if hashed and found.sha256 != right.sha256:
                way = "it belongs to the model's code" if constant else "weights replaced on purpose need --own-weights"
                raise ProgramError(f"`{name}` in {file} is not what the program was compiled with: {_AGAIN}; {way}")
        for names in self.manifest.tied[part::of]:
            held = [name for name in names if name in state and name not in without]
            other = next((name for name in held if not _same(state[held[0]], state[name])), None)
            if other is not None:
                raise ProgramError(f"`{held[0]}` and `{other}` in {file} differ, and in the model they are one tensor")

    def inputs(self) -> dict[str, Tensor]:
        """Read the sample batch.

        Raises ProgramError, also where it is not the one that the program was compiled with.
        """
        batch, recorded = self._tensors("inputs.pt", "the program is incomplete"), self.manifest.batch
        found = describe_state(batch)
        for name in sorted({*recorded, *found}):
            if found.get(name) != recorded.get(name):
                wrong = f"`{name}` in {self.path / 'inputs.pt'} is not what the program was compiled with"
                raise ProgramError(f"{wrong}: return another batch from sample_inputs() and {_AGAIN}")
        return batch

    def _tensors(self, name: str, reason: str) -> dict[str, Tensor]:
        file = self.path / name
        if not file.is_file():
            raise ProgramError(f"{file} does not exist: {reason}")
        return read_tensors(file)


def read_program(path: str | Path) -> ProgramDirectory:
    """Read the program in a directory that `nnscaler compile --out` wrote. Raises ProgramError when it is none."""
    directory = Path(path)
    try:
        return ProgramDirectory(directory, read_manifest(directory))
    except NoManifest:
        raise ProgramError(f"{directory} is not a compiled program: it has no manifest.json") from None
    except ManifestError as error:
        if {"state", "batch"}.intersection(error.missing):
            message = f"{directory} has no record of its tensors, as older versions wrote it: {_AGAIN}"
            raise ProgramError(message) from None
        raise ProgramError(f"{error}: {_AGAIN}") from None


def read_tensors(file: Path) -> dict[str, Tensor]:
    """Read tensors by name; their pages are read when they are used. Raises ProgramError for a file that has none."""
    try:
        found = torch.load(file, mmap=True, weights_only=True)
    except FileNotFoundError:
        raise ProgramError(f"{file} does not exist") from None
    except (OSError, RuntimeError, ValueError, EOFError, KeyError, pickle.UnpicklingError) as error:
        reason = first_line(error) or type(error).__name__
        raise ProgramError(f"{file} cannot be read, it may be cut short: {reason}") from None
    if not isinstance(found, dict) or not all(isinstance(value, Tensor) for value in found.values()):
        raise ProgramError(f"{file} holds something else than tensors by name")
    return found


def describe_state(state: Mapping[str, Tensor]) -> dict[str, StoredTensor]:
    """Return the dtype, the shape and the hash of each tensor, as a manifest has them under "state".

    Tensors without data (on the meta device) have no hash.
    """
    known: dict[int, StoredTensor] = {}
    for tensor in state.values():  # a tied parameter has several names and is read once
        if id(tensor) not in known:
            known[id(tensor)] = _entry(tensor, not tensor.is_meta)
    return {name: known[id(tensor)] for name, tensor in state.items()}


def _same(a: Tensor, b: Tensor) -> bool:
    """Return whether two names hold the same; one file has a tied tensor once, so that mostly nothing is read."""
    places = [(t.data_ptr(), t.shape, t.stride(), t.dtype, t.is_conj(), t.is_neg()) for t in (a, b)]
    return places[0] == places[1] or same_bits(a, b)


def _entry(tensor: Tensor, hashed: bool) -> StoredTensor:
    dtype, digest = str(tensor.dtype).removeprefix("torch."), None
    if hashed:
        digest = sha256(bits_of(tensor).cpu().numpy().data if tensor.numel() else b"").hexdigest()
    return StoredTensor(dtype, tuple(tensor.shape), digest)


def groups_of(stages: list[type[Stage]]) -> list[tuple[int, ...]]:
    """Return the rank groups on which the program makes collectives: of its axes, of its gradients, and of all ranks
    (the norm of the gradients)."""
    groups: set[tuple[int, ...]] = {tuple(sorted({rank for stage in stages for rank in stage.ranks}))}
    for stage_class in stages:
        for axis in stage_class.axes:
            others = [name for name in stage_class.axes if name != axis]
            for fixed in product(*(range(stage_class.axes[name]) for name in others)):
                wanted = dict(zip(others, fixed, strict=True))
                groups.add(tuple(rank for rank, at in _coordinates(stage_class) if wanted.items() <= at.items()))
        for rank in stage_class.ranks:
            stage = stage_class(rank, RunContext())
            groups.update(holding(stage, description).group for description in stage_class.parameters.values())
    return sorted(group for group in groups if len(group) > 1)


def _coordinates(stage: type[Stage]) -> Iterator[tuple[int, dict[str, int]]]:
    for position, rank in enumerate(stage.ranks):
        yield rank, unravel(position, stage.axes)


def pairs_of(stages: list[type[Stage]]) -> list[tuple[int, int]]:
    """Return the (source, destination) pairs of ranks between which the program sends activations or gradients."""
    pairs: set[tuple[int, int]] = set()
    for stage in stages:
        for receive in stage.receives.values():
            if isinstance(receive, Exchange):
                pairs.update(message[:2] for message in (*receive.messages, *receive.backward))
            elif isinstance(receive, Receive):
                forward = set(zip(receive.peers, stage.ranks, strict=True))
                pairs |= forward | {(b, a) for a, b in forward if receive.needs_grad}
    return sorted((a, b) for a, b in pairs if a != b)


def rank_with_loss(stages: list[type[Stage]]) -> int:
    """Return a rank that knows the loss after each step."""
    for stage in stages:
        if stage.loss is not None:
            return min(stage.ranks)
    raise ProgramError("no stage of the program computes a loss")
