"""A request to verify programs of others, as plain values.

The command line, the settings of a gate, a `reproduce` token and Python each make an `ExternalRequest` and hand it to
`verify.external.verify_request.verify_external_request`. What its target leads to is an `ExternalProgram`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from shlex import quote, split
from typing import Any, Literal

from nnscaler.errors import NnscalerError
from nnscaler.ir.mixed_precision_dtypes import FLOATS
from nnscaler.model_file import find_target
from verify.programs.request import Level
from verify.results.request_tokens import RequestToken, RequestWords, Source, WordKind

EXECUTORS = ("simulator", "gloo", "both")
REFERENCES = ("whole", "parts")
EXAMPLE = "nnscaler verify-external path/to/check.py"
LIBRARY = "hf:"  # begins a target that is a model of the installed transformers
DEFAULT_RANKS = 2
TIMEOUT = 120.0  # seconds
SIZES = ("tp", "ep", "fsdp", "pp")  # of plans of a library's models
_OF_THE_LIBRARY = (*SIZES, "settings", "sweep_flags", "emit_script")
_NOT_OF_A_SCRIPT = ("mesh", "executor", "dtypes", "checkpoint", "level", *_OF_THE_LIBRARY)
_NOT_OF_THE_LIBRARY = ("ranks", "mesh", "reference")
_NOT_OF_A_FILE = (*_OF_THE_LIBRARY, "reference")
Kind = Literal["file", "library", "script"]


@dataclass(frozen=True)
class ExternalRequest:
    """Name programs and what is verified of them, by paths and values; `dataclasses.asdict` gives what JSON can hold.

    target       `check.py`, `check.py::parallelize`, `package.module:parallelize`, `hf:TYPE` or `hf:all`; empty where
                 `script` is given
    script       the words of a script that is started once per rank, as torchrun does: "train.py --size 4"
    ranks        how many; None: what the mesh says, else 2. Plans of a library have sizes instead
    mesh         axes with their sizes, outermost first: "dp=2,tp=2"; None: what the file says
    executor     simulator (threads), gloo (processes), or both
    seed         of parameters and batches
    steps        of the optimizer, at least 1
    reference    what a script must equal: "whole", itself on one rank with the rows of all ranks; "parts", or the mean
                 over the data parts, each by itself
    dtypes       of the runs; float64 compares up to rounding, the others up to the model's own noise in them
    checkpoint   save, load under another mesh, and compare
    level        static: prove the traced program, run nothing; run: the other way round
    timeout      seconds of the run of one program
    tp, ep, fsdp, pp
                 sizes of a library's plan; several: each of them by itself. Empty: 1
    settings     "key=value" of the configuration
    sweep_flags  also each flag of the configuration that adds or removes parameters
    emit_script  a file for the minimal script of what is refuted, without any of our code
    """

    target: str = ""
    script: str | None = None
    ranks: int | None = None
    mesh: str | None = None
    executor: str = "simulator"
    seed: int = 0
    steps: int = 2
    reference: str = "whole"
    dtypes: tuple[str, ...] = ("float64",)
    checkpoint: bool = False
    level: Level = "all"
    timeout: float = TIMEOUT
    tp: tuple[int, ...] = ()
    ep: tuple[int, ...] = ()
    fsdp: tuple[int, ...] = ()
    pp: tuple[int, ...] = ()
    settings: tuple[str, ...] = ()
    sweep_flags: bool = False
    emit_script: str | None = None

    @property
    def kind(self) -> Kind:
        """Return what is named: a check file, a model of the library, or a script."""
        if self.script is not None:
            return "script"
        return "library" if self.target.startswith(LIBRARY) else "file"

    @property
    def name(self) -> str:
        """Return what is verified, in short: the target, or the script's words."""
        return self.target if self.script is None else self.script


