"""Find a configuration of the installed transformers, and change its fields. Nothing is downloaded."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import os
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any

from nnscaler.errors import NnscalerError

_PLANS = ("base_model_tp_plan", "base_model_ep_plan")


def library() -> ModuleType:
    """Import transformers, with the network off. Raises NnscalerError where it is not installed."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        message = f"targets that begin with hf: need transformers, which cannot be imported: {error}"
        raise NnscalerError("usage", message, help="pip install 'transformers>=5.10,<6'") from error


def configuration_classes() -> dict[str, type]:
    """Return every configuration class of the installed transformers that has a `model_type`, by that type.

    Where two classes share a type, the one that transformers itself would make wins.
    """
    root = Path(str(library().__file__)).parent / "models"
    base = importlib.import_module("transformers.configuration_utils").PreTrainedConfig
    chosen = importlib.import_module("transformers.models.auto.configuration_auto").CONFIG_MAPPING_NAMES
    found: dict[str, type] = {}
    for path in sorted(root.glob("*/configuration_*.py")):
        module = importlib.import_module(f"transformers.models.{path.parent.name}.{path.stem}")
        for name, value in sorted(vars(module).items()):
            if not (inspect.isclass(value) and issubclass(value, base) and value.__module__ == module.__name__):
                continue
            kind = str(value.model_type)  # type: ignore[attr-defined]
            if kind and (kind not in found or chosen.get(kind) == name):
                found[kind] = value
    return found


def targets() -> list[str]:
    """Return the model types whose configuration declares a tensor or expert plan, in alphabetical order."""
    classes = configuration_classes()
    return sorted(kind for kind, cls in classes.items() if any(getattr(cls, plan, None) for plan in _PLANS))


def configuration(kind: str) -> Any:
    """Make the default configuration of a model type, or read the one of a local folder.

    Raises NnscalerError for what is neither.
    """
    library()
    folder = Path(kind)
    if folder.is_dir():
        return _from_folder(folder)
    auto = importlib.import_module("transformers.models.auto.configuration_auto")
    if kind in auto.CONFIG_MAPPING_NAMES:
        return auto.CONFIG_MAPPING[kind]()
    classes = configuration_classes()
    if kind not in classes:
        near = get_close_matches(kind, classes, 3)
        help = f"did you mean {' or '.join('hf:' + name for name in near)}?" if near else "hf:all names all with a plan"
        version = library().__version__
        raise NnscalerError("usage", f"transformers {version} has no model type {kind!r}, and no folder", help=help)
    return classes[kind]()


def _from_folder(folder: Path) -> Any:
    file = folder / "config.json"
    try:
        kind = json.loads(file.read_text(encoding="utf-8")).get("model_type", "")
    except (OSError, ValueError, AttributeError) as error:
        raise NnscalerError("usage", f"{file} cannot be read: {error}") from error
    cls = configuration_classes().get(kind)
    if cls is None:
        raise NnscalerError("usage", f"{file} says model_type {kind!r}, which transformers does not know")
    return cls.from_pretrained(str(folder), local_files_only=True)  # type: ignore[attr-defined]


def fields_of(config: Any) -> dict[str, Any]:
    """Return what a configuration declares, and its values."""
    library()
    base = importlib.import_module("transformers.configuration_utils").PreTrainedConfig
    common = {field.name for field in dataclasses.fields(base)} if dataclasses.is_dataclass(base) else set()
    if dataclasses.is_dataclass(type(config)):
        names = [field.name for field in dataclasses.fields(type(config)) if field.name not in common]
    else:
        names = [name for name in inspect.signature(type(config).__init__).parameters if name not in ("self", "kwargs")]
    values = vars(config)  # not getattr: per-layer configurations refuse that
    stored = {name: type(config).attribute_map.get(name, name) for name in names}
    found = {name: values[key] for name, key in stored.items() if key in values}
    return found | ({"per_layer_config": per_layer(config)} if getattr(config, "is_heterogeneous", False) else {})


def per_layer(config: Any) -> dict[int, dict[str, Any]]:
    """Return what single layers of a configuration have of their own."""
    layers = list(config.per_layer_config)
    return {
        number: {name: vars(layer)[name] for name in sorted(config.per_layer_attributes) if name in vars(layer)}
        for number, layer in enumerate(layers)
    }


def with_settings(config: Any, settings: Mapping[str, Any]) -> Any:
    """Make the configuration again with some fields changed. A key may name a field of a part: `text_config.x`.

    Raises NnscalerError for a key that the configuration does not have, and for values that it refuses.
    """
    fields = fields_of(config)
    known = {*fields, *type(config).attribute_map}
    changes: dict[str, Any] = {}
    for key, value in settings.items():
        part, dot, rest = key.partition(".")
        if dot and part in fields and is_configuration(fields[part]):
            changes[part] = with_settings(changes.get(part, fields[part]), {rest: value})
            continue
        if key not in known and key not in ("attn_implementation", "experts_implementation"):
            near = get_close_matches(key, known, 3)
            help = f"did you mean {' or '.join(near)}?" if near else f"it has {', '.join(sorted(known))}"
            raise NnscalerError("usage", f"{type(config).__name__} has no field {key!r}", help=help)
        changes[key] = value
    try:
        return type(config)(**{**fields, **changes})
    except Exception as error:
        told = ", ".join(f"{key}={value}" for key, value in settings.items())
        raise NnscalerError("usage", f"{type(config).__name__} refuses {told}: {error}") from error


def is_configuration(value: Any) -> bool:
    return hasattr(value, "model_type") and hasattr(value, "to_dict")
