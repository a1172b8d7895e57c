"""Defaults of `verify-op` and `verify-plan` that a project sets: `[tool.nnscaler]` in the nearest pyproject.toml.

    [tool.nnscaler]
    seed = 7                       # of both, and of the gate
    [tool.nnscaler.verify-op]
    timeout = "90s"
    [tool.nnscaler.verify-plan]
    ranks = 8

The command line goes before NNSCALER_SEED and the like, those before the file, and that before the default.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from nnscaler.config import SHARED, Document, Key, find_pyproject, read_document, read_table, value_of_variable
from verify.programs.request import BACKENDS

_SEED, _TIMEOUT = Key("seed", "integer"), Key("timeout", "seconds")
COMMANDS: Mapping[str, tuple[Key, ...]] = MappingProxyType(
    {
        "verify-op": (_SEED, _TIMEOUT, Key("jobs", "count")),
        "verify-plan": (
            _SEED,
            _TIMEOUT,
            Key("ranks", "count"),
            Key("backend", "text", choices=BACKENDS),
        ),
    }
)
TARGETS = (Key("modules", "texts"), Key("files", "texts"))  # of verify-op: `verify.operators.run.targets` reads them
_IMPLY_RANKS = ("--plan", "--program")
_HELP = ("-h", "--help")


def command_defaults(words: Sequence[str], environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the defaults for a command line, by the names of options. Raises NnscalerError `bad_settings`.

    A plan or a program has ranks of its own: beside them those of the settings do not count.
    """
    command = words[0] if words else ""
    if command not in COMMANDS or any(word in _HELP for word in words):
        return {}
    keys = COMMANDS[command]
    file = find_pyproject()
    found = {} if file is None else _of_file(read_document(file), command, keys)
    for key in keys:
        variable = f"NNSCALER_{'' if key == _SEED else command.replace('-', '_').upper() + '_'}{key.name.upper()}"
        if environment.get(variable):
            found[key.name] = value_of_variable(key, variable, environment[variable])
    if any(word.partition("=")[0] in _IMPLY_RANKS for word in words):
        found.pop("ranks", None)
    return found


def _of_file(document: Document, command: str, keys: Sequence[Key]) -> dict[str, Any]:
    shared = read_table(document, ("tool", "nnscaler"), SHARED)
    more = TARGETS if command == "verify-op" else ()
    table = read_table(document, ("tool", "nnscaler", command), (*keys, *more))
    values = {"seed": shared["seed"]} if "seed" in shared else {}
    return values | {name: value for name, value in table.items() if name not in ("modules", "files")}
