"""Load the user's model file, or module: `build_model()` (or another factory) and `sample_inputs()`.

The user's code runs here, so its errors are reported as the user's: with the line of the file, without our frames.
"""

from __future__ import annotations

import functools
import inspect
import re
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import islice
from pathlib import Path
from textwrap import indent
from types import ModuleType
from typing import TYPE_CHECKING, Any

from nnscaler.errors import GUARD_MAIN, NnscalerError, SourceLocation, exit_call
from nnscaler.exception_in_one_line import in_one_line
from nnscaler.global_random_generators import seed_all
from nnscaler.is_user_file import is_users
from nnscaler.pyproject_settings import SEEDS

# Targets on a command line and in settings: a file, or a module of a package, and a function in it.

_MODULE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")


def find_target(
    target: str, example: str = "nnscaler verify-plan path/to/model.py", folder: Path | None = None
) -> tuple[Path, str]:
    """Return the file and the function of `file.py`, `file.py::function` or `package.module:function`; the function is
    "" where none is named. `example`: what the help shows.

    A module is looked for from `folder`, the current one by default, as `find_module` does, and so is a file. Raises
    NnscalerError `no_such_file`.
    """
    start = folder or Path.cwd()
    name, separator, function = target.partition("::")
    if not separator and not (start / name).exists() and ":" in name:
        name, _, function = name.rpartition(":")
    if (start / name).is_file():
        return (Path(name) if folder is None else start / name), function
    help_text = f"{example}, or package.module:function"
    if not _MODULE.fullmatch(name) or name.endswith(".py"):
        raise NnscalerError("no_such_file", f"there is no file {name!r}", help=help_text)
    from nnscaler.runtime.program.resolve_shadowed_user_imports import find_module  # it imports torch

    file, folders = find_module(name, start)
    if file is None:
        tried, path = ", ".join(shown_path(folder) for folder in folders), name.replace(".", "/")
        message = f"there is no file and no module {name!r}: no {path}.py and no {path}/__init__.py in {tried}"
        raise NnscalerError("no_such_file", f"{message}, or among the installed packages", help=help_text)
    return (Path(shown_path(file)) if folder is None else file), function


def shown_path(path: Path) -> str:
    """Return the path relative to the current folder where it is inside."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


if TYPE_CHECKING:
    from torch import nn

    from nnscaler.tracing import Traced

LOSS_HELP = "--loss-fn path/to/file.py::function"
TEMPLATE = """\
import torch


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(16, 4)

    def forward(self, x, labels):
        return torch.nn.functional.cross_entropy(self.layer(x), labels)  # a scalar loss


def build_model():
    return Model()


def sample_inputs():  # one global batch, as forward's arguments
    return {"x": torch.randn(24, 16), "labels": torch.randint(0, 4, (24,))}
"""


@dataclass(frozen=True)
class ModelFile:
    """`name` is the file's, as reports show it. `stream`: its `train_batches`, where it has that."""

    path: Path
    name: str
    factory: str
    build: Callable[[], nn.Module]
    inputs: Mapping[str, Any] | tuple[Any, ...]
    stream: Callable[[], Iterable[Any]] | None = None

    def batches(self, count: int) -> tuple[Any, ...]:
        """Return up to `count` batches of the file's own to train on. Raises NnscalerError `model_raised`."""
        stream = self.stream
        if stream is None:
            return ()
        return tuple(_called(lambda: list(islice(stream(), count)), self.path, 0, "train_batches()"))

    def description(self) -> dict[str, str]:
        """For a program's manifest."""
        return {"name": self.name, "file": str(self.path), "factory": self.factory}


