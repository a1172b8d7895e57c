"""A compiled program on disk, as a rank reads it: the manifest, its role, the model's state and the sample batch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from nnscaler.runtime.communicator import ProgramError
from nnscaler.runtime.loader import load_role
from nnscaler.runtime.reducer import holding
from nnscaler.runtime.role import Exchange, Receive, RunContext, Stage
from nnscaler.runtime.shards import unravel

FORMAT = 1  # of the manifests that this runtime understands


@dataclass(frozen=True, slots=True)
class ProgramDirectory:
    """`manifest`: the content of manifest.json."""

    path: Path
    manifest: dict[str, Any]

    @property
    def ranks(self) -> int:
        return int(self.manifest["ranks"])

    def role(self, rank: int) -> ModuleType:
        """The role module that `rank` runs. Raises ProgramError for a rank that the program does not have."""
        for role in self.manifest["roles"]:
            if rank in role["ranks"]:
                return load_role(self.path / role["file"])
        raise ProgramError(f"{self.path} is a program for {self.ranks} ranks and has no rank {rank}")

    def stages(self) -> list[type[Stage]]:
        """The stage classes of all roles."""
        return [stage for role in self.manifest["roles"] for stage in load_role(self.path / role["file"]).STAGES]

    def state(self) -> dict[str, Tensor]:
        """The logical tensors of the model by name; their pages are read when they are used. Raises ProgramError."""
        return self._tensors("state.pt", "the model was compiled without values (on the meta device)")

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the global batch that the program is for, by input; none where the manifest does not say."""
        return {entry["name"]: tuple(entry["shape"]) for entry in self.manifest.get("inputs", ())}

    def inputs(self) -> dict[str, Tensor]:
        """The sample batch. Raises ProgramError."""
        return self._tensors("inputs.pt", "the program is incomplete")

    def _tensors(self, name: str, reason: str) -> dict[str, Tensor]:
        file = self.path / name
        if not file.is_file():
            raise ProgramError(f"{file} does not exist: {reason}")
        tensors: dict[str, Tensor] = torch.load(file, mmap=True, weights_only=True)
        return tensors


def read_program(path: str | Path) -> ProgramDirectory:
    """The program in a directory that `nnscaler compile --out` wrote. Raises ProgramError when it is none."""
    directory = Path(path)
    try:
        manifest = json.loads((directory / "manifest.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ProgramError(f"{directory} is not a compiled program: it has no manifest.json") from None
    except ValueError as error:
        raise ProgramError(f"{directory / 'manifest.json'} is not JSON: {error}") from None
    if manifest.get("format") != FORMAT:
        raise ProgramError(f"{directory} has format {manifest.get('format')}; this runtime reads format {FORMAT}")
    return ProgramDirectory(directory, manifest)


def groups_of(stages: list[type[Stage]]) -> list[tuple[int, ...]]:
    """The rank groups on which the program makes collectives: of its axes, of its gradients, and of all ranks (the
    norm of the gradients)."""
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
    """The (source, destination) pairs of ranks between which the program sends activations or gradients."""
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
    """A rank that knows the loss after each step."""
    for stage in stages:
        if stage.loss is not None:
            return min(stage.ranks)
    raise ProgramError("no stage of the program computes a loss")
