"""A check file: a user's own `model()`, `batch()` and `parallelize(model, mesh)`, read into an `ExternalProgram`.

The file has nothing of ours in it. What it may say besides is listed in `FUNCTIONS` and `VALUES`; each mistake is told
with its line before anything runs.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from textwrap import indent
from types import MappingProxyType, ModuleType
from typing import Any

from torch import nn

from op_registry.source_location import definition_of

from nnscaler.errors import NnscalerError, SourceLocation
from nnscaler.model_file import find_target, import_user_file, user_function
from verify.external.program import ExternalProgram, default_step
from verify.external.request import DEFAULT_RANKS, EXAMPLE, REFERENCES, read_mesh, sized

TEMPLATE = """\
import torch
from torch.distributed.fsdp import fully_shard

mesh = ("dp",)                  # one axis over all ranks; over an axis of this name the batch is divided


def model():                    # the plain module, which the program must equal
    return torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 4))


def batch():                    # of one step, whole: dim 0 of its tensors are the rows
    return torch.randn(8, 16), torch.randint(0, 4, (8,))


def step(model, batch):         # the loss
    rows, labels = batch
    return torch.nn.functional.cross_entropy(model(rows), labels)


def parallelize(model, mesh):   # yours, as it is
    return fully_shard(model, mesh=mesh)
"""
# functions of a check file -> what they are called with
FUNCTIONS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "model": (),
        "batch": (),
        "parallelize": ("model", "mesh"),
        "step": ("model", "batch"),
        "reference_step": ("model", "batch"),
        "optimizer": ("model",),
        "clip": ("model", "max_norm"),
    }
)
VALUES = ("mesh", "data_axes", "max_norm", "names", "reference")
REQUIRED = ("model", "batch", "parallelize")
# axes over which the batch is divided where `data_axes` does not say so: by these names, or by their first words
DATA_NAMES = ("dp", "ddp", "fsdp", "hsdp", "data", "batch", "replicate", "shard")
_NEAR = 0.84  # of two names, 0 to 1: above it one is taken for a slip of the other


@dataclass(frozen=True)
class CheckFile:
    """A check file that was read: the program, and what its reader must know of how it was read."""

    program: ExternalProgram
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class _CheckFileReader:
    """The module of a check file, with the place of each of its names."""

    path: Path
    module: ModuleType

    def get(self, name: str) -> Any:
        """Return the value of a name; None where the file does not say."""
        return getattr(self.module, name, None)

    def place(self, name: str) -> SourceLocation:
        """Return the line on which the file gives the name its value; the first one where it is imported or made."""
        lines = self.path.read_text(encoding="utf-8").splitlines()
        number = _lines_of_names("\n".join(lines)).get(name, 1)
        return SourceLocation(str(self.path), number, lines[number - 1].strip() if number <= len(lines) else "")

    def error(self, code: str, name: str, message: str, help: str | None = None) -> NnscalerError:
        """Return the error about a name of the file."""
        return NnscalerError(code, message, self.place(name), help)


def _lines_of_names(text: str) -> dict[str, int]:
    found: dict[str, int] = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found[node.name] = node.lineno
        targets = node.targets if isinstance(node, ast.Assign) else [node.target] if _assigns(node) else []  # type: ignore[attr-defined]
        found.update({target.id: node.lineno for target in targets if isinstance(target, ast.Name)})
    return found


def _assigns(node: ast.stmt) -> bool:
    return isinstance(node, ast.AnnAssign | ast.AugAssign)


def load_check_file(target: str, *, ranks: int | None = None, mesh: str | None = None) -> CheckFile:
    """Import `check.py`, `check.py::parallelize` or `package.module:parallelize`, and read what it says.

    `ranks`: how many are asked for; `mesh`: axes that replace those of the file. Neither model nor batch is made yet.
    Raises NnscalerError: `no_such_file`, `model_import_failed`, `check_incomplete` (with an example),
    `bad_check_file`, `bad_mesh`, and `model_raised` where `mesh` is a function that raises.
    """
    path, named = find_target(target, EXAMPLE)
    reader = _CheckFileReader(path, import_user_file(path))
    chosen = named or "parallelize"
    functions = {name: _function(reader, chosen if name == "parallelize" else name, name) for name in FUNCTIONS}
    notes = _notes_on_slips(reader)
    axes = _mesh(reader, ranks, mesh, notes)
    data_axes = _data_axes(reader, axes, mesh, notes)
    program = ExternalProgram(
        name=f"{path.name}::{named}" if named else path.name,
        model=_made_by_user(path, "model"),
        batch=_made_by_user(path, "batch"),
        parallelize=_parallelize(functions),
        mesh=axes,
        data_axes=data_axes,
        step=functions["step"] or default_step,
        reference_step=functions["reference_step"],
        optimizer=functions["optimizer"],
        max_norm=_max_norm(reader, functions["clip"] is not None),
        clip=functions["clip"],
        names=_names(reader),
        reference=_reference(reader),
        where=definition_of(_parallelize(functions)) or reader.place(chosen),
        batch_where=definition_of(reader.get("batch")) or reader.place("batch"),
    )
    return CheckFile(program, tuple(notes))


def _parallelize(functions: Mapping[str, Callable[..., Any] | None]) -> Callable[..., Any]:
    found = functions["parallelize"]
    assert found is not None, "`_function` refuses a file without it"
    return found


def _function(reader: _CheckFileReader, name: str, role: str) -> Callable[..., Any] | None:
    """Return a function of the file that can be called as its role is; None where it has none and needs none."""
    value = reader.get(name)
    if value is None and role not in REQUIRED:
        return None
    call = f"{role}({', '.join(FUNCTIONS[role])})"
    if value is None:
        known = ", ".join(
            n for n in _lines_of_names(reader.path.read_text(encoding="utf-8")) if callable(reader.get(n))
        )
        message = f"{reader.path.name} has no function {name}()" + (f" (it defines {known})" if known else "")
        help = f"a check file looks like this:\n\n{indent(TEMPLATE.rstrip(), ' ' * 4)}"
        raise NnscalerError("check_incomplete", message, help=help)
    if isinstance(value, nn.Module) or not callable(value):
        message = f"`{name}` of {reader.path.name} is {_described(value)}, not a function {call}"
        raise reader.error("bad_check_file", name, message, f"def {call}: return ...")
    try:
        inspect.signature(value).bind(*FUNCTIONS[role])
    except TypeError as error:
        message = f"`{name}` of {reader.path.name} cannot be called as {call}: {error}"
        raise reader.error("bad_check_file", name, message, f"def {call}: ...") from None
    except ValueError:  # of builtins, which have no signature
        pass
    return value  # type: ignore[no-any-return]


def _made_by_user(path: Path, name: str) -> Callable[[], Any]:
    """Return a function of the file that tells what it raises as the user's."""
    return user_function(f"{path}::{name}", name, EXAMPLE)


