"""The programs that a request for models of a library names: each as a request of its own."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch

from nnscaler.errors import NnscalerError, few
from verify.external.program import ExternalProgram
from verify.external.request import LIBRARY, SIZES, ExternalRequest, read_setting
from verify.external.transformers.build_program import (
    BuiltModel,
    build,
    distributed_options,
    model_classes,
    small_configuration,
    transformers_program,
)
from verify.external.transformers.check_parallel_degrees import PlanChanges, PlanSizes
from verify.external.transformers.find_and_change_config import fields_of, targets, with_settings
from verify.external.transformers.repro_script import minimal_script

# The flags of a configuration behind which a wrong rule can hide: those that add or remove parameters, and those of
# attention and experts.


# Names of flags that change a path without a parameter of its own
_PATHS = re.compile(
    r"attn|attention|rope|expert|moe|router|routing|topk|top_k|norm|window|gate|gating|sink|mup|parallel"
)
# Names that change no path, or what is returned
_REPORTS = re.compile(
    r"use_cache|is_decoder|is_encoder_decoder|output_\w+|return_\w+|rescale_\w+|init_\w+|use_\w*kernels?"
)
_RANKS = re.compile(r"\w*_lora_rank|moe_latent_size|shared_expert_intermediate_size|shared_intermediate_size")
_RANK = 16


@dataclass(frozen=True)
class FlagVariant:
    """Settings that differ from the small configuration, and why they are tried.

    settings  field -> value
    reason    for people: "adds 4 parameters: q_norm.weight, ..."
    """

    settings: Mapping[str, Any]
    reason: str

    def __str__(self) -> str:
        return ",".join(f"{name}={value}" for name, value in self.settings.items())


def flag_variants(name: str, sizes: PlanSizes) -> tuple[FlagVariant, ...]:
    """Return the variants of a model type, in the order of its fields. Raises NnscalerError as `build`.

    Each is tried on the meta device: what the library refuses is left out.
    """
    small = small_configuration(name, sizes, {})
    plain = _parameters(small)
    if plain is None:
        raise NnscalerError("not_built", f"no model of {name} can be made on the meta device")
    found: list[FlagVariant] = []
    for settings in _candidates(small, sizes):
        try:
            changed = _parameters(with_settings(small, settings))
        except NnscalerError:
            continue
        if changed is not None and (reason := _reason(plain, changed, settings)):
            found.append(FlagVariant(settings, reason))
    return tuple(found)


def _candidates(config: Any, sizes: PlanSizes) -> Iterator[dict[str, Any]]:
    fields = fields_of(config)
    for name, value in fields.items():
        if isinstance(value, bool) and not _REPORTS.fullmatch(name):
            yield {name: not value}
        elif _RANKS.fullmatch(name) and (value is None or isinstance(value, int)):
            yield {name: None if value else _RANK}
    heads = fields.get("num_key_value_heads")
    if isinstance(heads, int) and sizes.shared > 1 and not fields.get("kv_lora_rank"):
        yield {"num_key_value_heads": 1}
    queries = fields.get("num_attention_heads")
    if isinstance(queries, int) and isinstance(heads, int) and sizes.shared > 1 and fields.get("head_dim"):
        yield {"num_attention_heads": queries + queries // 2, "num_key_value_heads": queries // 2}


def _parameters(config: Any) -> dict[str, tuple[int, ...]] | None:
    """Return the names and shapes of the parameters of a model; None where it cannot be made."""
    classes = model_classes(config)
    try:
        with torch.device("meta"):
            model: Any = classes[0](copy.deepcopy(config))
    except Exception:  # noqa: BLE001 - the library refuses this combination
        return None
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def _reason(plain: Mapping[str, Any], changed: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    """Return why settings are worth a run; empty where they are not."""
    added, removed = sorted(changed.keys() - plain.keys()), sorted(plain.keys() - changed.keys())
    told = []
    if added:
        told.append(f"adds {len(added)} parameters: {_few(added)}")
    if removed:
        told.append(f"removes {len(removed)} parameters: {_few(removed)}")
    if not told and any(plain[name] != changed[name] for name in plain):
        told.append("changes shapes")
    if not told and any(_PATHS.search(name) for name in settings):
        told.append("changes a path of attention or experts")
    return "; ".join(told)


def _few(names: list[str]) -> str:
    generic = list(dict.fromkeys(re.sub(r"(?<=\.)\d+(?=\.)", "*", name) for name in names))
    return few(generic)


# Requests.


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
