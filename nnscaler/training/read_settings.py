"""Read the settings of a training run from a TOML file and a command line.

Every field of `TrainSettings` is a key of the file, `checkpoints.folder` one of the table `[checkpoints]`, and an
option of the command, `--checkpoints.folder=runs/a`. A key that is not known is an error with the nearest name. Imports
no torch.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType
from typing import Any

from nnscaler.errors import NnscalerError
from nnscaler.plan_source import CompileRequest, check_plan, ranks_asked
from nnscaler.pyproject_settings import SEEDS, Document, read_document
from nnscaler.training.train_settings import HookSettings, TrainSettings

SHORT: Mapping[str, str] = MappingProxyType(
    {
        "dtype": "precision.dtype",
        "lr": "optimizer.lr",
        "batch_size": "data.batch_size",
        "loss_fn": "loss",
    }
)
_FLOATS = ("", "float64", "float32", "bfloat16", "float16")
_CHOICES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "device": ("auto", "cpu", "cuda"),
        "schedule.per": ("step", "epoch"),
        "checkpoints.best": ("min", "max"),
        **{f"precision.{name}": _FLOATS for name in ("param", "reduce", "output", "dtype")},
    }
)
_LEAST: Mapping[str, int] = MappingProxyType({"accumulation": 1, "data.batch_size": 1, "loggers.every": 1})
_OPEN = ("optimizer", "schedule")  # tables whose other keys are arguments
_CODE = ("loss", "data.collate", "optimizer.name", "schedule.name")  # and hooks: a function or class itself in Python
_WANTED = {"str": "a text", "int": "a whole number", "float": "a number", "bool": "true or false"}


@dataclass(frozen=True)
class Option:
    """A key of the file, and option of the command.

    path     `checkpoints.folder`
    kind     type of its values: str, int, float, bool, texts or table
    default  as it would be written
    help     what it says
    """

    path: str
    kind: str
    default: str
    help: str


def all_options(record: type = TrainSettings, prefix: str = "") -> Iterator[Option]:
    """Yield every option, in order."""
    told = _docs(record)
    for item in fields(record):
        default = _default(item)
        if is_dataclass(default):
            yield from all_options(type(default), f"{prefix}{item.name}.")
        elif item.name != "arguments":
            name = {"tuple": "texts", "dict": "table"}.get(type(default).__name__, type(default).__name__)
            yield Option(prefix + item.name, name, written(default), told[item.name])


def read_settings(file: Path | None, words: Sequence[str] = ()) -> TrainSettings:
    """Return the settings of a file with the options of a command line (`--a.b=value`, or `--a.b value`) in their
    places.

    Files that a TOML file names are relative to its folder, those of the command line to the current one, and so is
    what a run writes. Raises NnscalerError: `no_such_file`, `bad_settings`.
    """
    settings = TrainSettings() if file is None else _read(read_document(file))
    for path, text in _pairs(words):
        settings = _with(settings, path.split("."), path, text)
    check_settings(settings, file)
    return settings


def check_settings(settings: TrainSettings, file: Path | None = None) -> None:
    """Check what no key alone decides. Raises NnscalerError `bad_settings`."""
    of = f"{file}: " if file is not None else ""
    if not settings.model:
        raise _bad(f"{of}`model` is missing", 'model = "model.py", a file with build_model() -> nn.Module')
    if not settings.data.source:
        raise _bad(f"{of}`data.source` is missing", '[data] source = "data.py::datasets", a function that returns data')
    if settings.steps == 0 and settings.epochs == 0:
        raise _bad(f"{of}neither `steps` nor `epochs` says when training ends", "steps = 1000")
    if not settings.clip >= 0:
        raise _bad(f"{of}`clip` is {settings.clip}: no norm is at most that", "clip = 1.0; 0 clips nothing")
    if settings.profiler.last and settings.profiler.last < max(settings.profiler.first, 1):
        raise _bad(f"{of}the profiler's first step is {settings.profiler.first} and its last {settings.profiler.last}")


def compile_request(settings: TrainSettings, ranks: int | None) -> CompileRequest:
    """Return what the settings say of model and plan. Without a plan it is data parallel."""
    search = settings.search
    return CompileRequest(
        model=settings.model or None,
        loss_fn=settings.loss if isinstance(settings.loss, str) and settings.loss else None,
        seed=settings.seed,
        ranks=ranks,
        plan=settings.plan or f"dp={ranks or 1}",
        schedule=settings.pipeline or None,
        micro_batches=settings.micro_batches or None,
        cluster=search.cluster or None,
        memory=search.memory or None,
        constraints=search.constraints or None,
        profile=search.profile or None,
    )


def ranks_of(settings: TrainSettings) -> int:
    """Return how many ranks the run has: as said, else as the plan says, else 1. Checks what can be said of the plan.

    Raises NnscalerError: plan_illegal, usage.
    """
    request = compile_request(settings, settings.ranks or None)
    check_plan(request)
    return ranks_asked(request) or 1


def _read(document: Document) -> TrainSettings:
    record: TrainSettings = _record(TrainSettings, document.content, (), document)
    return _relative(record, document.file.parent)


def settings_of(table: Mapping[str, Any]) -> TrainSettings:
    """Return the settings that keyword arguments give, tables as dicts; None is the default.

    Raises NnscalerError `bad_settings`.
    """
    record: TrainSettings = _record(TrainSettings, _without_none(table), (), None)
    return record


def _without_none(table: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _without_none(value) if isinstance(value, Mapping) and key not in _OPEN else value
        for key, value in table.items()
        if value is not None
    }


def _record(record: type, table: Mapping[str, Any], path: tuple[str, ...], document: Document | None) -> Any:
    """Return the record that a table gives."""

    def error(path: tuple[str, ...], message: str, help: str | None = None) -> NnscalerError:
        return NnscalerError("bad_settings", message, document.place(path) if document is not None else None, help)

    known = {item.name: _default(item) for item in fields(record) if item.name != "arguments"}
    values: dict[str, Any] = {}
    more: dict[str, Any] = {}
    for key, value in table.items():
        here = (*path, key)
        if key not in known:
            if not (path and path[-1] in _OPEN):
                raise error(here, _unknown(here), _elsewhere(key) or _nearest(".".join(here), list(known)))
            more[key] = value
        elif is_dataclass(known[key]):
            if isinstance(value, type(known[key])):
                values[key] = value
                continue
            if not isinstance(value, dict):
                table_help = f"{key} = {{...}}, a dict of its keys" if document is None else None
                raise error(here, f"`{key}` is a table: [{key}]", table_help)
            values[key] = _record(type(known[key]), value, here, document)
        else:
            try:
                values[key] = _checked(".".join(here), known[key], value)
            except NnscalerError as wrong:
                raise error(here, wrong.message, wrong.help) from None
    return record(**values, **({"arguments": more} if more else {}))


def _pairs(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield (path, text) of each option of a command line."""
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--") or word == "--":
            help = f"--{word}" if "=" in word else "options are --name=value"
            raise _bad(f"{word!r} is no option", help)
        name, equals, text = word[2:].partition("=")
        path = name.replace("-", "_")
        path = SHORT.get(path, path)
        if not equals:
            if rest and not rest[0].startswith("--"):
                text = rest.pop(0)
            elif {option.path: option.kind for option in all_options()}.get(path) == "bool":
                text = "true"
            else:
                raise _bad(f"--{name} has no value", f"--{name}=VALUE")
        yield path, text