def _mesh(
    reader: _CheckFileReader, ranks: int | None, given: str | None, notes: list[str]
) -> tuple[tuple[str, int], ...]:
    """Return the axes with their sizes: those of the command line, of the file, or one axis of the name in
    `data_axes`."""
    if given is not None:
        axes = list(read_mesh(given))
        return sized(axes, _ranks_of(axes, ranks, notes), f"--mesh {given}")
    said = reader.get("mesh")
    name = "mesh"
    if said is None:
        name = "data_axes"
        said = _axis_names(reader)
        if not said:
            message = f"{reader.path.name} says neither `mesh` nor over which axis the batch is divided"
            raise NnscalerError("check_incomplete", message, reader.place("parallelize"), _MESH_HELP)
    if callable(said):
        asked = ranks or _two(notes)
        said = user_function(f"{reader.path}::mesh", "mesh", EXAMPLE)(asked)
        ranks = asked
    axes = _axes(reader, name, said)
    try:
        return sized(axes, _ranks_of(axes, ranks, notes), f"`{name}` of {reader.path.name}")
    except NnscalerError as error:
        raise NnscalerError(error.code, error.message, reader.place(name), error.help) from None


_MESH_HELP = """mesh = ("dp",) makes one axis over all ranks and gives each its rows of the batch (DDP, FSDP2);
  mesh = ("tp",) gives each rank the whole batch (tensor parallelism, pipelines); {"dp": 2, "tp": 2} has several"""


def _ranks_of(axes: list[tuple[str, int]], ranks: int | None, notes: list[str]) -> int | None:
    """Return what the product of the axes must be; None where they say it themselves."""
    return _two(notes) if ranks is None and any(size == -1 for _, size in axes) else ranks


def _two(notes: list[str]) -> int:
    notes.append(f"{DEFAULT_RANKS} ranks, for --ranks was not given")
    return DEFAULT_RANKS


def _axes(reader: _CheckFileReader, name: str, said: Any) -> list[tuple[str, int]]:
    """Return (axis, size) of a name, a tuple of one name, a tuple of pairs or a dict; -1 where a size is left open."""
    if isinstance(said, str):
        said = (said,)
    pairs = list(said.items()) if isinstance(said, Mapping) else list(said) if isinstance(said, tuple | list) else []
    if len(pairs) == 1 and isinstance(pairs[0], str):
        pairs = [(pairs[0], -1)]
    wrong = not pairs or any(not _is_axis(pair) for pair in pairs)
    if wrong:
        message = f"`{name}` of {reader.path.name} is {said!r}, which names no axes with sizes"
        raise reader.error("bad_mesh", name, message, 'mesh = {"dp": 2, "tp": 2}, or ("dp",) for one axis')
    return [(axis, size) for axis, size in pairs]


