"""`nns2:...`: one run of verify-plan as a word, from which `nnscaler reproduce` verifies exactly the same again.

The word packs (`verify.results.packed_word`) the files with their digests, a plan that was read from a file as a
whole, the options, and the versions of nnscaler and torch.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from shlex import join, quote
from typing import Any

from nnscaler.errors import NnscalerError
from nnscaler.model_file import find_target
from nnscaler.plan_source import is_words, plan_text
from verify.programs.request import PlanRequest
from verify.results.packed_word import Damaged, pack, unpack
from verify.results.report import environment

PREFIX = "nns2:"
LONGEST = 60_000  # characters of a word that still fits into a command line
_LARGEST = 1 << 24  # bytes of JSON: a word that unpacks to more is not ours
_HELP = "a finding of `nnscaler verify-plan` ends with the line `reproduce: nnscaler reproduce nns2:...`"
Option = str | int | float | bool | None | list[str]
# the fields of a request that are options of a token; its depth is two flags there, and the rest has a field of its own
_OPTIONS = (
    "ranks", "schedule", "micro_batches", "replicate", "loss_fn", "specialise", "precision", "backend", "steps", "seed",
    "dtype", "timeout", "own_weights", "level", "train", "train_steps", "optimizer", "train_backend", "optimizer_bytes",
)  # fmt: skip
_APART = ("model", "plan", "plan_document", "program", "depth")


@dataclass(frozen=True, slots=True)
class Source:
    """A file, or a folder with a program; `path` is relative to the directory of the run where it lies inside."""

    path: str
    sha256: str

    @staticmethod
    def of(path: str | Path) -> Source:
        """Return the file as it is now. Raises NnscalerError `no_such_file`."""
        absolute = os.path.abspath(path)
        inside = Path(absolute).is_relative_to(Path.cwd())
        return Source(Path(os.path.relpath(absolute)).as_posix() if inside else absolute, digest(Path(absolute)))

    def changed(self) -> bool:
        """Return whether the file's content has changed. Raises NnscalerError `no_such_file` where the file is gone."""
        return digest(Path(self.path)) != self.sha256


@dataclass(frozen=True, slots=True)
class PlanToken:
    """
    model    the model file; `factory` is its function
    plan     what `--plan` said where that is no file of a plan: mesh axes, or the function of `policy`
    policy   the file of a policy function
    document the text of plan.json, where the plan was read from one
    program  the folder of `--program`
    options  every other option that decides what is run, by its name in Python
    """

    model: Source
    factory: str
    plan: str | None
    policy: Source | None
    document: str | None
    program: Source | None
    options: Mapping[str, Option]
    nnscaler: str
    torch: str

    def changes(self) -> list[str]:
        """Return, as sentences, all that has changed since the token was made.

        Raises NnscalerError where a file is gone.
        """
        sources = [source for source in (self.model, self.policy, self.program) if source is not None]
        told = [f"{source.path} was changed since the token was made" for source in sources if source.changed()]
        here = environment()["torch"]
        return told + ([f"found under torch {self.torch}, replayed under {here}"] if self.torch != here else [])


def reproduce_line(request: PlanRequest, command: Sequence[str]) -> str:
    """Return the line that runs the same again; `command`, the present line, where a token would be too long."""
    word = encode(make_token(request))
    return join(command if word is None else ["nnscaler", "reproduce", word])


def make_token(request: PlanRequest) -> PlanToken:
    """Return the token of a request whose ranks and backend are set. Raises NnscalerError `no_such_file`."""
    file, factory = find_target(str(request.model))
    plan, document, policy = request.plan, request.plan_document, None
    if plan is not None and "::" in plan:
        policy = Source.of(plan.partition("::")[0])
    elif plan is not None and not is_words(plan):
        document, plan = plan_text(plan), None
    values = {name: getattr(request, name) for name in _OPTIONS}
    here = environment()
    return PlanToken(
        Source.of(file),
        factory or "build_model",
        plan,
        policy,
        document,
        None if request.program is None else Source.of(request.program),
        {
            **{name: list(value) if isinstance(value, tuple) else value for name, value in values.items()},
            "quick": request.depth == "quick",
            "deep": request.depth == "deep",
        },
        here["nnscaler"],
        here["torch"],
    )