def _with(record: Any, parts: Sequence[str], path: str, text: str) -> Any:
    """Return the record with one option changed."""
    known = {item.name: getattr(record, item.name) for item in fields(record) if item.name != "arguments"}
    first, *rest = parts
    if first in known and is_dataclass(known[first]) and rest:
        return replace(record, **{first: _with(known[first], rest, path, text)})
    if first in known and isinstance(known[first], Mapping) and rest:
        raise _bad(f"--{path}: groups are given in a file")
    if first in known and not is_dataclass(known[first]) and not rest:
        return replace(record, **{first: _checked(path, known[first], _value(known[first], text))})
    if hasattr(record, "arguments") and not rest:
        return replace(record, arguments={**record.arguments, first: _value(None, text)})
    names = [option.path for option in all_options()]
    raise _bad(f"there is no option --{path}", _nearest(path, [*names, *SHORT], "--"))


def _value(like: Any, text: str) -> Any:
    """Return the value that a text on the command line means, where one such as `like` is wanted; None: any."""
    if isinstance(like, str):
        return text
    if isinstance(like, tuple) and not text.startswith("["):  # a list as files have it, or its items alone
        return [part for part in text.split(",") if part]
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _checked(path: str, like: Any, value: Any) -> Any:
    """Return a value as the record has it. Raises NnscalerError `bad_settings`."""
    if isinstance(like, Mapping):
        if not isinstance(value, Mapping) or not all(isinstance(inner, Mapping) for inner in value.values()):
            raise _bad(f"`{path}` is a table of tables", '"*.bias" = { weight_decay = 0.0 }')
        return value
    if isinstance(like, tuple):
        value = [value] if isinstance(value, str) or callable(value) else value
        if not isinstance(value, list | tuple) or not all(isinstance(item, str) or callable(item) for item in value):
            raise _bad(f"`{path}` is a text or a list of texts, not {value!r}")
        return tuple(value)
    if path in _CODE and callable(value):
        return value
    wanted = type(like)
    if wanted is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, wanted) or (isinstance(value, bool) and wanted is not bool):
        raise _bad(f"`{path}` is {_WANTED[wanted.__name__]}, not {written(value)}")
    if path in _CHOICES and value not in _CHOICES[path]:
        choices = [choice for choice in _CHOICES[path] if choice]
        raise _bad(f"`{path}` is {value!r}", f"one of {', '.join(choices)}")
    if isinstance(value, int | float) and not value >= _LEAST.get(path, 0) and path != "seed":
        raise _bad(f"`{path}` is {value}, and at least {_LEAST.get(path, 0)} is needed")
    if path == "seed" and value not in SEEDS:
        raise _bad(f"`seed` is {value}, which has more than 63 bits: torch takes no larger one")
    return value


