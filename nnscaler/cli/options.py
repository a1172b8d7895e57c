"""Options that several commands share, with the help that explains them."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from nnscaler.plan_source import CompileRequest
from nnscaler.pyproject_settings import (
    SEEDS,
    SHARED,
    Document,
    Key,
    find_pyproject,
    read_document,
    read_table,
    value_of_variable,
)
from verify.external.request import EXECUTORS, ExternalRequest
from verify.programs.request import BACKENDS, PlanRequest

Request = TypeVar("Request", CompileRequest, PlanRequest, ExternalRequest)

# Defaults of `verify-op`, `verify-plan` and `verify-external` that a project sets: `[tool.nnscaler]` in the nearest
# pyproject.toml.
# [tool.nnscaler] seed = 7 # of both, and of the gate [tool.nnscaler.verify-op] timeout = "90s"
# [tool.nnscaler.verify-plan] ranks = 8
# The command line goes before NNSCALER_SEED and the like, those before the file, and that before the default.

_SEED, _TIMEOUT = Key("seed", "seed"), Key("timeout", "seconds")
COMMANDS: Mapping[str, tuple[Key, ...]] = MappingProxyType(
    {
        "verify-op": (_SEED, _TIMEOUT, Key("jobs", "count")),
        "verify-plan": (
            _SEED,
            _TIMEOUT,
            Key("ranks", "count"),
            Key("backend", "text", choices=BACKENDS),
        ),
        "verify-external": (_SEED, _TIMEOUT, Key("executor", "text", choices=EXECUTORS)),
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


PLAN_HELP = (
    "how to lay the model out: mesh axes such as dp=2,tp=2,pp=2 (any subset; their product is the number of ranks), "
    "with zero=3 for parameters that rest in shards over dp (ZeRO-3, FSDP), cp=2 for ranks that share the tokens of "
    "each sequence, and ep=2 for experts that two ranks of dp divide; a ready policy that `nnscaler list plans` shows, "
    "alone or with its axes (megatron:dp=2,tp=2); a plan.json written by `nnscaler plan` or `nnscaler compile`; or "
    "policy.py::function. Without it, or with auto, the fastest plan for --cluster is searched and shown (auto:h100x8 "
    "is short for --cluster h100x8)"
)
MODEL_HELP = (
    "a Python file with build_model() -> nn.Module and sample_inputs() -> dict or tuple (one global batch); "
    "forward returns a scalar loss. file.py::factory takes another factory, package.module:factory one in a package"
)
SPECIALISE_HELP = "where the model branches on the values of its data, take the branch that the sample batch takes"

TEXT_FORMATS = ("full", "concise")
MACHINE_FORMATS = ("json", "jsonl", "junit", "sarif", "github", "html")
FORMAT_HELP = (
    "full (default) or concise, for people; json, jsonl, junit, sarif or github, for machines; html, a page. "
    "FORMAT=PATH writes to a file, and the text still goes to the screen; may be given several times. In GitHub "
    "Actions (GITHUB_ACTIONS=true) github is added to the default"
)


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """`full`, `concise`, `json`, ..., or `json=PATH`: the report goes to the file and the text still to stdout."""

    name: str
    path: str | None = None


def positive(text: str) -> int:
    """Read a whole number of at least 1."""
    number = _integer(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return number


def bytes_of_an_element(text: str) -> int:
    """Read a whole number that is not negative."""
    number = _integer(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"{text} is negative")
    return number


def seed_number(text: str) -> int:
    """Read a seed of random numbers."""
    number = _integer(text)
    if number not in SEEDS:
        raise argparse.ArgumentTypeError(f"{text} has more than 63 bits, and torch takes no larger seed")
    return number


def seconds(text: str) -> float:
    """Read a positive number of seconds."""
    try:
        number = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds") from None
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a positive number of seconds")
    return number


def output_format(text: str) -> OutputFormat:
    """Parse the value of --output-format."""
    name, equals, path = text.partition("=")
    known = (*TEXT_FORMATS, *MACHINE_FORMATS)
    if name not in known:
        raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(known)}")
    if equals and not path:
        raise argparse.ArgumentTypeError(f"{text!r} has no path after the '='")
    return OutputFormat(name, path or None)


def html_path(text: str) -> OutputFormat:
    """Parse the value of --html, which is short for --output-format html=PATH."""
    if not text:
        raise argparse.ArgumentTypeError("a path is missing")
    return OutputFormat("html", text)


class _AddFormat(argparse.Action):
    """Collects --output-format; refuses two that would be written to one place."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        assert isinstance(values, OutputFormat)
        asked = (*getattr(namespace, self.dest), values)
        paths = [output.path for output in asked if output.path is not None]
        screen = [output.name for output in asked if output.path is None]
        if len({os.path.realpath(path) for path in paths}) < len(paths):
            raise argparse.ArgumentError(self, f"two formats are written to {values.path}")
        if len(screen) > 1 and not (len(screen) == 2 and "github" in screen and set(screen) & set(TEXT_FORMATS)):
            raise argparse.ArgumentError(
                self, f"{' and '.join(screen)} both go to the screen; {values.name}=PATH writes one to a file"
            )
        setattr(namespace, self.dest, asked)


