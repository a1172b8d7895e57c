"""`[tool.nnscaler.gate]` and `[[tool.nnscaler.external]]`: what to verify, how long it may take, and what is known.

The command line goes before the environment, that before the file, and that before the default. Every setting knows
where it came from.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import join, split
from typing import Any

from nnscaler.errors import NnscalerError
from nnscaler.ir.mixed_precision_dtypes import FLOATS
from nnscaler.model_file import find_target
from nnscaler.plan_source import schedule_file
from nnscaler.planning.auto_plan_request import parse_auto
from nnscaler.pyproject_settings import (
    SHARED,
    Document,
    Key,
    KeyPath,
    find_pyproject,
    read_document,
    read_table,
    spelled,
    value_of_variable,
)
from verify.external.request import EXECUTORS, LIBRARY, SIZES, ExternalRequest, check_values
from verify.gate.items import ExternalItem, Item, OpItem, OpSource, Option, PlanItem, SourceKind, check_names, item_name
from verify.programs.request import BACKENDS, PlanRequest

TABLE: KeyPath = ("tool", "nnscaler", "gate")
EXTERNAL: KeyPath = ("tool", "nnscaler", "external")
EXAMPLE = """\
[tool.nnscaler.gate]
budget = "120s"

[[tool.nnscaler.gate.models]]
model = "model.py"
plans = [{ ranks = 4, plan = "dp=2,tp=2" }]

[tool.nnscaler.gate.ops]
files = ["my_ops.py"]"""
DEFAULTS: Mapping[str, Any] = {
    "budget": None,
    "baseline": None,
    "seed": 0,
    "op-timeout": 60.0,
    "plan-timeout": 300.0,
    "jobs": None,
    "cache": True,
}
_GATE = (
    Key("budget", "seconds"),
    Key("baseline", "text"),
    Key("seed", "seed"),
    Key("op-timeout", "seconds"),
    Key("plan-timeout", "seconds"),
    Key("jobs", "count"),
    Key("cache", "flag"),
    Key("models", "tables"),
    Key("ops", "table"),
)
_MODEL = (Key("model", "text", required=True), Key("plans", "tables", required=True), Key("timeout", "seconds"))
_PLAN = (
    Key("name", "text"),
    Key("ranks", "count"),
    Key("plan", "text"),
    Key("cluster", "text"),
    Key("memory", "text"),
    Key("constraints", "text"),
    Key("profile", "text"),
    Key("optimizer-bytes", "integer"),
    Key("schedule", "text"),
    Key("micro-batches", "count"),
    Key("replicate", "texts"),
    Key("loss-fn", "text"),
    Key("specialise", "flag"),
    Key("precision", "text"),
    Key("dtype", "text", choices=FLOATS),
    Key("backend", "text", choices=BACKENDS),
    Key("steps", "count"),
    Key("depth", "text", choices=("quick", "default", "deep")),
    Key("train", "flag"),
    Key("train-steps", "count"),
    Key("optimizer", "text"),
    Key("seed", "seed"),
    Key("timeout", "seconds"),
)
_OPS = (
    Key("names", "texts"),
    Key("files", "texts"),
    Key("modules", "texts"),
    Key("user", "flag"),
    Key("seed", "seed"),
    Key("timeout", "seconds"),
)
_EXTERNAL = (
    Key("target", "text"),
    Key("torchrun", "text"),
    Key("name", "text"),
    Key("ranks", "count"),
    Key("mesh", "text"),
    Key("executor", "text", choices=EXECUTORS),
    Key("steps", "count"),
    Key("dtype", "texts"),
    Key("checkpoint", "flag"),
    Key("level", "text", choices=("all", "static", "run")),
    *(Key(name, "counts") for name in SIZES),
    Key("set", "texts"),
    Key("sweep-flags", "flag"),
    Key("seed", "seed"),
    Key("timeout", "seconds"),
)
SHARE = 0.8  # of an item's time that the run of its program may take: what hangs is better told by the run itself
_APART = ("name", "timeout", "seed")  # keys of an item that are no options of its command, or stand beside them
_FIELDS = {"dtype": "dtypes", "set": "settings"}  # of an ExternalRequest, where they are not called as the key is
_FILES = ("loss-fn", "constraints", "profile")
_SOURCES: tuple[tuple[str, SourceKind], ...] = (("names", "name"), ("files", "file"), ("modules", "module"))


@dataclass(frozen=True)
class Setting:
    """A value and where it came from: "--budget", "NNSCALER_BUDGET", "pyproject.toml:12" or "default"."""

    name: str
    value: Any
    source: str


@dataclass(frozen=True)
class GateSettings:
    """
    folder    of the file: its paths are relative to it
    values    the settings that the command line and the environment may replace, by name
    """

    file: Path
    values: Mapping[str, Setting]
    plans: tuple[PlanItem, ...] = ()
    external: tuple[ExternalItem, ...] = ()
    sources: tuple[OpSource, ...] = ()

    @property
    def folder(self) -> Path:
        return self.file.resolve().parent

    @property
    def user_operators(self) -> OpSource | None:
        """The source that asks for all operators of the models; None where nothing does."""
        return next((source for source in self.sources if source.kind == "user"), None)

    def get(self, name: str) -> Any:
        """Return the value of a setting."""
        return self.values[name].value

    @property
    def baseline(self) -> Path | None:
        """The file of known findings; relative to the settings' folder, or to the current one from elsewhere."""
        setting = self.values["baseline"]
        if setting.value is None:
            return None
        from_file = setting.source.startswith(self.file.name)
        return (self.folder if from_file else Path.cwd()) / str(setting.value)


