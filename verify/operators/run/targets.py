"""Find the operators that a command line names: targets, `--all`, `--module`, and the project's settings."""

from __future__ import annotations

import pkgutil
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any

from op_registry.builtin import SPECS
from op_registry.registry import default_registry
from op_registry.spec import OperatorSpec

from nnscaler.errors import NnscalerError, SourceLocation
from nnscaler.pyproject_settings import find_pyproject
from verify.evidence.inputs.find_operator import matching, near_misses, registered_at, registered_in
from verify.evidence.inputs.import_user_code import import_module
from verify.operators.run.job import Job, make_job

# `[tool.nnscaler.verify-op]` of the nearest pyproject.toml: what `nnscaler verify-op` verifies when nothing is
# named.
# [tool.nnscaler.verify-op] modules = ["my_package.ops"] files = ["kernels/attention.py"]

KEYS = ("modules", "files")
OPTIONS = ("seed", "timeout", "jobs")  # defaults of the command line, which `nnscaler.cli.options` reads
_EXAMPLE = '[tool.nnscaler.verify-op]\n        modules = ["my_package.ops"]'


@dataclass(frozen=True, slots=True)
class Project:
    """`folder` holds the pyproject.toml; `files` are below it."""

    folder: Path
    modules: tuple[str, ...] = ()
    files: tuple[Path, ...] = ()


def read_project() -> Project:
    """Read the project's settings.

    Raises NnscalerError `nothing_named` where no file or no table is there, and `bad_settings` for a wrong one.
    """
    file = find_pyproject()
    if file is None:
        raise NnscalerError("nothing_named", "no operator is named, and there is no pyproject.toml", help=_help(""))
    try:
        document = tomllib.loads(file.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise NnscalerError("bad_settings", f"cannot read {file}: {error}") from None
    table: Any = document
    for key in ("tool", "nnscaler", "verify-op"):
        table = table.get(key) if isinstance(table, dict) else None
    if table is None:
        raise NnscalerError("nothing_named", f"no operator is named, and {file} has no setting for it", help=_help(""))
    return _checked(table, file)


def _checked(table: Any, file: Path) -> Project:
    if not isinstance(table, dict):
        raise _bad(file, "[tool.nnscaler.verify-op] is not a table", "verify-op")
    for key, value in table.items():
        if key in OPTIONS:
            continue
        if key not in KEYS:
            close = get_close_matches(key, KEYS, n=1)
            hint = f"did you mean {close[0]}?" if close else f"the keys are {', '.join(KEYS)}"
            raise _bad(file, f"[tool.nnscaler.verify-op] has no key {key!r}", key, hint)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise _bad(file, f"{key} of [tool.nnscaler.verify-op] is not a list of texts", key, f'{key} = ["..."]')
    project = Project(
        file.parent, tuple(table.get("modules", ())), tuple(file.parent / name for name in table.get("files", ()))
    )
    if not project.modules and not project.files:
        raise _bad(file, "[tool.nnscaler.verify-op] names neither modules nor files", "verify-op", _help(""))
    return project


def _bad(file: Path, message: str, key: str, help: str | None = None) -> NnscalerError:
    lines = file.read_text(encoding="utf-8").splitlines()
    line = next((number for number, text in enumerate(lines, 1) if key in text), 1)
    return NnscalerError("bad_settings", message, SourceLocation(str(file), line, lines[line - 1].strip()), help)


def _help(text: str) -> str:
    return f"{text}nnscaler verify-op TARGET..., --all, --module NAME, or in pyproject.toml:\n        {_EXAMPLE}"


def find_jobs(
    targets: Sequence[str] = (),
    *,
    builtin: bool = False,
    modules: Sequence[str] = (),
    annotation: str | None = None,
    sample_inputs: str | None = None,
    arguments: str | None = None,
    suggest: bool = False,
) -> list[Job]:
    """Return every operator that is named, once, in the order in which it is named; without any, what the project's
    settings name.

    `targets`: see `verify.evidence.inputs.find_operator.matching`. `builtin`: all operators of `op_registry.builtin`.
    `modules`: modules and packages; all that they and their submodules register. `annotation`, and `sample_inputs`,
    the name of a function of the operator's file: for the one operator that is named. `arguments`: hyper-parameters
    (`lr=0.1,momentum=0.9`) of the optimizer that is named. `suggest`: operators without
    annotation are taken too. Raises NnscalerError where something names nothing, or cannot be imported.
    """
    files: Sequence[Path] = ()
    if not targets and not builtin and not modules:
        project = read_project()
        modules, files = project.modules, project.files
        for folder in (project.folder, project.folder / "src"):
            if modules and folder.is_dir() and str(folder) not in sys.path:
                sys.path.append(str(folder))
    for name in modules:  # first, so that targets may name what they register
        import_module(name)
    specs: list[OperatorSpec] = builtin_operators() if builtin else []
    if arguments is not None:
        if len(targets) != 1:
            message = f"--with is for one optimizer, and {len(targets)} targets are named"
            raise NnscalerError("several_operators", message, help="name one: torch.optim.SGD")
        targets = [f"{targets[0]}({arguments})"]
    for target in targets:
        specs += matching(target)
    for name in modules:
        specs += registered_by(name)
    for file in files:
        specs += registered_in(str(file))
    specs = list({spec.name if spec.where is None else (spec.name, spec.where): spec for spec in specs}.values())
    for option, value in (("--annotation", annotation), ("--sample-inputs", sample_inputs)):
        if value is not None and len(specs) != 1:
            names = ", ".join(spec.name for spec in specs[:6])
            message = f"{option} is for one operator, and {len(specs)} are named"
            raise NnscalerError("several_operators", message, help=f"name one of {names}")
    if len(specs) > 1 and not suggest:  # overloads without annotation beside one that has one
        specs = [spec for spec in specs if spec.annotation != ""] or specs
    return [make_job(spec, annotation, sample_inputs, suggest) for spec in specs]


def builtin_operators() -> list[OperatorSpec]:
    """Every operator that comes with an annotation, by name."""
    return sorted(SPECS, key=lambda spec: spec.name)


def registered_by(name: str) -> list[OperatorSpec]:
    """Import a module, or a package with its submodules, and return the operators that they register.

    Raises NnscalerError where there are none.
    """
    module = import_module(name)
    loaded = [module, *(import_module(found) for found in _submodules(module))]
    found = registered_at([file for m in loaded if (file := getattr(m, "__file__", None)) is not None])
    if not found:
        registry = default_registry()
        owners = {spec.target.__module__ for n in registry.names() if (spec := registry.lookup(n)) and spec.target}
        help = near_misses(name, owners) or "@nnscaler.register_op(...) above a function registers it"
        raise NnscalerError("unknown_operator", f"the module {name!r} registers no operator", help=help)
    return found


def _submodules(module: ModuleType) -> list[str]:
    """Return the names of all modules inside a package, but for `__main__`, which is a script."""
    path = getattr(module, "__path__", None)
    if path is None:
        return []
    walked = pkgutil.walk_packages(path, f"{module.__name__}.", onerror=lambda name: None)
    return [found.name for found in walked if not found.name.endswith(".__main__")]
