"""Read constraints from TOML: tables of `[[constraint]]`, each with a `kind` and what it needs.

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
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from nnscaler.errors import NnscalerError
from nnscaler.ir.graph import Graph
from nnscaler.ir.operation_annotations import Signature, signatures
from nnscaler.planning.constraints.interlaced import interlaced
from nnscaler.planning.constraints.megatron import megatron, sequence_parallel
from nnscaler.planning.constraints.size_and_choice_constraints import (
    Constraint,
    all_of,
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
from nnscaler.planning.sharding.zero_stages import PLACEMENTS
from nnscaler.scheduling.registry import check_schedule, get_schedule
from nnscaler.transform.plan import CP, DP, EP, PP, TP

_ALONE = {"data_parallel": data_parallel, "tensor_parallel": tensor_parallel, "pipeline": pipeline}
_POLICIES = {"megatron": megatron, "sequence_parallel": sequence_parallel}
_NUMBERS = (DP, CP, TP, PP, EP, "micro_batches")
_FLAGS = ("recompute", "zero")
_STAGES = tuple(placement.zero for placement in PLACEMENTS)
_KEYS: Mapping[str, frozenset[str]] = {
    **dict.fromkeys((*_ALONE, *_POLICIES), frozenset({"kind"})),
    "sizes": frozenset({"kind", "schedule", *_NUMBERS, *_FLAGS}),
    "replicate": frozenset({"kind", "operations"}),
    "over_all_devices": frozenset({"kind", "operations"}),
    "interlaced": frozenset({"kind", "operations"}),
    "together": frozenset({"kind", "operations"}),
    "on_device": frozenset({"kind", "operations", "device"}),
    "forbid": frozenset({"kind", "operations", "identifier"}),
    "require": frozenset({"kind", "operations", "identifier"}),
}


Made = Callable[[Graph, Mapping[str, Signature]], Constraint]


def read_constraints(path: Path, graph: Graph) -> Constraint:
    """Return the constraint that a TOML file puts on a graph.

    Raises NnscalerError("plan_illegal") with the entry that is wrong and what is legal.
    """
    entries = parse_constraints(path)
    known = signatures(graph)
    return all_of(made(graph, known) for made in entries)


def parse_constraints(path: Path) -> list[Made]:
    """Read the entries of a TOML file, each of which makes its constraint of a graph.

    Raises NnscalerError("plan_illegal") for all that is wrong whatever the graph is.
    """
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise NnscalerError("plan_illegal", f"{path}: {error}", help="[[constraint]] with a kind") from None
    entries = data.get("constraint")
    if set(data) - {"constraint"} or not isinstance(entries, list):
        raise NnscalerError("plan_illegal", f"{path}: it has {sorted(data)}", help="it has tables of [[constraint]]")
    return [_constraint(entry, f"{path}: constraint {i}") for i, entry in enumerate(entries, 1)]


def _constraint(entry: Any, place: str) -> Made:
    kind = entry.get("kind") if isinstance(entry, dict) else None
    if not isinstance(kind, str) or kind not in _KEYS:
        near = get_close_matches(str(kind), _KEYS, 1)
        help = f"did you mean {near[0]!r}? " if near else ""
        raise NnscalerError("plan_illegal", f"{place} has the kind {kind!r}", help=f"{help}kinds: {', '.join(_KEYS)}")
    unknown = sorted(set(entry) - _KEYS[kind])
    if unknown:
        raise NnscalerError("plan_illegal", f"{place} ({kind}) has {unknown}", help=f"known: {sorted(_KEYS[kind])}")
    if kind in _POLICIES:
        return _POLICIES[kind]
    if kind in _ALONE or kind == "sizes":
        numbers = {k: _number(k, v, place) for k, v in entry.items() if k not in ("kind", "schedule")}
        alone = _sizes(entry.get("schedule"), numbers, place) if kind == "sizes" else _ALONE[kind]()
        return lambda graph, known: alone
    if kind == "interlaced" and "operations" not in entry:
        return interlaced
    names = _operations(entry.get("operations"), f"{place} ({kind})")
    if kind == "replicate":
        return lambda graph, known: replicate(graph, names)
    if kind == "together":
        return lambda graph, known: together(graph, names)
    if kind == "over_all_devices":
        return lambda graph, known: over_all_devices(graph, known, names)
    if kind == "interlaced":
        return lambda graph, known: interlaced(graph, known, names)
    if kind == "on_device":
        device = entry.get("device")
        if not isinstance(device, int) or isinstance(device, bool):
            raise NnscalerError("plan_illegal", f"{place} ({kind}): device is {device!r}", help="device = 0, or -1")
        return lambda graph, known: on_device(graph, names, device)
    identifier = entry.get("identifier")
    if not isinstance(identifier, str):
        raise NnscalerError("plan_illegal", f"{place} ({kind}): identifier is {identifier!r}", help='identifier = "n"')
    made = forbid if kind == "forbid" else require
    return lambda graph, known: made(graph, names, identifier)


def _sizes(schedule: Any, numbers: Mapping[str, int | bool], place: str) -> Constraint:
    if schedule is not None and not isinstance(schedule, str):
        message = f"{place} (sizes): schedule is {schedule!r}"
        raise NnscalerError("plan_illegal", message, help='schedule = "zb-v", as of `nnscaler list schedules`')
    try:
        if schedule is not None and not get_schedule(schedule).shares:  # else another constraint says which stages
            check_schedule(schedule, searched=True)
        return sizes(schedule, **numbers)
    except NnscalerError as error:
        raise NnscalerError(error.code, f"{place} (sizes): {error.message}", help=error.help) from error


def _operations(given: Any, place: str) -> Sequence[str]:
    names = [given] if isinstance(given, str) else given
    if not isinstance(names, list) or not names or not all(isinstance(n, str) for n in names):
        raise NnscalerError("plan_illegal", f"{place}: operations are {names!r}", help='operations = ["blocks.*.mlp"]')
    return names


def _number(name: str, value: Any, place: str) -> int | bool:
    if isinstance(value, bool) and name in _FLAGS:
        return value
    whole = isinstance(value, int) and not isinstance(value, bool)
    if whole and (value in _STAGES if name == "zero" else name not in _FLAGS and value >= 1):
        return int(value)
    legal = "true or false" if name in _FLAGS else "a whole number from 1 on"
    if name == "zero":
        legal = f"{', '.join(map(str, _STAGES))}, or true or false"
    raise NnscalerError("plan_illegal", f"{place} (sizes): {name} is {value!r}", help=f"{name} is {legal}")
