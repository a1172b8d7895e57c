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
from verify.external.transformers.build_program import BuiltModel, build, distributed_options, transformers_program
from verify.external.transformers.check_degrees_and_sizes import PlanChanges, PlanSizes
from verify.external.transformers.config_flag_variants import flag_variants
from verify.external.transformers.find_config import targets
from verify.external.transformers.repro_script import minimal_script

ALL = f"{LIBRARY}all"
_WORDS = {"True": True, "False": False, "None": None}  # as Python has them; JSON's are read too


def expand(request: ExternalRequest) -> list[ExternalRequest]:
    """Return a request for each program: of each model, size and flag.

    Raises NnscalerError `usage`, and for the flags of a single model as `flag_variants`.
    """
    models = [f"{LIBRARY}{name}" for name in targets()] if request.target == ALL else [request.target]
    lists = [getattr(request, name) for name in SIZES]
    if not any(lists):
        lists[0] = (2,)
    found: list[ExternalRequest] = []
    for model, *sizes in product(models, *(values or (1,) for values in lists)):
        one: dict[str, Any] = {name: () if size == 1 else (size,) for name, size in zip(SIZES, sizes, strict=True)}
        plain = replace(request, target=model, sweep_flags=False, **one)
        found += [plain, *(_with_flags(plain, len(models) > 1) if request.sweep_flags else [])]
    return found


def _with_flags(request: ExternalRequest, one_of_many: bool) -> list[ExternalRequest]:
    """Return a request for each variant of a model's flags; none where one of many models cannot be made."""
    try:
        variants = flag_variants(request.target.removeprefix(LIBRARY), _sizes(request))
    except NnscalerError:
        if not one_of_many:
            raise
        return []  # the plain one says why
    texts = [tuple(f"{name}={json.dumps(value)}" for name, value in v.settings.items()) for v in variants]
    return [replace(request, settings=(*request.settings, *text)) for text in texts]


def program_of(request: ExternalRequest, changes: PlanChanges | None = None) -> ExternalProgram:
    """Make the program of a request for one; `changes`: of its plan. Raises NnscalerError as `transformers_program`."""
    exact = "float64" in request.dtypes
    program = transformers_program(request.target, _sizes(request), _settings(request), exact=exact, changes=changes)
    return replace(program, name=" ".join((program.name, *(f"--set {text}" for text in request.settings))))


def script_of(request: ExternalRequest) -> str:
    """Return a short script that compares the gradients of a request's program, and has nothing of ours in it."""
    built, sizes = model_of(request, exact=False)
    return minimal_script(built, sizes, distributed_options(sizes, PlanChanges(), built.model))


def model_of(request: ExternalRequest, *, exact: bool = True) -> tuple[BuiltModel, PlanSizes]:
    """Make the plain model of a request for one, as `build` does, and the sizes of its plan."""
    sizes = _sizes(request)
    return build(request.target.removeprefix(LIBRARY), sizes, _settings(request), exact=exact), sizes


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
