"""Export checkpoints for others: as safetensors, a torch file, or a folder that `transformers` reads; summarise and
compare them.

One process does this, without an engine. It holds the tensors of one file at a time, and of a torch file all.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from op_registry.call import dtype_name

from nnscaler.atomic_writes import cannot_write, save_tensors
from nnscaler.errors import NnscalerError
from nnscaler.runtime.tensor_bits_and_differences import same_bits
from nnscaler.runtime.training.saving.checkpoint import MODEL, RunRecord, read_run
from nnscaler.runtime.training.saving.dcp import METADATA, Folder, whole
from nnscaler.training.saving.checkpoint_rotation import RunFolder
from nnscaler.training.saving.optimizer_checkpoint_entries import CLASS
from nnscaler.training.saving.weights import INDEX, SINGLE, as_user_error

FORMATS = ("safetensors", "transformers", "torch")
FILE_BYTES = 5 << 30  # of one file of safetensors, as `transformers` has it


@dataclass(frozen=True, slots=True)
class Summary:
    """The contents of a checkpoint.

    path       of its folder
    run        the record that it was saved with
    tensors    of the model: name -> (shape, dtype)
    optimizer  its name, or their names; empty where none was saved
    objects    what else was saved, by name
    bytes      of all tensors
    """

    path: str
    run: RunRecord
    tensors: dict[str, tuple[tuple[int, ...], str]]
    optimizer: str
    objects: tuple[str, ...]
    bytes: int


@dataclass(frozen=True, slots=True)
class Export:
    """How a checkpoint is written for others.

    format      "safetensors", "transformers" or "torch"
    prefix      that is taken off the names ("model." where the model holds a `transformers` model as `self.model`)
    dtype       of floating tensors; empty: as they are
    config      a `config.json`, or a folder with one, that is copied beside the weights ("transformers")
    file_bytes  of one file at most
    """

    format: str = "safetensors"
    prefix: str = ""
    dtype: str = ""
    config: str | None = None
    file_bytes: int = FILE_BYTES


def open_checkpoint(path: str | Path) -> Folder:
    """Open a checkpoint, or the newest one in the folder of a run. Raises NnscalerError: no_such_file, cannot_read."""
    place = Path(path)
    if not (place / METADATA).is_file() and place.is_dir():
        runs = RunFolder(place)
        place = runs.at(runs.newest()) if runs.newest() >= 0 else place
    if not (place / METADATA).is_file():
        message = f"{path} is no checkpoint, and no folder of a run with one"
        raise NnscalerError("no_such_file", message, help="name the folder of a run, or one of its step_... folders")
    with as_user_error("cannot_read"):
        return Folder(place)


def summarise(folder: Folder) -> Summary:
    """Return what a checkpoint holds."""
    contents = folder.contents
    with as_user_error("cannot_read"):
        run = read_run(folder)
        names = [
            key
            for key in contents.objects
            if (path := contents.paths[key])[0].startswith("optimizer") and path[1:] == (CLASS,)
        ]
        optimizer = ", ".join(folder.read([], [name])[name] for name in sorted(names))
    model = {
        path[-1]: (shape, dtype_name(dtype))
        for key, (shape, dtype) in sorted(contents.tensors.items())
        if (path := contents.paths[key])[0] == MODEL
    }
    size = sum(prod(shape) * dtype.itemsize for shape, dtype in contents.tensors.values())
    others = tuple(key for key in contents.objects if not key.startswith("optimizer") and key != "run")
    return Summary(str(folder.path), run, model, optimizer, others, size)


def export(folder: Folder, out: str | Path, how: Export = Export()) -> list[Path]:
    """Write the state dict of the model of a checkpoint; return the files.

    Tied tensors have one name, but in a torch file all of them.

    Raises NnscalerError: cannot_write, cannot_read, no_such_file (the config), usage.
    """
    if how.format not in FORMATS:
        raise NnscalerError("usage", f"format {how.format!r} is none of {', '.join(FORMATS)}")
    place = Path(out)
    summary = summarise(folder)
    stored = {name: kind for name, kind in summary.tensors.items() if name not in summary.run.computed}
    summary = replace(summary, tensors=stored)
    config = _config(how)
    try:
        if how.format == "torch":
            place.parent.mkdir(parents=True, exist_ok=True)
            state = dict(_tensors(folder, list(summary.tensors), how))
            for names in summary.run.tied:
                held = next((n for n in names if n.removeprefix(how.prefix) in state), None)
                if held is not None:
                    state.update({n.removeprefix(how.prefix): state[held.removeprefix(how.prefix)] for n in names})
            _whole(lambda file: save_tensors(state, file), place)
            return [place]
        place.mkdir(parents=True, exist_ok=True)
        written = _safetensors(folder, summary, place, how)
        if config is not None:
            shutil.copyfile(config, place / "config.json")
            written.append(place / "config.json")
        return written
    except OSError as error:
        raise cannot_write(place, error) from None


def export_weights(checkpoint: str | Path, out: str | Path, **how: Any) -> list[Path]:
    """Write the model of a checkpoint, or of the newest one of a run, for others; return the files.

    `how`: the fields of `Export`, such as format="torch". One process does it; under torchrun, that of rank 0.
    Raises NnscalerError: cannot_write, cannot_read, no_such_file, usage.
    """
    return export(open_checkpoint(checkpoint), out, Export(**how))


def _safetensors(folder: Folder, summary: Summary, out: Path, how: Export) -> list[Path]:
    files = list(_files(summary, how))
    written: list[Path] = []
    weight_map: dict[str, str] = {}
    total = 0
    for number, names in enumerate(files, 1):
        name = SINGLE if len(files) == 1 else f"model-{number:05d}-of-{len(files):05d}.safetensors"
        state = dict(_tensors(folder, names, how))
        total += sum(t.numel() * t.element_size() for t in state.values())
        weight_map.update(dict.fromkeys(state, name))
        _whole(lambda file, state=state: save_file(state, file, metadata={"format": "pt"}), out / name)  # type: ignore[misc]
        written.append(out / name)
    if len(files) > 1:  # last: a reader that finds it finds all files
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        (out / INDEX).write_text(json.dumps(index, indent=2) + "\n")
        written.append(out / INDEX)
    return written


def _files(summary: Summary, how: Export) -> Iterator[list[str]]:
    """Divide the names into files, none of which is larger than it may be unless one tensor is."""
    names: list[str] = []
    size = 0
    for name, (shape, dtype) in summary.tensors.items():
        kind = getattr(torch, dtype)
        wanted = getattr(torch, how.dtype) if how.dtype and kind.is_floating_point else kind
        weight = prod(shape) * wanted.itemsize
        if names and size + weight > how.file_bytes:
            yield names
            names, size = [], 0
        names.append(name)
        size += weight
    if names:
        yield names


def _tensors(folder: Folder, names: list[str], how: Export) -> Iterator[tuple[str, Tensor]]:
    """Read whole tensors by their names in the files."""
    found = {}
    for name in names:
        shape, dtype = folder.contents.tensors[f"{MODEL}.{name}"]
        found[name] = torch.empty(shape, dtype=dtype)
    with as_user_error("cannot_read"):
        folder.read([whole((MODEL, name), tensor) for name, tensor in found.items()])
    for name, tensor in found.items():
        wanted = getattr(torch, how.dtype) if how.dtype and tensor.is_floating_point() else tensor.dtype
        yield name.removeprefix(how.prefix), tensor.to(wanted)


def _whole(write: Callable[[Path], None], file: Path) -> None:
    """Write a file under another name first, so that half of one is never taken for whole."""
    new = file.with_name(file.name + ".new")
    try:
        write(new)
        new.replace(file)
    finally:
        new.unlink(missing_ok=True)


def _config(how: Export) -> Path | None:
    if how.format != "transformers" or how.config is None:
        return None
    file = Path(how.config)
    file = file / "config.json" if file.is_dir() else file
    if not file.is_file():
        raise NnscalerError("no_such_file", f"{file} does not exist", help="name the config.json of the model")
    return file


def compare(folder: Folder, other: Folder | None = None) -> tuple[int, list[str]]:
    """Read all of a checkpoint, one tensor after the other, and compare it bitwise with another one where one is given.

    Returns how many tensors and objects were read, and what is wrong with which. Raises NnscalerError("cannot_read").
    """
    wrong: list[str] = []
    mine = folder.contents.tensors
    with as_user_error("cannot_read"):
        for key, (shape, dtype) in mine.items():
            path, tensor = folder.contents.paths[key], torch.empty(shape, dtype=dtype)
            folder.read([whole(path, tensor)])
            if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
                wrong.append(f"{key} is not finite")
            if other is not None and mine[key] != other.contents.tensors.get(key):
                wrong.append(f"{key} is missing in {other.path}, or has another shape or dtype there")
            elif other is not None:
                there = torch.empty(shape, dtype=dtype)
                other.read([whole(path, there)])
                if not same_bits(tensor, there):
                    wrong.append(f"{key} differs in {other.path}")
        folder.read([], folder.contents.objects)
    if other is not None:
        wrong += [f"{key} is missing in {folder.path}" for key in other.contents.tensors if key not in mine]
    return len(mine) + len(folder.contents.objects), wrong