# Key -> those that do nothing while it is empty.
_SWITCHES = {
    "schedule.name": ("schedule.per", "schedule.arguments"),
    "checkpoints.folder": ("checkpoints.every", "checkpoints.asynchronous", "checkpoints.keep", "checkpoints.best"),
    "profiler.first": ("profiler.last", "profiler.folder"),
    "weights": ("weights_prefix",),
}


def idle(settings: TrainSettings) -> list[str]:
    """Say which settings do nothing, or do it now and then, since another one is not set, or is."""
    made, default = ({"": s} | {f.name: getattr(s, f.name) for f in fields(s)} for s in (settings, TrainSettings()))

    def value(of: Mapping[str, Any], path: str) -> Any:
        table, _, key = path.rpartition(".")
        return getattr(of[table], key)

    told = []
    for switch, paths in _SWITCHES.items():
        found = [path for path in paths if not value(made, switch) and value(made, path) != value(default, path)]
        table = switch.partition(".")[0]
        named = [f"{table}.{key}" for key in made[table].arguments] if f"{table}.arguments" in found else []
        shown = ", ".join(f"`{name}`" for name in [p for p in found if not p.endswith(".arguments")] + named)
        told += [f"`{switch}` is not set, and without it there is no effect of {shown}"] if found else []
    precision = settings.precision
    given = {name: getattr(precision, name) for name in ("param", "reduce", "output")}
    shown = ", ".join(f"`precision.{n}`" for n, dtype in given.items() if dtype and dtype != precision.dtype)
    if precision.dtype and shown:
        told.append(f"`precision.dtype` is set, and beside it there is no effect of {shown}")
    often, validated = settings.checkpoints.every, settings.validation.every
    if often and validated and often % validated:
        why = f"`checkpoints.every` = {often} is no multiple of `validation.every` = {validated}"
        told.append(f"{why}: a checkpoint of a step without a validation is never the best")
    return told


def _relative(settings: TrainSettings, folder: Path) -> TrainSettings:
    """Return the settings with the files that they name looked for from `folder`."""
    hooks = {
        item.name: tuple(_at(t, folder) for t in getattr(settings.hooks, item.name)) for item in fields(HookSettings)
    }
    search = {name: _at(getattr(settings.search, name), folder) for name in ("cluster", "constraints", "profile")}
    return replace(
        settings,
        model=_at(settings.model, folder),
        weights=str(folder / settings.weights) if settings.weights else "",
        loss=_at(settings.loss, folder),
        plan=_at(settings.plan, folder),
        pipeline=_at(settings.pipeline, folder),
        data=replace(
            settings.data, source=_at(settings.data.source, folder), collate=_at(settings.data.collate, folder)
        ),
        optimizer=replace(settings.optimizer, name=_at(settings.optimizer.name, folder)),
        schedule=replace(settings.schedule, name=_at(settings.schedule.name, folder)),
        search=replace(settings.search, **search),
        hooks=HookSettings(**hooks),
    )


def _at(target: Any, folder: Path) -> Any:
    """Return a target with its file looked for from `folder`; one that names no file there stays as it is."""
    if not isinstance(target, str):
        return target
    name, separator, function = target.partition("::")
    is_path = bool(name) and (name.endswith((".py", ".json", ".toml", ".csv")) or bool(separator))
    return f"{folder / name}{separator}{function}" if is_path else target


def written(value: object) -> str:
    """Return a value as TOML writes it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, Mapping):
        return "{}"
    return str(list(value)) if isinstance(value, tuple) else str(value)


def _default(item: Field[Any]) -> Any:
    return item.default if item.default_factory is MISSING else item.default_factory()


def _docs(record: type) -> dict[str, str]:
    """Return what the docstring of a record says of each field."""
    told: dict[str, str] = {}
    for line in (record.__doc__ or "").splitlines():
        names, _, text = line.strip().partition("  ")
        told.update((name.strip(), text.strip()) for name in names.split(",") if text)
    return told


def _unknown(path: tuple[str, ...]) -> str:
    table = f"[{'.'.join(path[:-1])}]" if len(path) > 1 else "a run"
    return f"{table} has no key {path[-1]!r}"


def _nearest(path: str, names: Sequence[str], mark: str = "") -> str:
    last = {name.rpartition(".")[2]: name for name in names}
    close = get_close_matches(path, names, n=2) or get_close_matches(path.rpartition(".")[2], last, n=1)
    found = [mark + last.get(name, name) for name in close]
    return (
        f"did you mean {' or '.join(found)}?" if found else f"`nnscaler train --help` lists {'them' if mark else 'all'}"
    )


def _elsewhere(key: str) -> str | None:
    """Say in which tables a key is known that was written in another one."""
    found = [SHORT[key]] if key in SHORT else [o.path for o in all_options() if o.path.endswith(f".{key}")]
    return f"did you mean {' or '.join(found)}?" if found else None


def _bad(message: str, help: str | None = None) -> NnscalerError:
    return NnscalerError("bad_settings", message, help=help)