def _is_axis(pair: Any) -> bool:
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        return False
    name, size = pair
    return isinstance(name, str) and bool(name) and type(size) is int and (size >= 1 or size == -1)


def _axis_names(reader: _CheckFileReader) -> tuple[str, ...] | None:
    """Return `data_axes` as names; None where the file does not say."""
    said = reader.get("data_axes")
    if said is None:
        return None
    names = (said,) if isinstance(said, str) else said
    if not isinstance(names, tuple | list) or not all(isinstance(name, str) for name in names):
        message = f"`data_axes` of {reader.path.name} is {said!r}, not names of axes"
        raise reader.error("bad_check_file", "data_axes", message, 'data_axes = ("dp",), or () for none')
    return tuple(names)


def _data_axes(
    reader: _CheckFileReader, axes: tuple[tuple[str, int], ...], given: str | None, notes: list[str]
) -> tuple[str, ...]:
    """Return the axes over which the batch is divided: as the file says, else those with a name of `DATA_NAMES`.

    Where the command line's mesh (`given`) replaces the file's, an axis that only the file's has is left out.
    """
    known = [name for name, _ in axes]
    said = _axis_names(reader)
    if said is None:
        found = tuple(name for name in known if name.split("_")[0] in DATA_NAMES)
        told = f"divided over {', '.join(found)}" if found else "whole on every rank"
        notes.append(f"the batch is {told}, by the names of the axes; `data_axes` in {reader.path.name} would say it")
        return found
    own = _own_axes(reader) if given is not None else ()
    absent = [name for name in said if name not in known and name in own]
    if absent:
        notes.append(f"`data_axes` names {', '.join(absent)}, which --mesh {given} has not: left out")
        said = tuple(name for name in said if name not in absent)
    unknown = [name for name in said if name not in known]
    if unknown:
        close = get_close_matches(unknown[0], known, n=1)
        message = f"`data_axes` of {reader.path.name} names {unknown[0]!r}, and the mesh has {', '.join(known)}"
        help = f"did you mean {close[0]!r}?" if close else "data_axes = () where each rank gets the whole batch"
        raise reader.error("bad_mesh", "data_axes", message, help)
    return said


def _own_axes(reader: _CheckFileReader) -> tuple[str, ...]:
    """Return the names of the axes in `mesh` of the file; none where it has no `mesh` or makes it by a function."""
    said = reader.get("mesh")
    return () if said is None or callable(said) else tuple(name for name, _ in _axes(reader, "mesh", said))


def _max_norm(reader: _CheckFileReader, clips: bool) -> float | None:
    said = reader.get("max_norm")
    if said is None and not clips:
        return None
    if isinstance(said, bool) or not isinstance(said, int | float) or not 0 < said < float("inf"):
        name = "clip" if said is None else "max_norm"
        message = f"`max_norm` of {reader.path.name} is {said!r}, not a positive number"
        raise reader.error("bad_check_file", name, message, "max_norm = 1.0: gradients are clipped to this norm")
    return float(said)


def _names(reader: _CheckFileReader) -> Mapping[str, str]:
    said = reader.get("names")
    if said is None:
        return {}
    if not isinstance(said, Mapping) or not all(isinstance(text, str) for pair in said.items() for text in pair):
        message = f"`names` of {reader.path.name} is no dict of names"
        help = 'names = {"name in the program": "name in the plain model"}'
        raise reader.error("bad_check_file", "names", message, help)
    return dict(said)


def _reference(reader: _CheckFileReader) -> str:
    said = reader.get("reference")
    if said is not None and said not in REFERENCES:
        message = f"`reference` of {reader.path.name} is {said!r}, none of {', '.join(REFERENCES)}"
        help = '"whole": the loss of the whole batch; "parts": the mean of the losses of the data parts'
        raise reader.error("bad_check_file", "reference", message, help)
    return said or "whole"


def _notes_on_slips(reader: _CheckFileReader) -> list[str]:
    """Return a note on each name that the file defines beside one of ours that it lacks and nearly names."""
    missing = [name for name in (*FUNCTIONS, *VALUES) if reader.get(name) is None]
    told: list[str] = []
    for name in _lines_of_names(reader.path.read_text(encoding="utf-8")):
        near = get_close_matches(name, missing, n=1, cutoff=_NEAR)
        if near and name not in (*FUNCTIONS, *VALUES):
            told.append(f"{reader.path.name} defines `{name}`, which is not read: a check file may have `{near[0]}`")
    return told


def _described(value: Any) -> str:
    if isinstance(value, nn.Module):
        return f"a module ({type(value).__name__})"
    kind = type(value).__name__
    return "None" if value is None else f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}"
