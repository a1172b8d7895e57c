"""`nns2:...`: one run of verify-plan as a word, from which `nnscaler reproduce` verifies exactly the same again.

The word packs (`verify.results.packed_json`) the files with their digests, a plan that was read from a file as a
whole, the options, and the versions of nnscaler and torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from shlex import quote
from typing import Any

from nnscaler.model_file import find_target
from nnscaler.plan_source import is_words, plan_text, schedule_file
from verify.programs.request import PlanRequest
from verify.results.file_digests import Source, changes, read_source
from verify.results.packed_json import WordKind, check_options
from verify.results.report import environment

_WORDS = WordKind("nns2:", "verify-plan", 1 << 24, "which may compile another program")
Option = str | int | float | bool | None | list[str]
# the fields of a request that are options of a token; its depth is two flags there, and the rest has a field of its own
_OPTIONS = (
    "ranks", "schedule", "micro_batches", "replicate", "loss_fn", "specialise", "precision", "backend", "steps", "seed",
    "dtype", "compile", "timeout", "own_weights", "level", "train", "train_steps", "optimizer", "train_backend",
    "optimizer_bytes",
)  # fmt: skip
_APART = ("model", "plan", "plan_document", "program", "depth")


@dataclass(frozen=True, slots=True)
class PlanToken:
    """
    model    the model file; `factory` is its function
    plan     what `--plan` said where that is no file of a plan: mesh axes, or the function of `policy`
    policy   the file of a policy function
    document the text of plan.json, where the plan was read from one
    program  the folder of `--program`
    options  every other option that decides what is run, by its name in Python
    schedule the file of a schedule, where `--schedule` named one
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
    schedule: Source | None = None

    def changes(self) -> list[str]:
        """Return, as sentences, all that has changed since the token was made.

        Raises NnscalerError where a file is gone.
        """
        return changes((self.model, self.policy, self.program, self.schedule), self.torch)


def make_token(request: PlanRequest) -> PlanToken:
    """Return the token of a request whose ranks and backend are set. Raises NnscalerError `no_such_file`."""
    file, factory = find_target(str(request.model))
    plan, document, policy = request.plan, request.plan_document, None
    if plan is not None and "::" in plan:
        policy = Source.of(plan.partition("::")[0])
    elif plan is not None and not is_words(plan):
        document, plan = plan_text(plan), None
    values = {name: getattr(request, name) for name in _OPTIONS}
    scheduled = None if request.schedule is None else schedule_file(request.schedule)
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
        None if scheduled is None else Source.of(scheduled),
    )


def request_of(token: PlanToken) -> PlanRequest:
    """Return what the token says is to be verified. Raises NnscalerError `bad_token` for options that are not known."""
    given: dict[str, Any] = dict(token.options)
    quick, deep = given.pop("quick", False), given.pop("deep", False)
    check_options(given, PlanRequest, _APART)
    if token.schedule is not None:
        given["schedule"] = token.schedule.path + "".join(str(given["schedule"]).partition("::")[1:])
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
    return _WORDS.pack_short(asdict(token))


def decode(text: str) -> PlanToken:
    """Raises NnscalerError `bad_token` for what is no token, or is one of another version of nnscaler."""
    return _WORDS.read(text, _token, _again)


def _again(document: Mapping[str, Any]) -> str:
    return f"nnscaler verify-plan {quote(document['model']['path'])} --ranks {document['options']['ranks']} ..."


def _token(document: Mapping[str, Any]) -> PlanToken:
    texts = [document[name] for name in ("plan", "document")]
    options = document["options"]
    if any(text is not None and not isinstance(text, str) for text in texts) or not isinstance(options, dict):
        raise TypeError("plan")
    model = read_source(document["model"])
    if model is None:
        raise TypeError("model")
    return PlanToken(
        model,
        str(document["factory"]),
        document["plan"],
        read_source(document["policy"]),
        document["document"],
        read_source(document["program"]),
        options,
        str(document["nnscaler"]),
        str(document["torch"]),
        read_source(document.get("schedule")),
    )