def request_of(token: PlanToken) -> PlanRequest:
    """Return what the token says is to be verified. Raises NnscalerError `bad_token` for options that are not known."""
    given: dict[str, Any] = dict(token.options)
    quick, deep = given.pop("quick", False), given.pop("deep", False)
    known = {field.name for field in fields(PlanRequest)} - set(_APART)
    unknown = sorted(set(given) - known)
    if unknown:
        raise NnscalerError("bad_token", f"the token has options that this nnscaler lacks: {', '.join(unknown)}")
    plan = token.plan
    if token.policy is not None and plan is not None:
        plan = f"{token.policy.path}::{plan.partition('::')[2]}"
    return PlanRequest(
        **{**given, "replicate": tuple(given.get("replicate", ()))},
        model=token.model.path if token.factory == "build_model" else f"{token.model.path}::{token.factory}",
        plan=None if token.document is not None else plan,
        plan_document=token.document,
        program=None if token.program is None else str(Path(token.program.path)),
        depth="quick" if quick else "deep" if deep else "default",
    )


def encode(token: PlanToken) -> str | None:
    """Return the word; None where it would be too long for a command line."""
    word = pack(PREFIX, {"tool": "verify-plan", **asdict(token)})
    return word if len(word) <= LONGEST else None


def decode(text: str) -> PlanToken:
    """Raises NnscalerError `bad_token` for what is no token, or is one of another version of nnscaler."""
    word = "".join(text.split())
    if not word.startswith(PREFIX):
        raise NnscalerError("bad_token", f"{word[:20]!r} is no token: one starts with {PREFIX!r}", help=_HELP)
    here = environment()["nnscaler"]
    try:
        document = unpack(PREFIX, word, _LARGEST)
        found = str(document["nnscaler"])
        if found == here:
            return _token(document)
        model, ranks = document["model"]["path"], document["options"]["ranks"]
    except (Damaged, KeyError, TypeError, ValueError, AttributeError):
        raise NnscalerError("bad_token", "the token is damaged: it must be copied whole", help=_HELP) from None
    message = f"the token is of nnscaler {found}, and this is nnscaler {here}, which may compile another program"
    again = f"nnscaler verify-plan {quote(model)} --ranks {ranks} ..."
    raise NnscalerError("bad_token", message, help=f"verify again: {again}")


def digest(path: Path) -> str:
    """Digest a file's bytes, or all files of a folder. Raises NnscalerError `no_such_file`."""
    whole = hashlib.sha256()
    try:
        if not path.is_dir():
            return hashlib.sha256(path.read_bytes()).hexdigest()
        for file in sorted(path.rglob("*")):
            if file.is_file() and "__pycache__" not in file.parts:
                whole.update(f"{file.relative_to(path).as_posix()}\0{digest(file)}\n".encode())
    except OSError as error:
        help = "run it in the directory in which it was found: the token names files relative to that"
        raise NnscalerError("no_such_file", f"cannot read {path}: {error.strerror}", help=help) from None
    return whole.hexdigest()


def _token(document: Mapping[str, Any]) -> PlanToken:
    if document["tool"] != "verify-plan":
        raise ValueError("of another tool")
    texts = [document[name] for name in ("plan", "document")]
    options = document["options"]
    if any(text is not None and not isinstance(text, str) for text in texts) or not isinstance(options, dict):
        raise TypeError("plan")
    model = _source(document["model"])
    if model is None:
        raise TypeError("model")
    return PlanToken(
        model,
        str(document["factory"]),
        document["plan"],
        _source(document["policy"]),
        document["document"],
        _source(document["program"]),
        options,
        str(document["nnscaler"]),
        str(document["torch"]),
    )


def _source(document: Any) -> Source | None:
    return None if document is None else Source(str(document["path"]), str(document["sha256"]))