def read_settings(
    file: Path | None = None, asked: Mapping[str, Any] | None = None, environment: Mapping[str, str] | None = None
) -> GateSettings:
    """Return the settings of `file`, else of the nearest pyproject.toml. `asked`: what the command line says, by the
    names of DEFAULTS; None stands for not said.

    Raises NnscalerError `nothing_named` where nothing is to be verified, and `bad_settings` for a wrong setting.
    """
    given = environment or {}
    if file is None and "NNSCALER_CONFIG" in given:
        file = Path(given["NNSCALER_CONFIG"])
    found = file or find_pyproject()
    if found is None:
        raise NnscalerError("nothing_named", "there is no pyproject.toml: the gate has nothing to verify", help=_help())
    document = read_document(found)
    read_table(document, TABLE[:2], SHARED)
    table = read_table(document, TABLE, _GATE)
    if document.value(TABLE) is None and document.value(EXTERNAL) is None:
        raise NnscalerError("nothing_named", f"{found} has no table [tool.nnscaler.gate]", help=_help())
    values = {name: _resolve(name, document, table, asked or {}, given) for name in DEFAULTS}
    plans = _plans(document, table, values)
    external = _externals(document, values)
    sources = _sources(document, table, values, plans)
    if not plans and not sources and not external:
        message = "[tool.nnscaler.gate] names neither models nor ops, and there is no [[tool.nnscaler.external]]"
        raise document.error(TABLE, f"{message}: the gate has nothing to verify", _help())
    return GateSettings(found, values, plans, external, sources)


def _help() -> str:
    return "in pyproject.toml:\n\n" + "\n".join(f"    {line}".rstrip() for line in EXAMPLE.splitlines())


def _resolve(
    name: str, document: Document, table: Mapping[str, Any], asked: Mapping[str, Any], environment: Mapping[str, str]
) -> Setting:
    if asked.get(name) is not None:
        return Setting(name, asked[name], "--no-cache" if name == "cache" else f"--{name}")
    variable = f"NNSCALER_{name.upper().replace('-', '_')}"
    if environment.get(variable):
        key = next(key for key in _GATE if key.name == name)
        return Setting(name, value_of_variable(key, variable, environment[variable]), variable)
    path: KeyPath = (*TABLE, name)
    if name == "seed" and name not in table:
        shared = document.value((*TABLE[:2], name))
        if shared is not None:
            return Setting(name, shared, _told(document, (*TABLE[:2], name)))
    if name in table:
        return Setting(name, table[name], _told(document, path))
    return Setting(name, DEFAULTS[name], "default")


def _told(document: Document, path: KeyPath) -> str:
    return f"{document.file.name}:{document.place(path).line}"


def _plans(document: Document, table: Mapping[str, Any], values: Mapping[str, Setting]) -> tuple[PlanItem, ...]:
    folder = document.file.resolve().parent
    items: list[PlanItem] = []
    for number in range(len(table.get("models", ()))):
        path: KeyPath = (*TABLE, "models", number)
        model = read_table(document, path, _MODEL)
        if not model["plans"]:
            raise document.error((*path, "plans"), f"plans of {spelled(path)} is empty", "plans = [{ ranks = 2 }]")
        for index in range(len(model["plans"])):
            entry = read_table(document, (*path, "plans", index), _PLAN)
            items.append(_plan(document, (*path, "plans", index), model, entry, folder, values))
    check_names(items)
    return tuple(items)


def _options(entry: Mapping[str, Any]) -> dict[str, Option]:
    return {k: tuple(value) if isinstance(value, list) else value for k, value in entry.items() if k not in _APART}


