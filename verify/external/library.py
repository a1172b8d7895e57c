"""The programs that a request for models of a library names: each as a request of its own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import product
from typing import Any

from nnscaler.errors import NnscalerError
from verify.external.program import ExternalProgram
from verify.external.request import LIBRARY, SIZES, ExternalRequest, read_setting
from verify.external.transformers_config import targets
from verify.external.transformers_script import minimal_script
from verify.external.transformers_target import (
    PlanChanges,
    PlanSizes,
    build,
    distributed_options,
    transformers_program,
)

ALL = f"{LIBRARY}all"
_WORDS = {"True": True, "False": False, "None": None}  # as Python has them; JSON's are read too


def expand(request: ExternalRequest) -> list[ExternalRequest]:
    """Return a request for each program: of each model, size and flag. Raises NnscalerError `usage`."""
    models = [f"{LIBRARY}{name}" for name in targets()] if request.target == ALL else [request.target]
    lists = [getattr(request, name) for name in SIZES]
    if not any(lists):
        lists[0] = (2,)
    found: list[ExternalRequest] = []
    for model, *sizes in product(models, *(values or (1,) for values in lists)):
        one: dict[str, Any] = {name: () if size == 1 else (size,) for name, size in zip(SIZES, sizes, strict=True)}
        found.append(replace(request, target=model, **one))
    return found


def program_of(request: ExternalRequest) -> ExternalProgram:
    """Make the program of a request for one. Raises NnscalerError as `transformers_program`."""
    exact = "float64" in request.dtypes
    return transformers_program(request.target, _sizes(request), _settings(request), exact=exact)


def script_of(request: ExternalRequest) -> str:
    """Return a short script that compares the gradients of a request's program, and has nothing of ours in it."""
    sizes = _sizes(request)
    built = build(request.target.removeprefix(LIBRARY), sizes, _settings(request), exact=False)
    return minimal_script(built, sizes, distributed_options(sizes, PlanChanges(), built.model))


def _sizes(request: ExternalRequest) -> PlanSizes:
    return PlanSizes(**{name: (getattr(request, name) or (1,))[0] for name in SIZES})


def _settings(request: ExternalRequest) -> Mapping[str, Any]:
    return {key: value_of(text) for key, text in map(read_setting, request.settings)}


def value_of(text: str) -> Any:
    """Return the value that a setting's text stands for: JSON, a word of Python, or the text itself."""
    if text in _WORDS:
        return _WORDS[text]
    with suppress(ValueError):
        return json.loads(text)
    return text


def is_without_plan(error: NnscalerError) -> bool:
    """Return whether a model of many has no such plan at all, so that there is nothing to verify of it."""
    return error.code == "no_plan"
