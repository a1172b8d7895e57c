"""Checkpoints: each rank writes the shards of which it holds the first copy, and the whole model is read, whatever plan
comes next.

    <folder>/rank_<r>.pt    steps, ranks, names of all that it holds, and its pieces: name, logical shape and indices

Parameters, buffers and the numbers of steps and batches are kept; an optimizer's own state is not. What is read has
every name of a tied parameter, so that it is a state dict of the model.
"""

from __future__ import annotations

import contextlib
import pickle
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nnscaler.runtime.communication.communicator import ProgramError
from nnscaler.runtime.role import Buffer, Parameter, Stage
from nnscaler.runtime.shards import logical_indices, put
from nnscaler.runtime.training.executor import RankExecutor
from nnscaler.runtime.training.gradients import holds_first_copy

FORMAT = 1
_PROBE = 1 << 16  # bytes that are written on trial
_FILE = re.compile(r"rank_(\d+)\.pt$")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The saved state of a training run.

    step     optimizer steps that were made
    state    logical tensors by name, on the CPU
    passes   batches that were run, by which random numbers are drawn
    """

    step: int
    state: Mapping[str, Tensor]
    passes: int = 0


class CannotWrite(ProgramError):
    """The machine refuses a file of the checkpoint: the message has the path and the reason."""


def check_writable(folder: str | Path, rank: int) -> None:
    """Write this rank's file on trial, and make the folder where it is missing; leave what was there as it was.

    Raises CannotWrite.
    """
    temporary = _temporary(Path(folder), rank)
    with written(folder, rank):
        temporary.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(bytes(_PROBE))
        temporary.unlink()


@contextlib.contextmanager
def written(folder: str | Path, rank: int) -> Iterator[None]:
    """Raise CannotWrite for an error of the machine in the body, which saves to `folder`, and leave no part of a file.

    torch.save raises a RuntimeError when the disk is full, with the system's error behind it.
    """
    try:
        yield
    except (OSError, RuntimeError) as error:
        cause = error if isinstance(error, OSError) else error.__context__
        if not isinstance(cause, OSError):
            raise
        with contextlib.suppress(OSError):
            _temporary(Path(folder), rank).unlink()
        reason = cause.strerror or type(cause).__name__
        raise CannotWrite(f"cannot write the checkpoint {folder}: {reason}") from None


def _temporary(folder: Path, rank: int) -> Path:
    return folder / f"rank_{rank}.new"


def save_checkpoint(executor: RankExecutor, folder: str | Path) -> None:
    """Write this rank's part; every rank calls it. The checkpoint is complete when all have returned."""
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    stages = list(executor.stages.values())
    content = {
        "format": FORMAT,
        "ranks": executor.communicator.world_size,
        "step": executor.context.step,
        "passes": executor.context.passes,
        "tied": executor.tied,
        "names": sorted({name for stage in stages for name in _names(stage)}),
        "pieces": [piece for stage in stages for piece in _pieces(stage)],
    }
    temporary = _temporary(path, executor.rank)
    with temporary.open("wb") as file:  # by a path, torch would hide why the disk refuses
        torch.save(content, file)
    temporary.replace(path / f"rank_{executor.rank}.pt")


def load_checkpoint(folder: str | Path) -> Checkpoint:
    """Read the whole model. Raises ProgramError when files are missing, do not belong together or leave elements
    out."""
    parts = _read(Path(folder))
    value: dict[str, Tensor] = {}
    known: dict[str, Tensor] = {}
    for part in parts:
        for piece in part["pieces"]:
            name, shape = piece["name"], tuple(piece["shape"])
            if name not in value:
                value[name] = piece["tensor"].new_zeros(shape)
                known[name] = torch.zeros(shape, dtype=torch.bool)
            put(value[name], piece["tensor"], piece["indices"])
            put(known[name], torch.ones_like(piece["tensor"], dtype=torch.bool), piece["indices"])
    for name in sorted({name for part in parts for name in part["names"]}):
        if name not in known or not bool(known[name].all()):
            raise ProgramError(f"{folder}: elements of {name!r} are in no file")
    first = parts[0]
    for names in first.get("tied", ()):
        held = next((name for name in names if name in value), None)
        value.update({name: value[held] for name in names if held is not None})
    return Checkpoint(int(first["step"]), value, int(first.get("passes", first["step"])))


def _names(stage: Stage) -> set[str]:
    return {description.fqn for _, description in _stored(stage)}


def _stored(stage: Stage) -> list[tuple[str, Parameter | Buffer]]:
    return [*stage.parameters.items(), *stage.frozen.items(), *stage.buffers.items()]


def _pieces(stage: Stage) -> Iterator[dict[str, Any]]:
    for name, description in _stored(stage):
        if holds_first_copy(stage, description):
            shape = tuple(description.shape)
            yield {
                "name": description.fqn,
                "shape": shape,
                "indices": logical_indices(shape, description.at_rest, stage.sizes(), stage.coordinates()),
                "tensor": stage.at_rest.get(name, getattr(stage, name)).detach().cpu().clone(),
            }


def _part(file: Path) -> dict[str, Any]:
    try:
        part = torch.load(file, mmap=True, weights_only=True)
    except (OSError, RuntimeError, ValueError, EOFError, KeyError, pickle.UnpicklingError) as error:
        raise ProgramError(f"{file} cannot be read, it may be cut short: {type(error).__name__}") from None
    if not isinstance(part, dict) or not {"format", "ranks", "step", "names", "pieces"} <= set(part):
        raise ProgramError(f"{file} is no part of a checkpoint")
    return part


def _read(path: Path) -> list[dict[str, Any]]:
    numbers = sorted(int(m[1]) for f in (path.iterdir() if path.is_dir() else ()) if (m := _FILE.match(f.name)))
    if not numbers:
        raise ProgramError(f"{path} is no checkpoint: it has no rank_0.pt")
    parts = [_part(path / f"rank_{n}.pt") for n in numbers]
    ranks, step = parts[0]["ranks"], parts[0]["step"]
    if any(part["format"] != FORMAT for part in parts):
        raise ProgramError(f"{path} has another format than this runtime reads, which is {FORMAT}")
    if numbers != list(range(ranks)) or any((part["ranks"], part["step"]) != (ranks, step) for part in parts):
        raise ProgramError(f"{path} mixes or lacks files: {len(parts)} files, of {ranks} ranks at step {step}")
    return parts
