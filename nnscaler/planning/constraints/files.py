"""Constraints in TOML: tables of `[[constraint]]`, each with a `kind` and what it needs.

[[constraint]]
kind = "sizes"
tp = 2

[[constraint]]
kind = "replicate"
operations = ["lm_head", "blocks.*.norm"]

[[constraint]]
kind = "require"
operations = ["blocks.*.mlp.up"]
identifier = "n"
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from nnscaler.errors import NnscalerError
from nnscaler.ir.graph import Graph
from nnscaler.ir.signature import Signature, signatures
from nnscaler.planning.constraints.constraint import Constraint, all_of
from nnscaler.planning.constraints.kinds import (
    data_parallel,
    forbid,
    on_device,
    over_all_devices,
    pipeline,
    replicate,
    require,
    sizes,
    tensor_parallel,
    together,
)
from nnscaler.planning.constraints.megatron import megatron, sequence_parallel
from nnscaler.transform.plan import ZERO

_ALONE = {"data_parallel": data_parallel, "tensor_parallel": tensor_parallel, "pipeline": pipeline}
_POLICIES = {"megatron": megatron, "sequence_parallel": sequence_parallel}
_NUMBERS = ("dp", "tp", "pp", "micro_batches")
_FLAGS = ("recompute", "zero")
_KEYS: Mapping[str, frozenset[str]] = {
    **dict.fromkeys((*_ALONE, *_POLICIES), frozenset({"kind"})),
    "sizes": frozenset({"kind", *_NUMBERS, *_FLAGS}),
    "replicate": frozenset({"kind", "operations"}),
    "over_all_devices": frozenset({"kind", "operations"}),
    "together": frozenset({"kind", "operations"}),
    "on_device": frozenset({"kind", "operations", "device"}),
    "forbid": frozenset({"kind", "operations", "identifier"}),
    "require": frozenset({"kind", "operations", "identifier"}),
}


def read_constraints(path: Path, graph: Graph, known: Mapping[str, Signature] | None = None) -> Constraint:
    """What a TOML file says. `known`: the signatures of the graph, where there are some already.

    Raises NnscalerError("plan_illegal") with the entry that is wrong and what is legal.
    """
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise NnscalerError("plan_illegal", f"{path}: {error}", help="[[constraint]] with a kind") from None
    entries = data.get("constraint")
    if set(data) - {"constraint"} or not isinstance(entries, list):
        raise NnscalerError("plan_illegal", f"{path}: it has {sorted(data)}", help="it has tables of [[constraint]]")
    known = signatures(graph) if known is None else known
    places = [f"{path}: constraint {i + 1}" for i in range(len(entries))]
    return all_of(_constraint(entry, place, graph, known) for entry, place in zip(entries, places, strict=True))


def _constraint(entry: Any, place: str, graph: Graph, known: Mapping[str, Signature]) -> Constraint:
    kind = entry.get("kind") if isinstance(entry, dict) else None
    if not isinstance(kind, str) or kind not in _KEYS:
        near = get_close_matches(str(kind), _KEYS, 1)
        help = f"did you mean {near[0]!r}? " if near else ""
        raise NnscalerError("plan_illegal", f"{place} has the kind {kind!r}", help=f"{help}kinds: {', '.join(_KEYS)}")
    unknown = sorted(set(entry) - _KEYS[kind])
    if unknown:
        raise NnscalerError("plan_illegal", f"{place} ({kind}) has {unknown}", help=f"known: {sorted(_KEYS[kind])}")
    if kind in _ALONE:
        return _ALONE[kind]()
    if kind in _POLICIES:
        return _POLICIES[kind](graph, known)
    if kind == "sizes":
        return sizes(**{k: _number(k, v, place) for k, v in entry.items() if k != "kind"})
    names = _operations(entry.get("operations"), f"{place} ({kind})")
    if kind == "replicate":
        return replicate(graph, names)
    if kind == "together":
        return together(graph, names)
    if kind == "on_device":
        device = entry.get("device")
        if not isinstance(device, int) or isinstance(device, bool):
            raise NnscalerError("plan_illegal", f"{place} ({kind}): device is {device!r}", help="device = 0, or -1")
        return on_device(graph, names, device)
    if kind == "over_all_devices":
        return over_all_devices(graph, known, names)
    identifier = entry.get("identifier")
    if not isinstance(identifier, str):
        raise NnscalerError("plan_illegal", f"{place} ({kind}): identifier is {identifier!r}", help='identifier = "n"')
    return (forbid if kind == "forbid" else require)(graph, names, identifier)


def _operations(given: Any, place: str) -> Sequence[str]:
    names = [given] if isinstance(given, str) else given
    if not isinstance(names, list) or not names or not all(isinstance(n, str) for n in names):
        raise NnscalerError("plan_illegal", f"{place}: operations are {names!r}", help='operations = ["blocks.*.mlp"]')
    return names


def _number(name: str, value: Any, place: str) -> int | bool:
    if name in _FLAGS and (isinstance(value, bool) or (name == "zero" and value == ZERO)):
        return bool(value)
    if name not in _FLAGS and isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return value
    legal = "true or false" if name in _FLAGS else "a whole number from 1 on"
    raise NnscalerError("plan_illegal", f"{place} (sizes): {name} is {value!r}", help=f"{name} is {legal}")
