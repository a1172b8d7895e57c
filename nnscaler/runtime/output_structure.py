"""Describe how a model returns its tensors, in nested tuples, dicts and dataclasses, as one line of JSON, and rebuild
it.

    {"class": "transformers.modeling_outputs:CausalLMOutputWithPast", "items": [["loss", {"tensor": "loss"}],
     ["logits", {"tensor": "logits"}]]}

A value is one of `{"tensor": name}` (with a `shape` where it is the loss, and has dims of size 1), `{"value": 0.5}` for
what is no tensor, `{"tuple": [...]}`, `{"list": [...]}`, `{"dict": [[key, value], ...]}`, and a class with its items.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import keyword
import re
from collections import namedtuple
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from nnscaler.runtime.program.resolve_shadowed_user_imports import is_private
from nnscaler.runtime.stage_base_class import LOSS

_CACHES = "transformers.cache_utils"  # of keys and values, to generate from: no result that somebody waits for
_PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class Returned:
    """The values that a model returned.

    structure   in JSON; empty where it is the loss alone
    tensors     by name, without the loss
    left_out    (path, type) of values that are neither tensors nor plain: None stands in their place
    """

    structure: str
    tensors: Mapping[str, Tensor]
    left_out: tuple[tuple[str, str], ...] = ()


def describe(output: Any, loss: Tensor | None = None) -> Returned:
    """Take an output apart. Names come from keys, fields and positions: `logits`, `hidden_states_0`.

    `loss`: the tensor in it that is the loss, which is called so.
    """
    if output is loss and loss is not None:
        return Returned("", {})
    reader = _StructureReader(loss)
    found = reader.value(output, "")
    return Returned(json.dumps(found, ensure_ascii=False), reader.tensors, tuple(reader.left_out))


def restore(structure: str, tensors: Mapping[str, Tensor]) -> Any:
    """Put an output together, with these tensors in it. Without a structure it is the loss.

    A class that cannot be imported here, as those of a model's own file, is replaced by one of its name and fields.
    Raises KeyError for a tensor that is missing.
    """
    return _made(json.loads(structure), tensors) if structure else tensors[LOSS]


@dataclass
class _StructureReader:
    loss: Tensor | None
    tensors: dict[str, Tensor] = field(default_factory=dict)
    left_out: list[tuple[str, str]] = field(default_factory=list)
    _names: dict[int, str] = field(default_factory=dict)

    def value(self, value: Any, path: str) -> dict[str, Any]:
        if isinstance(value, Tensor):
            return self._tensor(value, path)
        if isinstance(value, _PLAIN):
            return {"value": value} if type(value) in _PLAIN else self._skipped(value, path)
        if isinstance(value, Mapping) and all(type(key) in _PLAIN for key in value):
            pairs = self._items(value, path)
            return {"dict": pairs} if type(value) is dict else {"class": _name(type(value)), "items": pairs}
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            named = dict(zip(value._fields, value, strict=True))
            return {"class": _name(type(value)), "tuple": True, "items": self._items(named, path)}
        if type(value) in (tuple, list):
            items = [self.value(item, f"{path}_{i}" if path else f"output_{i}") for i, item in enumerate(value)]
            return {type(value).__name__: items}
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            named = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
            return {"class": _name(type(value)), "items": self._items(named, path)}
        return self._skipped(value, path)

    def _items(self, items: Mapping[Any, Any], path: str) -> list[list[Any]]:
        return [[key, self.value(item, f"{path}_{key}" if path else str(key))] for key, item in items.items()]

    def _tensor(self, value: Tensor, path: str) -> dict[str, Any]:
        if value is self.loss:
            return {"tensor": LOSS, "shape": list(value.shape)} if value.ndim else {"tensor": LOSS}
        name = self._names.get(id(value))
        if name is None:
            name = self._names[id(value)] = self._fresh(path or "output")
            self.tensors[name] = value
        return {"tensor": name}

    def _fresh(self, path: str) -> str:
        base = re.sub(r"\W", "_", path)
        if not base.isidentifier() or keyword.iskeyword(base):
            base = f"output_{base}"
        name, number = base, 0
        while name in self.tensors or name == LOSS:
            number += 1
            name = f"{base}_{number}"
        return name

    def _skipped(self, value: Any, path: str) -> dict[str, Any]:
        if type(value).__module__ != _CACHES:
            self.left_out.append((path or "output", type(value).__name__))
        return {"value": None}


def _name(kind: type) -> str:
    """`module:Class`; `:Class` for one of a user's file, whose module has another name on every machine."""
    module = "" if is_private(kind.__module__) else kind.__module__
    return f"{module}:{kind.__qualname__}"


def _made(value: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Any:
    if "class" in value:
        return _instance(value, {key: _made(item, tensors) for key, item in value["items"]})
    if "tensor" in value:
        found = tensors[value["tensor"]]
        return found.reshape(value["shape"]) if "shape" in value else found
    if "dict" in value:
        return {key: _made(item, tensors) for key, item in value["dict"]}
    for kind in (tuple, list):
        if kind.__name__ in value:
            return kind(_made(item, tensors) for item in value[kind.__name__])
    return value["value"]


def _instance(value: Mapping[str, Any], items: dict[Any, Any]) -> Any:
    kind: Any = _imported(value["class"])
    name = value["class"].partition(":")[2].rpartition(".")[2]
    if value.get("tuple"):
        make: Callable[..., Any] = namedtuple(name, list(items)) if kind is None else kind
        return make(*items.values())
    if kind is not None and issubclass(kind, Mapping):
        by_name = dataclasses.is_dataclass(kind)  # as ModelOutput is
        make = kind
        return make(**items) if by_name else make(items)
    if not all(type(key) is str and key.isidentifier() for key in items):
        return items
    kind = kind or dataclasses.make_dataclass(name, list(items))
    made = kind.__new__(kind)
    for key, item in items.items():
        object.__setattr__(made, key, item)
    return made


def _imported(name: str) -> type | None:
    """Return the class `module:Class`; None where it is not to be had here."""
    module, _, path = name.partition(":")
    try:
        found: Any = importlib.import_module(module) if module else None
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError):
        return None
    return found if isinstance(found, type) else None
