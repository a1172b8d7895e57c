"""Save the program's state by torch.distributed.checkpoint after a step, and load it into the plain model, and into the
program on another mesh."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from verify.external.addresses import as_real, clean_name
from verify.external.observe import modules_of, optimizer_of, parallelised, rows_of, run_step
from verify.external.program import ExternalProgram
from verify.external.reference import Reference, initial_model
from verify.results.tolerance import difference, largest

NAME = "checkpoint"


@dataclass(frozen=True)
class Loaded:
    """One tensor that was loaded, compared with the plain model's after the step.

    how       "the plain model", or the mesh it was loaded under
    name      in the plain model
    relative  difference; infinite where the checkpoint lacks it
    """

    how: str
    name: str
    rank: int
    relative: float


def other_mesh(program: ExternalProgram) -> ExternalProgram:
    """Return the program on another mesh of as many ranks: sizes in the other order, or half as many ranks."""
    axes, sizes = zip(*program.mesh, strict=True)
    turned = tuple(zip(axes, reversed(sizes), strict=True))
    if turned != program.mesh:
        return replace(program, mesh=turned)
    half = max(1, sizes[0] // 2)
    return replace(program, mesh=((axes[0], half), *program.mesh[1:]))


def save_after_step(program: ExternalProgram, model: nn.Module, reference: Reference, rank: int, folder: Path) -> None:
    """Train one step on this rank, and save the state of its modules."""
    with parallelised(program, model, reference.dtype) as made:
        optimizer = optimizer_of(program, made, reference.learning_rate)
        optimizer.zero_grad(set_to_none=True)
        run_step(program, made, rows_of(program, reference, rank, 0))
        optimizer.step()
        save(_state(made), checkpoint_id=str(folder))


def load_on_rank(
    program: ExternalProgram, reference: Reference, seed: int, rank: int, folder: Path
) -> tuple[Loaded, ...]:
    """Load the checkpoint into the program made from other values, and compare what it then holds.

    Tensors are put together on all ranks of their mesh.
    """
    other = initial_model(program, seed + 1)
    with parallelised(program, other, reference.dtype) as made:
        state = _state(made)
        load(state, checkpoint_id=str(folder))
        modules = modules_of(made)
        for module in modules:
            own = set(get_model_state_dict(module))
            set_model_state_dict(module, {name: value for name, value in state.items() if name in own})
        how = "the mesh " + " ".join(f"{axis}={size}" for axis, size in program.mesh)
        whole = {n: v.full_tensor() if isinstance(v, DTensor) else v for n, v in _state(made).items()}
        return tuple(_compared(how, rank, whole, reference))


def load_plain(program: ExternalProgram, reference: Reference, folder: Path) -> tuple[Loaded, ...]:
    """Load the checkpoint into the plain model's state, in this process alone, and compare it."""
    names = set(FileSystemReader(str(folder)).read_metadata().state_dict_metadata)
    space = reference.space
    wanted = {program.names.get(name, clean_name(name)): name for name in names}
    state = {
        wanted[name]: torch.zeros(space.shapes[name], dtype=reference.dtype)
        for name in space.shapes
        if name in wanted and space.kinds[name] == "parameter"
    }
    load(state, checkpoint_id=str(folder), no_dist=True)
    found = {program.names.get(name, clean_name(name)): value for name, value in state.items()}
    lacking = [
        Loaded("the plain model", name, -1, float("inf"))
        for name in space.names
        if space.kinds[name] == "parameter" and not set(space.tied.get(name, (name,))) & set(found)
    ]
    return (*lacking, *_compared("the plain model", -1, found, reference))


def _state(made: Any) -> dict[str, Any]:
    """Return the tensors of all modules of this rank, by name."""
    state: dict[str, Any] = {}
    for module in modules_of(made):
        state.update({n: v for n, v in get_model_state_dict(module).items() if isinstance(v, Tensor)})
    return state


def _compared(how: str, rank: int, found: dict[str, Any], reference: Reference) -> Iterator[Loaded]:
    """Compare whole tensors of the plain model's shape; others (packed, cut by hand) have no place in it."""
    space, after = reference.space, reference.steps[0].parameters
    scale = largest(after[torch.isfinite(after)])
    for name, value in sorted(found.items()):
        clean, value = clean_name(name), as_real(value)
        if clean in space.shapes and space.kinds[clean] == "parameter" and value.shape == space.shapes[clean]:
            whole = space.whole(clean)
            expected = after[whole.start : whole.stop].view(value.shape)
            yield Loaded(how, clean, rank, difference(value.double(), expected, scale).relative)


def temporary_folder() -> tempfile.TemporaryDirectory[str]:
    """Return a folder for one checkpoint."""
    return tempfile.TemporaryDirectory(prefix="nnscaler-external-", ignore_cleanup_errors=True)