def check_values(request: ExternalRequest) -> None:
    """Check what can be said of the values without any file. Raises NnscalerError `usage`, and `bad_mesh`."""
    if request.script is None and not request.target:
        help = "nnscaler verify-external check.py, or hf:llama, or --torchrun 'train.py'"
        raise NnscalerError("usage", "nothing is named that could be verified", help=help)
    if request.script is not None and request.target:
        message = f"both {request.target!r} and the script {request.script!r} are named"
        raise NnscalerError("usage", message, help="leave one of them away")
    _check_choices(request)
    others = {"file": _NOT_OF_A_FILE, "library": _NOT_OF_THE_LIBRARY, "script": _NOT_OF_A_SCRIPT}[request.kind]
    plain = ExternalRequest()
    for name in others:
        if getattr(request, name) != getattr(plain, name):
            raise NnscalerError("usage", f"{option(name)} is not for {_KINDS[request.kind]}", help=_HELP[request.kind])
    if request.mesh is not None:
        read_mesh(request.mesh)
    for text in request.settings:
        read_setting(text)


_KINDS = {"file": "a check file", "library": "a model of transformers", "script": "a script"}
_HELP = {
    "file": "it goes with hf:TYPE, a model of transformers",
    "library": "--tp, --ep, --fsdp and --pp say how many ranks there are: --tp 2 --fsdp 2",
    "script": "a script lays out its ranks itself, and runs as processes over gloo, in float64 where it can",
}


def option(name: str) -> str:
    """Return the option of the command line for a field."""
    return {"settings": "--set", "dtypes": "--dtype"}.get(name, f"--{name.replace('_', '-')}")


def _check_choices(request: ExternalRequest) -> None:
    if request.executor not in EXECUTORS:
        raise NnscalerError("usage", f"executor {request.executor!r} is none of {', '.join(EXECUTORS)}")
    wrong = [dtype for dtype in request.dtypes if dtype not in FLOATS]
    if wrong or not request.dtypes:
        raise NnscalerError("usage", f"dtype {wrong[0] if wrong else 'none'} is none of {', '.join(FLOATS)}")
    if len(set(request.dtypes)) < len(request.dtypes):
        raise NnscalerError("usage", f"a dtype is named twice: {', '.join(request.dtypes)}")
    if request.reference not in REFERENCES:
        raise NnscalerError("usage", f"reference {request.reference!r} is none of {', '.join(REFERENCES)}")
    if request.steps < 1 or (request.ranks is not None and request.ranks < 1):
        raise NnscalerError("usage", "at least one step and one rank are needed")
    if any(size < 1 for name in SIZES for size in getattr(request, name)):
        raise NnscalerError("usage", "--tp, --ep, --fsdp and --pp are at least 1")
    if request.level == "static" and (request.checkpoint or request.dtypes != ("float64",)):
        given = "--checkpoint" if request.checkpoint else f"--dtype {' '.join(request.dtypes)}"
        raise NnscalerError("usage", f"{given} is about a run, and --level static runs nothing", help="--level all")


def read_setting(text: str) -> tuple[str, str]:
    """Return key and value of "key=value". Raises NnscalerError `usage`."""
    key, equals, value = text.partition("=")
    if not key.strip() or not equals:
        raise NnscalerError("usage", f"--set {text!r} is no key=value", help="--set attention_bias=true")
    return key.strip(), value.strip()


def read_mesh(text: str) -> tuple[tuple[str, int], ...]:
    """Return the axes of "dp=2,tp=2"; a size of -1 stands for the ranks that are left. Raises NnscalerError
    `bad_mesh`."""
    found: list[tuple[str, int]] = []
    for part in text.split(","):
        name, equals, size = (word.strip() for word in part.partition("="))
        number = int(size) if size.removeprefix("-").isdecimal() else 0
        if not name or not equals or (number < 1 and number != -1):
            message = f"{part.strip()!r} of the mesh {text!r} is no axis with a size"
            raise NnscalerError("bad_mesh", message, help="--mesh dp=2,tp=2, outermost first")
        found.append((name, number))
    return sized(found, None, f"the mesh {text!r}") if all(size > 0 for _, size in found) else tuple(found)