def load_model_file(target: str, seed: int, loss: str | None = None) -> ModelFile:
    """Import `model.py`, `model.py::factory` or `package.module:factory` and make its sample batch; torch is seeded
    before each call. `loss`: such a target of a function, for a model that returns no loss.

    Raises NnscalerError: `no_such_file`, `model_import_failed`, `model_incomplete` (with a template), `model_raised`.
    """
    path, factory = find_target(target)
    factory = factory or "build_model"
    module = import_user_file(path)
    build = _function(module, path, factory)
    sample = _function(module, path, "sample_inputs")
    inputs = _called(sample, path, seed, "sample_inputs()")
    if not isinstance(inputs, Mapping | tuple | list):
        inputs = (inputs,)
    loss_fn = None if loss is None else load_loss_function(loss)

    def made() -> Any:
        model = _called(build, path, seed, f"{factory}()")
        return model if loss_fn is None else _with_loss(model, loss_fn)

    stream = getattr(module, "train_batches", None)
    return ModelFile(path.resolve(), path.name, factory, made, inputs, stream if callable(stream) else None)


def check_targets(model: str, loss: str | None) -> None:
    """Check that the files exist, before anything is imported. Raises NnscalerError as `find_target`."""
    find_target(model)
    if loss is not None:
        find_target(loss, LOSS_HELP)


def traced(model: ModelFile, say: Callable[[str], None], specialise: bool = False) -> Traced:
    """Trace the model and `say` how long it took. `specialise`: takes the branches of the sample batch.

    Raises NnscalerError: trace_failed, trace_unfaithful.
    """
    from nnscaler.tracing import trace

    start = time.perf_counter()
    found = trace(model.build(), model.inputs, specialise=specialise)
    taken = time.perf_counter() - start
    say(f"trace        {taken:5.1f} s  {len(found.graph.operations)} operations")
    return found


def load_loss_function(target: str) -> Callable[[Any, Any], Any]:
    """Return the function of `file.py::function` or `package.module:function`.

    Raises NnscalerError `no_such_file`, `usage` and those of its import.
    """
    from nnscaler.tracing.models_with_added_loss import check_loss_function

    file, name = find_target(target, LOSS_HELP)
    found: Any = getattr(import_user_file(file), name or "loss", None)
    check_loss_function(found, f"{file}::{name or 'loss'}")
    return found  # type: ignore[no-any-return]


def user_function(target: str, default: str, example: str, *, is_class: bool = False) -> Callable[..., Any]:
    """Return the function that `file.py::name` names; called, it reports what it raises as the user's.

    `is_class`: a class is returned as it is.
    Raises NnscalerError as `find_target`, and as the import of the file.
    """
    path, name = find_target(target, example)
    name = name or default
    found: Callable[..., Any] = _function(import_user_file(path), path, name)

    def guarded(*arguments: Any, seed: int | None = None, **named: Any) -> Any:
        return _called(lambda: found(*arguments, **named), path, seed, f"{name}()")

    functools.update_wrapper(guarded, found)  # what arguments it takes is asked
    guarded.__name__ = name
    return found if is_class and inspect.isclass(found) else guarded


def _with_loss(model: Any, loss_fn: Callable[[Any, Any], Any]) -> Any:
    from torch import nn

    from nnscaler.tracing.models_with_added_loss import with_loss

    return with_loss(model, loss_fn) if isinstance(model, nn.Module) else model


def user_frame(error: BaseException, folder: Path | None = None) -> SourceLocation | None:
    """Return the last frame of the traceback in the user's folder, else the last in any file of the user's. Where an
    exception has none (we raised it), that of its cause. `folder`: None: any."""
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        return SourceLocation(error.filename, error.lineno, (error.text or "").strip())
    inside: SourceLocation | None = None
    outside: SourceLocation | None = None
    for frame in traceback.extract_tb(error.__traceback__):
        if frame.lineno is None or not is_users(frame.filename):
            continue
        file, place = Path(frame.filename).resolve(), SourceLocation(frame.filename, frame.lineno, frame.line or "")
        if folder is None or file.is_relative_to(folder):
            inside = place
        elif file.is_file():
            outside = place
    best = inside or outside
    return user_frame(error.__cause__, folder) if best is None and error.__cause__ is not None else best


