"""Load the weights of a model into an engine, from a checkpoint or a folder of safetensors as `transformers` has it.
Each rank reads what it holds and no more."""

from __future__ import annotations

import json
import warnings
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from nnscaler.errors import NnscalerError
from nnscaler.exception_in_one_line import first_line
from nnscaler.runtime.communication.communicator import CommunicationError, ProgramError
from nnscaler.runtime.training.saving.checkpoint import MODEL, CannotWrite, everywhere
from nnscaler.runtime.training.saving.dcp import METADATA, Folder, TensorShard, key_of
from nnscaler.runtime.training.saving.rank_tensors_as_boxes import Box, StoredTensor, boxes_of
from nnscaler.training.engine import Engine

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_HALVES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}


def load_weights(engine: Engine, path: str | Path, prefix: str = "") -> list[str]:
    """Fill parameters and buffers from a checkpoint, a file of safetensors, or a folder of them.

    `prefix`: what names in the model begin with and those in the files do not ("model." where the model holds a
    `transformers` model as `self.model`). Returns the names of buffers that the files lack, which stay as they are:
    `save_pretrained` writes no buffers that are computed. Warns of what is there and the model does not have. Every
    rank calls it. Raises NnscalerError on every rank: no_such_file, cannot_read, and other_model for a parameter that
    is missing, has another shape, or is two different ones there.
    """
    place = Path(path)
    error: Exception | None = None
    lacking, there = list[str](), list[str]()
    with as_user_error("cannot_read"):
        try:
            if (place / METADATA).is_file():
                opened = Folder(place)
                there = _names_of(opened)
                read_model(engine, opened)
            else:
                files = SafetensorFiles(place)
                there = sorted(prefix + name for name in files.file_of)
                lacking = _read_safetensors(engine.stored(), files, prefix)
        except Exception as raised:  # noqa: BLE001 - raised when the other ranks know
            error = raised
        everywhere(engine.communicator, error, f"loading {place}")
    if unknown := _unknown(engine, there):
        shown = ", ".join(f"`{name}`" for name in unknown[:3]) + (", ..." if len(unknown) > 3 else "")
        warnings.warn(f"{place} has {len(unknown)} tensors that the model does not have: {shown}", stacklevel=2)
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
    unknown = _unknown(engine, _names_of(folder))
    if unknown:
        raise other_model(folder.path, f"the program has no `{unknown[0]}`")


def _names_of(folder: Folder) -> list[str]:
    return sorted(path[-1] for path in folder.contents.paths.values() if path[0] == MODEL)


def _unknown(engine: Engine, names: Sequence[str]) -> list[str]:
    """Return the names of tensors that no rank holds. Every rank calls it, with the same names."""
    mine = {name for entry in engine.stored() for name in (entry.fqn, *entry.names)}
    if not names:
        return []
    held = torch.tensor([int(name in mine) for name in names], device=engine.device)
    anywhere = engine.communicator.all_reduce(held, tuple(range(engine.world_size)), "max").tolist()
    return [name for name, there in zip(names, anywhere, strict=True) if not there]


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
            reason = first_line(error) or type(error).__name__
            message = f"{file} cannot be read, it may be cut short: {reason}"
            help = None
            if zipfile.is_zipfile(file):
                message, help = f"{file} is no file of safetensors, but one of torch.save", _FROM_TORCH
            raise NnscalerError("cannot_read", message, help=help) from error

    def read(self, wanted: Mapping[str, Sequence[StoredTensor]], compared: bool = False) -> None:
        """Fill boxes of tensors by name; a file is open while it is read. `compared`: they have been filled by another
        of their names, and must be equal."""
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
                            if not compared:
                                box.of(entry.tensor.detach()).copy_(_part_of(part, box))
                            elif not _is_same(box.of(entry.tensor.detach()), _part_of(part, box)):
                                names_ = " and ".join(f"`{n}`" for n in entry.names)
                                raise other_model(self.path, f"{names_} are one tensor in the model, and differ in it")


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


def _part_of(whole: Any, box: Box) -> Tensor:
    where = tuple(slice(start, start + size) for start, size in zip(box.offsets, box.sizes, strict=True))
    return whole[where] if where else whole[...]  # type: ignore[no-any-return]


def _is_same(held: Tensor, found: Tensor) -> bool:
    return torch.allclose(held, found.to(held), rtol=0, atol=0, equal_nan=True)


def _read_safetensors(stored: Sequence[StoredTensor], files: SafetensorFiles, prefix: str) -> list[str]:
    wanted: dict[str, list[StoredTensor]] = {}
    others: dict[str, list[StoredTensor]] = {}
    lacking: list[str] = []
    for entry in stored:
        names = [name.removeprefix(prefix) for name in (entry.fqn, *entry.names) if name.startswith(prefix)]
        there = [name for name in dict.fromkeys(names) if name in files.file_of]
        for name in there:
            (wanted if name == there[0] else others).setdefault(name, []).append(entry)
        if there:
            continue
        if entry.kind == "buffer":
            lacking.append(entry.fqn)
        else:
            raise _missing(files, entry, prefix)
    files.read(wanted)
    files.read(others, compared=True)
    return lacking


def _missing(files: SafetensorFiles, entry: StoredTensor, prefix: str) -> NnscalerError:
    """Return the error for a parameter that the files lack, with the prefix that would do."""
    message = f"it has no `{entry.fqn.removeprefix(prefix)}`"
    parts = entry.fqn.split(".")
    tails = [".".join(parts[i:]) for i in range(len(parts))]
    found = next((tail for tail in tails if tail in files.file_of), None)
    longer = next((name for name in files.file_of if name.endswith(f".{entry.fqn}")), None)
    help = None
    if found is not None and found != entry.fqn.removeprefix(prefix):
        help = f"it has `{found}`: prefix={entry.fqn.removesuffix(found)!r}"
    elif longer is not None:
        shorter = f"{{n.removeprefix({longer.removesuffix(entry.fqn)!r}): t for n, t in load_file(path).items()}}"
        help = f"it has `{longer}`: write its tensors by the model's names, safetensors.torch.save_file({shorter}, ...)"
    return NnscalerError("other_model", other_model(files.path, message).message, help=help)