def sized(axes: list[tuple[str, int]], ranks: int | None, what: str) -> tuple[tuple[str, int], ...]:
    """Return the axes with the one size of -1 filled in. `ranks`: what the product must be; None: any.

    Raises NnscalerError `bad_mesh` where it is another one, or cannot be.
    """
    names = [name for name, _ in axes]
    if len(set(names)) < len(names):
        message = f"{what} names an axis twice: {', '.join(names)}"
        raise NnscalerError("bad_mesh", message, help="give each axis a name of its own")
    open_axes = [name for name, size in axes if size == -1]
    if len(open_axes) > 1:
        message = f"{what} leaves the sizes of several axes open: {', '.join(open_axes)}"
        raise NnscalerError("bad_mesh", message, help="-1 stands for the ranks that are left, on one axis")
    product = prod(abs(size) for _, size in axes)
    if open_axes:
        assert ranks is not None, "an open size takes the ranks that are left"
        if ranks % product:
            message = f"{what} leaves {open_axes[0]} open, and its other sizes ({product}) do not divide {ranks} ranks"
            raise NnscalerError("bad_mesh", message, help=f"--ranks {product * max(1, ranks // product)}, for one")
        return tuple((name, ranks // product if size == -1 else size) for name, size in axes)
    if ranks is not None and product != ranks:
        told = " x ".join(f"{name}={size}" for name, size in axes)
        message = f"{what} is for {product} ranks ({told}), and there are {ranks}"
        raise NnscalerError("bad_mesh", message, help=f"--ranks {product}, or another --mesh")
    return tuple(axes)


# The token of a request, `nns3:...`.

_CONFIGURATION = "config.json"  # of a local folder with a model's configuration


def _again(request: Mapping[str, Any]) -> str:
    script = request["script"]
    target = request["target"].partition("::")[0]
    return f"verify-external {quote(target) if script is None else f'--torchrun {quote(script)}'}"


_KIND = WordKind("nns3:", "verify-external", 1 << 20, "which may run another program")
WORDS = RequestWords(_KIND, ExternalRequest, _again)


def make_token(request: ExternalRequest) -> RequestToken:
    """Return the token of a request. Raises NnscalerError `no_such_file`."""
    request = replace(request, emit_script=None)
    if request.kind == "script":
        file = script_file(request.script or "")
        return RequestToken.of(request, () if file is None else (Source.of(file),))
    if request.kind == "library":
        file = Path(request.target.removeprefix(LIBRARY)) / _CONFIGURATION
        sources = (Source.of(file),) if file.is_file() else ()
        return RequestToken.of(request, sources, ("torch", "transformers"))
    file, function = find_target(request.target)
    source = Source.of(file)
    target = f"{source.path}::{function}" if function else source.path
    return RequestToken.of(replace(request, target=target), (source,))


def script_file(script: str) -> Path | None:
    """Return the Python file among a script's words; None where none of them is one, as with `-m module`."""
    return next((Path(word) for word in split(script) if word.endswith(".py") and Path(word).is_file()), None)


def words_of_script(script: str) -> tuple[str, ...]:
    """Return what follows torchrun's own options: a file or `-m` and a module, and the script's arguments.

    Raises NnscalerError `usage`, `no_such_file`.
    """
    help = "--torchrun 'train.py --size 4', or '-m package.module'"
    try:
        words = split(script)
    except ValueError as error:
        raise NnscalerError("usage", f"the script {script!r} cannot be read: {error}", help=help) from None
    if not words:
        raise NnscalerError("usage", "--torchrun names no script", help=help)
    after = "write what follows torchrun's own options: --torchrun 'train.py --lr 0.1'"
    if words[0] == "-m":
        if len(words) < 2:
            raise NnscalerError("usage", "-m names no module", help=after)
        return tuple(words)
    if words[0].startswith("-") or words[0] == "torchrun":
        raise NnscalerError("usage", f"--torchrun begins with {words[0]!r}, which is no script", help=after)
    if script_file(script) is None:
        raise NnscalerError("no_such_file", f"there is no script {words[0]!r}", help=help)
    if not Path(words[0]).is_file():
        named = "name the script that torchrun starts"
        raise NnscalerError("no_such_file", f"there is no file {words[0]!r}", help=named)
    return tuple(words)