def _plan(
    document: Document,
    path: KeyPath,
    model: Mapping[str, Any],
    entry: Mapping[str, Any],
    folder: Path,
    values: Mapping[str, Setting],
) -> PlanItem:
    options = _options(entry)
    plan = options.get("plan")
    if "ranks" not in options and not (isinstance(plan, str) and "=" in plan):
        raise document.error(path, f"{spelled(path)} lacks ranks, a whole number of at least 1", "{ ranks = 4 }")
    told = {**options, **({"seed": entry["seed"]} if "seed" in entry else {})}
    files = [key for key in _FILES if key in options]
    files += ["plan"] if isinstance(plan, str) and "=" not in plan and parse_auto(plan) is None else []
    files += ["schedule"] if schedule_file(str(options.get("schedule", ""))) is not None else []
    files += ["cluster"] if str(options.get("cluster", "")).endswith(".toml") else []
    options |= {key: from_here(folder, str(options[key])) for key in files}
    timeout = entry.get("timeout") or model.get("timeout") or values["plan-timeout"].value
    fields: dict[str, Any] = {key.replace("-", "_"): value for key, value in options.items()}
    request = PlanRequest(
        model=_model(folder, model["model"]),
        seed=entry.get("seed", values["seed"].value),
        timeout=max(1.0, SHARE * timeout),
        **fields,
    )
    return PlanItem(entry.get("name") or item_name(model["model"], told), request, timeout)


def _externals(document: Document, values: Mapping[str, Setting]) -> tuple[ExternalItem, ...]:
    entries = document.value(EXTERNAL) or []
    paths: list[KeyPath] = [(*EXTERNAL, number) for number in range(len(entries))]
    return tuple(_external(document, path, read_table(document, path, _EXTERNAL), values) for path in paths)


def _external(
    document: Document, path: KeyPath, entry: Mapping[str, Any], values: Mapping[str, Setting]
) -> ExternalItem:
    folder = document.file.resolve().parent
    options = _options(entry)
    target, script = str(options.pop("target", "")), options.pop("torchrun", None)
    told = {**options, **({"seed": entry["seed"]} if "seed" in entry else {})}
    timeout = entry.get("timeout") or values["plan-timeout"].value
    fields: dict[str, Any] = {_FIELDS.get(key, key.replace("-", "_")): value for key, value in options.items()}
    try:
        request = ExternalRequest(
            target=target if target.startswith(LIBRARY) or not target else _model(folder, target),
            script=None if script is None else _script(folder, str(script)),
            seed=entry.get("seed", values["seed"].value),
            timeout=max(1.0, SHARE * timeout),
            **fields,
        )
        check_values(request)
    except NnscalerError as error:
        raise document.error(path, f"{spelled(path)}: {error.message}", error.help) from None
    return ExternalItem(entry.get("name") or item_name(target or str(script), told), request, timeout)


def _script(folder: Path, text: str) -> str:
    """Return a script's words; its file is relative to the settings."""
    try:
        words = split(text)
    except ValueError as error:
        raise NnscalerError("usage", f"torchrun {text!r} cannot be read: {error}") from None
    return join([from_here(folder, words[0]), *words[1:]]) if words and words[0].endswith(".py") else text


def _sources(
    document: Document, table: Mapping[str, Any], values: Mapping[str, Setting], plans: tuple[PlanItem, ...]
) -> tuple[OpSource, ...]:
    path: KeyPath = (*TABLE, "ops")
    ops = read_table(document, path, _OPS)
    folder = document.file.resolve().parent
    seed = ops.get("seed", values["seed"].value)
    timeout = ops.get("timeout") or values["op-timeout"].value
    found = [
        OpSource(kind, from_here(folder, text) if _is_file(kind, text) else text, (), seed, timeout)
        for key, kind in _SOURCES
        for text in ops.get(key, ())
    ]
    if ops.get("user"):
        if not plans:
            raise document.error((*path, "user"), "user = true takes the operators of the models, and there are none")
        files = tuple(dict.fromkeys(str(plan.request.model).partition("::")[0] for plan in plans))
        found.append(OpSource("user", "", files, seed, timeout))
    if "ops" in table and not found:
        raise document.error(path, "[tool.nnscaler.gate.ops] names no operator", 'files = ["my_ops.py"]')
    return tuple(found)


def _is_file(kind: SourceKind, text: str) -> bool:
    return kind == "file" or text.partition("::")[0].endswith(".py")


def _model(folder: Path, text: str) -> str:
    """Return the file and factory that the settings mean. That there is none the item itself says, when it runs."""
    try:
        file, factory = find_target(text, folder=folder)
    except NnscalerError:
        return from_here(folder, text) if text.partition("::")[0].endswith(".py") else text
    return from_here(folder, f"{file}::{factory}" if factory else str(file))


def from_here(folder: Path, text: str) -> str:
    """Return a path of the settings, with what follows `::`, relative to the current folder where it is inside."""
    path, separator, rest = text.partition("::")
    absolute = os.path.abspath(folder / path)
    inside = Path(absolute).is_relative_to(Path.cwd().resolve())
    return (Path(os.path.relpath(absolute)).as_posix() if inside else absolute) + separator + rest


def all_items(settings: GateSettings, operators: Sequence[OpItem]) -> list[Item]:
    """Return plans, programs of others and operators, in the order of the settings."""
    return [*settings.plans, *settings.external, *operators]
