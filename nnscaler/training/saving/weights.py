"""Weights of a model into an engine and out of it: from a checkpoint, or a folder of safetensors as `transformers` has
it. Each rank reads what it holds and no more."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from nnscaler.errors import NnscalerError
from nnscaler.runtime.communication.communicator import CommunicationError, ProgramError
from nnscaler.runtime.training.saving.boxes import Box, boxes_of
from nnscaler.runtime.training.saving.checkpoint import MODEL, CannotWrite, everywhere
from nnscaler.runtime.training.saving.dcp import METADATA, Folder, TensorShard, key_of
from nnscaler.runtime.training.saving.rank_tensors import StoredTensor
from nnscaler.training.engine import Engine

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_HALVES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}


def load_weights(engine: Engine, path: str | Path, prefix: str = "") -> list[str]:
    """Fill parameters and buffers from a checkpoint, a file of safetensors, or a folder of them.

    `prefix`: what names in the model begin with and those in the files do not ("model." where the model holds a
    `transformers` model as `self.model`). Returns the names of buffers that the files lack, which stay as they are:
    `save_pretrained` writes no buffers that are computed. Every rank calls it.
    Raises NnscalerError on every rank: no_such_file, cannot_read, and other_model for a parameter that is missing or
    has another shape.
    """
    place = Path(path)
    error: Exception | None = None
    lacking: list[str] = []
    with as_user_error("cannot_read"):
        try:
            if (place / METADATA).is_file():
                read_model(engine, Folder(place))
            else:
                lacking = _read_safetensors(engine.stored(), SafetensorFiles(place), prefix)
        except Exception as raised:  # noqa: BLE001 - raised when the other ranks know
            error = raised
        everywhere(engine.communicator, error, f"loading {place}")
    return lacking


@contextmanager
def as_user_error(code: str) -> Iterator[None]:
    """Tell the runtime's errors about files as the user's; those of communication stay what they are."""
    try:
        yield
    except CommunicationError:
        raise
    except ProgramError as error:
        raise NnscalerError("cannot_write" if isinstance(error, CannotWrite) else code, str(error)) from error


def other_model(path: Path, why: str) -> NnscalerError:
    """Return the error for weights that do not fit the program."""
    return NnscalerError("other_model", f"{path} is a checkpoint of another model: {why}")


# -- from a checkpoint ---------------------------------------------------------------------------------------------


def read_model(engine: Engine, folder: Folder) -> None:
    """Fill this rank's tensors. Raises NnscalerError("other_model"), which names the tensor."""
    found = folder.contents.tensors
    shards: list[TensorShard] = []
    for entry in engine.stored():
        name = next((n for n in (entry.fqn, *entry.names) if key_of((MODEL, n)) in found), None)
        if name is None:
            raise other_model(folder.path, f"it has no `{entry.fqn}`")
        _check_kind(folder.path, entry, *found[key_of((MODEL, name))])
        shards.append(TensorShard((MODEL, name), entry.shape, boxes_of(entry), entry.tensor))
    folder.read(shards)


def check_known(engine: Engine, folder: Folder) -> None:
    """Check that some rank holds each tensor of the checkpoint's model. Every rank calls it."""
    names = sorted(path[-1] for path in folder.contents.paths.values() if path[0] == MODEL)
    mine = {name for entry in engine.stored() for name in (entry.fqn, *entry.names)}
    if not names:
        return
    held = torch.tensor([int(name in mine) for name in names], device=engine.device)
    anywhere = engine.communicator.all_reduce(held, tuple(range(engine.world_size)), "max").tolist()
    unknown = next((name for name, there in zip(names, anywhere, strict=True) if not there), None)
    if unknown is not None:
        raise other_model(folder.path, f"the program has no `{unknown}`")