def import_user_file(path: Path) -> ModuleType:
    """Import the user's file. Raises NnscalerError `model_import_failed` with the user's own line."""
    from nnscaler.runtime.program.import_role_and_user_files import load_user_module
    from nnscaler.runtime.program.resolve_shadowed_user_imports import claim_surroundings

    file = path.resolve()
    try:
        return load_user_module(str(path))
    except NnscalerError:
        raise
    except SystemExit as stop:
        place = user_frame(stop, file.parent)
        message = f"{path} calls {exit_call(stop)} when imported"
        raise NnscalerError("model_import_failed", message, place, _of_arguments(stop, place) or GUARD_MAIN) from None
    except Exception as error:
        place = user_frame(error, file.parent) or SourceLocation(str(path), 1)
        help_text = _of_arguments(error, place)
        if isinstance(error, ModuleNotFoundError):
            tried = ", ".join(shown_path(folder) for folder in claim_surroundings(file))
            help_text = f"looked for it in {tried}, and among the installed packages"
        message = f"cannot import {path.name}: {in_one_line(error)}"
        raise NnscalerError("model_import_failed", message, place, help_text) from error


def _of_arguments(error: BaseException, place: SourceLocation | None) -> str | None:
    """Return a hint for code that reads the command line, which is nnscaler's: it is shown one without arguments."""
    frames = traceback.extract_tb(error.__traceback__)
    parses = any(Path(frame.filename).name in ("argparse.py", "optparse.py", "getopt.py") for frame in frames)
    if not parses and "argv" not in (place.text if place is not None else ""):
        return None
    return f"the command line is nnscaler's, and this code sees none: give every argument a default, or {GUARD_MAIN}"


_META = """build it without data, on the meta device, for plans and proofs:

        def build_model():
            with torch.device("meta"):
                return ...

  `nnscaler plan`, `nnscaler compile` and `nnscaler verify-plan --level static` take such a model; for a run, name a
  factory of a smaller one: model.py::small_model"""
_SMALLER_BATCH = "return a smaller batch: what is proved holds for other sizes too, and the report says for which"


def _function(module: ModuleType, path: Path, name: str) -> Callable[[], Any]:
    found = getattr(module, name, None)
    if callable(found):
        return found  # type: ignore[no-any-return]
    others = [n for n, v in vars(module).items() if inspect.isfunction(v) and v.__module__ == module.__name__]
    known = f" (it defines {', '.join(others)})" if others else ""
    hint = ""
    if name not in ("build_model", "sample_inputs"):
        close = (get_close_matches(name, others, n=1) or others)[:1]
        hint = f"did you mean {path.name}::{close[0]}?" if close else f"define {name}() in {path.name}"
    raise NnscalerError(
        "model_incomplete",
        f"{path} has no function {name}(){known}",
        help=hint or f"a model file looks like this:\n\n{indent(TEMPLATE.rstrip(), ' ' * 4)}",
    )


def _called(function: Callable[[], Any], path: Path, seed: int | None, what: str) -> Any:
    from nnscaler.runtime.program.import_role_and_user_files import without_arguments

    if seed is not None:
        seed_generators(seed)
    try:
        with without_arguments(str(path)):
            return function()
    except NnscalerError:
        raise
    except (Exception, SystemExit) as error:
        place = user_frame(error, path.resolve().parent)
        if isinstance(error, MemoryError) or re.search("(can't|cannot) allocate memory|out of memory", str(error)):
            help = _SMALLER_BATCH if what.startswith("sample_inputs") else _META
            message = f"{what} of {path.name} runs out of memory: {in_one_line(error)}"
            raise NnscalerError("out_of_memory", message, place, help) from error
        message = f"{what} of {path.name} raises {in_one_line(error)}"
        raise NnscalerError("model_raised", message, place, _of_arguments(error, place)) from error


def seed_generators(seed: int) -> None:
    """Seed what users' files draw random numbers from."""
    if seed not in SEEDS:
        raise NnscalerError("usage", f"seed {seed} has more than 63 bits, and torch takes no larger one")
    seed_all(seed)
