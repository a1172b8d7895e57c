"""The ways in which programs are saved: torch.distributed.checkpoint, and `save_pretrained` of the model itself."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from nnscaler.runtime.tensor_values import FILL, difference, family_scale
from nnscaler.tracing.export.module_copies import copied_with_hooks
from verify.external.observe_rank_run import modules_of
from verify.external.parameter_mapping import StateMap, clean_name
from verify.external.program import ExternalProgram
from verify.external.saving.save_then_load import CheckpointForm
from verify.programs.reference.eager import state_of

# torch.distributed.checkpoint


def _state(made: Any) -> dict[str, Any]:
    """Return the tensors of all modules of this rank, by name."""
    state: dict[str, Any] = {}
    for module in modules_of(made):
        state.update({n: v for n, v in get_model_state_dict(module).items() if isinstance(v, Tensor)})
    return state


def _save(_program: ExternalProgram, made: Any, folder: Path) -> None:
    save(_state(made), checkpoint_id=str(folder))


def _load_plain(program: ExternalProgram, _model: nn.Module, space: StateMap, folder: Path) -> dict[str, Tensor]:
    metadata: Mapping[str, Any] = FileSystemReader(str(folder)).read_metadata().state_dict_metadata
    wanted = {program.names.get(name, clean_name(name)): name for name in metadata}
    state = {
        wanted[name]: torch.zeros(space.shapes[name], dtype=metadata[wanted[name]].properties.dtype)
        for name in space.shapes
        if name in wanted and space.kinds[name] == "parameter" and metadata[wanted[name]].size == space.shapes[name]
    }
    load(state, checkpoint_id=str(folder), no_dist=True)
    return {program.names.get(name, clean_name(name)): value for name, value in state.items()}


def _load(_program: ExternalProgram, made: Any, _model: nn.Module, folder: Path) -> Any:
    state = _state(made)
    load(state, checkpoint_id=str(folder))
    for module in modules_of(made):
        own = set(get_model_state_dict(module))
        set_model_state_dict(module, {name: value for name, value in state.items() if name in own})
    return made


_DISTRIBUTED = CheckpointForm("checkpoint", lambda made: True, _save, _load_plain, _load)


# `save_pretrained` and `from_pretrained`


def _has_pretrained(model: nn.Module) -> bool:
    """Return whether a plain model saves and loads itself."""
    return callable(getattr(model, "save_pretrained", None)) and callable(getattr(model, "from_pretrained", None))


def _saver(made: Any) -> Any:
    """Return the model that saves itself, out of its wrapper; None where there is none."""
    modules = modules_of(made)
    if len(modules) != 1:
        return None
    wrapped = getattr(modules[0], "module", modules[0])
    return wrapped if callable(getattr(wrapped, "save_pretrained", None)) else None


def _save_pretrained(program: ExternalProgram, made: Any, folder: Path) -> None:
    """Save by the program's own way, or as trainers do: gathered by torch, and written by the first rank."""
    model = _saver(made)
    if program.pretrained is not None:
        program.pretrained.save(model, folder)
        return
    gathered = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    model.save_pretrained(str(folder), is_main_process=dist.get_rank() == 0, state_dict=gathered)


def _save_shards(program: ExternalProgram, made: Any, folder: Path) -> None:
    assert program.pretrained is not None and program.pretrained.save_shards is not None, "`forms_of` looks"
    program.pretrained.save_shards(_saver(made), folder)


def _pretrained_plain(_program: ExternalProgram, model: nn.Module, _space: StateMap, folder: Path) -> dict[str, Tensor]:
    kind: Any = type(model)
    loaded = kind.from_pretrained(str(folder))
    stored = loaded.state_dict()
    return {n: t.detach() for n, t, k in state_of(loaded) if k == "parameter" or n in stored}


def _load_pretrained(program: ExternalProgram, made: Any, model: nn.Module, folder: Path) -> Any:
    """Load by the program's own way, or the plain model on every rank, which is made parallel then."""
    if program.pretrained is not None:
        return program.pretrained.load(folder)
    mesh = dist.device_mesh.init_device_mesh(
        "cpu", tuple(size for _, size in program.mesh), mesh_dim_names=tuple(axis for axis, _ in program.mesh)
    )
    kind: Any = type(model)
    loaded = kind.from_pretrained(str(folder))
    made = program.parallelize(loaded, mesh)
    return loaded if made is None else made


def _lost_alone(model: nn.Module, folder: Path) -> dict[str, float]:
    kind: Any = type(model)
    mine: Any = copied_with_hooks(model)
    values = {name: tensor.detach().clone() for name, tensor, _ in state_of(mine)}
    mine.save_pretrained(str(folder))
    found = {name: tensor.detach() for name, tensor, _ in state_of(kind.from_pretrained(str(folder)))}
    scale = family_scale(values.values(), FILL)
    return {
        name: difference(found[name], value, scale).relative
        if name in found and found[name].shape == value.shape
        else float("inf")
        for name, value in values.items()
    }


_PRETRAINED = CheckpointForm(
    "save_pretrained",
    lambda made: _saver(made) is not None,
    _save_pretrained,
    _pretrained_plain,
    _load_pretrained,
    cut_by_hand=True,
    lossy=_lost_alone,
)
_SHARDS = replace(_PRETRAINED, name=_DISTRIBUTED.name, save=_save_shards)


def forms_of(program: ExternalProgram, model: nn.Module) -> tuple[CheckpointForm, ...]:
    """Return the ways in which a program can be saved: shards of each rank, and whole where its model can."""
    has_own_way = program.pretrained is not None and program.pretrained.save_shards is not None
    shards = _SHARDS if has_own_way else _DISTRIBUTED
    return (shards, _PRETRAINED) if _has_pretrained(model) else (shards,)


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """While open, transformers shows no bars of what it writes and reads, where it is imported."""
    library: Any = sys.modules.get("transformers.utils.logging")
    shows = library is not None and library.is_progress_bar_enabled()
    if shows:
        library.disable_progress_bar()
    try:
        yield
    finally:
        if shows:
            library.enable_progress_bar()