def _integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None


def add_plan_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that decide how the model is laid out."""
    group = parser.add_argument_group("plan")
    group.add_argument(
        "--ranks", type=positive, metavar="N", help="how many ranks (processes, devices) run the program"
    )
    group.add_argument("--plan", metavar="SPEC", help=PLAN_HELP)
    group.add_argument(
        "--schedule",
        metavar="NAME",
        help="order of passes in a pipeline: a name that `nnscaler list schedules` shows; search, for the best order "
        "that is found for the plan's stages, within --memory; search:zb-v, for stages where zb-v has them; orders.csv "
        "as torch.distributed.pipelining writes them, mine.py::function, or a saved plan, whose schedule is taken",
    )
    group.add_argument(
        "--micro-batches", type=positive, metavar="M", help="pieces into which a step's batch is cut for the pipeline"
    )
    group.add_argument(
        "--replicate",
        action="append",
        default=[],
        metavar="PATTERN",
        help="modules left whole on every rank, by name or pattern such as 'lm_head*'; may be given several times",
    )
    group.add_argument(
        "--precision",
        metavar="DTYPE",
        help="mixed precision over parameters that rest as they are: bfloat16, or param=bfloat16,reduce=float32,"
        "output=float32,cast_inputs=false, with FSDP2's meanings (default: what a saved plan says)",
    )
    group.add_argument(
        "--loss-fn",
        metavar="FILE.py::FN",
        help="for a model that returns no loss: fn(outputs, batch) -> scalar. The model is then not given the batch's "
        "labels, nor what its forward has no parameter for",
    )
    group.add_argument(
        "--specialise",
        action="store_true",
        help=SPECIALISE_HELP,
    )


def add_search_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a search: for which machine, and within which limits."""
    group = parser.add_argument_group("search of a plan")
    group.add_argument(
        "--cluster",
        metavar="FILE.toml",
        help="the machine: a description, or the name of a ready one (default: what is found here)",
    )
    group.add_argument("--memory", metavar="80GB", help="of a rank (default: what the cluster says)")
    group.add_argument("--constraints", metavar="FILE.toml", help="what the plan has to keep to: docs/planner.md")
    group.add_argument("--profile", metavar="FILE", help="costs measured by `nnscaler profile`")
    group.add_argument(
        "--optimizer-bytes",
        type=bytes_of_an_element,
        metavar="N",
        help="that the optimizer keeps of an element, also where a plan is named, for what is told of memory "
        "(default: 8, two float32 moments as Adam has them; SGD with momentum: 4)",
    )


def request_of(kind: type[Request], options: argparse.Namespace, **more: Any) -> Request:
    """Return a request: a field has the value of the option that is called so. `more`: of other fields."""
    given = {field.name: getattr(options, field.name, field.default) for field in fields(kind)} | more
    return kind(**{name: _plain(value) for name, value in given.items()})


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else str(value) if isinstance(value, Path) else value


def add_report_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say how the result is shown."""
    group = parser.add_argument_group("output")
    group.add_argument(
        "--output-format",
        type=output_format,
        action=_AddFormat,
        default=(),
        metavar="FORMAT",
        help=FORMAT_HELP,
    )
    group.add_argument(
        "--html",
        type=html_path,
        action=_AddFormat,
        dest="output_format",
        default=(),
        metavar="PATH",
        help="write the report as one page with plots; short for --output-format html=PATH",
    )
    add_verbosity(group)


def add_verbosity(group: argparse._ActionsContainer) -> None:
    """-q, -v and --color."""
    either = group.add_mutually_exclusive_group()
    either.add_argument("-q", "--quiet", action="store_true", help="results only, no progress")
    either.add_argument("-v", "--verbose", action="store_true", help="every detail of the plan and of the run")
    group.add_argument(
        "--color",
        choices=("auto", "always", "never"),
        default="auto",
        help="colour the text (default: auto; NO_COLOR and FORCE_COLOR are obeyed)",
    )


def verbosity(options: argparse.Namespace) -> int:
    """0 quiet, 1 normal, 2 verbose."""
    return 0 if options.quiet else 2 if options.verbose else 1