def _check_kind(path: Path, entry: StoredTensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """A run in another precision saves floating tensors in that, which any other one converts."""
    own = entry.tensor.dtype
    if shape != entry.shape or (dtype != own and not (dtype.is_floating_point and own.is_floating_point)):
        kinds = [f"{str(d).removeprefix('torch.')}{list(s)}" for d, s in ((dtype, shape), (own, entry.shape))]
        raise other_model(path, f"`{entry.fqn}` is {kinds[0]} in it, and the program's is {kinds[1]}")


# -- from safetensors ----------------------------------------------------------------------------------------------


_FROM_TORCH = "safetensors.torch.save_file(torch.load(path), ...) writes one; or name the checkpoint it came from"


class SafetensorFiles:
    """A file of safetensors, or the files of a folder and their index.

    Raises NnscalerError: no_such_file, cannot_read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file_of: dict[str, Path] = {}
        files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
        index = path / INDEX
        if index.is_file():
            try:
                named = json.loads(index.read_text())["weight_map"]
            except (OSError, ValueError, KeyError) as error:
                raise NnscalerError("cannot_read", f"{index} cannot be read: {type(error).__name__}") from None
            files = sorted({path / file for file in named.values()})
        if not files:
            message = f"{path} holds neither a checkpoint nor safetensors"
            raise NnscalerError("no_such_file", message, help="name a step_... folder, or one with model.safetensors")
        for file in files:
            with self._open(file) as opened:
                self.file_of.update(dict.fromkeys(opened.keys(), file))

    @contextmanager
    def _open(self, file: Path) -> Iterator[Any]:
        try:
            with safe_open(file, framework="pt") as opened:
                yield opened
        except NnscalerError:
            raise
        except Exception as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            message = f"{file} cannot be read, it may be cut short: {reason}"
            help = None
            if zipfile.is_zipfile(file):
                message, help = f"{file} is no file of safetensors, but one of torch.save", _FROM_TORCH
            raise NnscalerError("cannot_read", message, help=help) from error

    def read(self, wanted: Mapping[str, Sequence[StoredTensor]]) -> None:
        """Fill boxes of tensors by name; a file is open while it is read."""
        by_file: dict[Path, list[str]] = {}
        for name in wanted:
            by_file.setdefault(self.file_of[name], []).append(name)
        for file, names in by_file.items():
            with self._open(file) as opened:
                for name in names:
                    part = opened.get_slice(name)
                    shape, dtype = tuple(part.get_shape()), _dtype(part.get_dtype())
                    for entry in wanted[name]:
                        _check_kind(self.path, entry, shape, dtype)
                        for box in boxes_of(entry):
                            _copy(part, box, entry.tensor.detach())


def _dtype(name: str) -> torch.dtype:
    """Return the dtype that safetensors names so: I64, BOOL, BF16."""
    if name in _HALVES:
        found = getattr(torch, _HALVES[name])
    elif name == "BOOL":
        found = torch.bool
    else:
        found = getattr(torch, {"I": "int", "U": "uint"}.get(name[0], "float") + name[1:].lower(), None)
    if not isinstance(found, torch.dtype):
        raise NnscalerError("cannot_read", f"safetensors of dtype {name} cannot be read")
    return found


def _copy(part: Any, box: Box, tensor: Tensor) -> None:
    where = tuple(slice(start, start + size) for start, size in zip(box.offsets, box.sizes, strict=True))
    box.of(tensor).copy_(part[where] if where else part[...])


def _read_safetensors(stored: Sequence[StoredTensor], files: SafetensorFiles, prefix: str) -> list[str]:
    wanted: dict[str, list[StoredTensor]] = {}
    lacking: list[str] = []
    for entry in stored:
        names = [name.removeprefix(prefix) for name in (entry.fqn, *entry.names) if name.startswith(prefix)]
        name = next((n for n in names if n in files.file_of), None)
        if name is not None:
            wanted.setdefault(name, []).append(entry)
        elif entry.kind == "buffer":
            lacking.append(entry.fqn)
        else:
            raise _missing(files, entry, prefix)
    files.read(wanted)
    return lacking


def _missing(files: SafetensorFiles, entry: StoredTensor, prefix: str) -> NnscalerError:
    """Return the error for a parameter that the files lack, with the prefix that would do."""
    message = f"it has no `{entry.fqn.removeprefix(prefix)}`"
    parts = entry.fqn.split(".")
    tails = [".".join(parts[i:]) for i in range(len(parts))]
    found = next((tail for tail in tails if tail in files.file_of), None)
    error = other_model(files.path, message)
    if found is None or found == entry.fqn.removeprefix(prefix):
        return error
    help = f"it has `{found}`: prefix={entry.fqn.removesuffix(found)!r}"
    return NnscalerError(error.code, error.message, help=help)
