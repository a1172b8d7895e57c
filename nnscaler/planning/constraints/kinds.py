"""Constraints on plans: small predicates that are composed, and that the planner searches within.

A constraint says which configurations (sizes of axes, micro-batches, recomputation) it permits, and which choices of
operations on the tp axis. `all_of` composes them. They stand in TOML as tables of `[[constraint]]`:

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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from nnscaler.errors import NnscalerError
from nnscaler.ir.graph import Graph
from nnscaler.ir.operation import Operation
from nnscaler.ir.placement import Choice, Split
from nnscaler.planning.planner.configurations import Configuration
from nnscaler.transform.select import select


@dataclass(frozen=True)
class Constraint:
    """`text`: as the user would say it."""

    text: str
    permits: Callable[[Configuration], bool] = lambda _: True
    allows: Callable[[Operation, Choice], bool] = lambda _op, _choice: True


def all_of(constraints: Iterable[Constraint]) -> Constraint:
    """What all of them permit and allow."""
    every = tuple(constraints)
    return Constraint(
        "; ".join(c.text for c in every),
        lambda configuration: all(c.permits(configuration) for c in every),
        lambda op, choice: all(c.allows(op, choice) for c in every),
    )


def sizes(**wanted: int | bool) -> Constraint:
    """Fixed numbers: of `dp`, `tp`, `pp`, `micro_batches`, and whether to `recompute`."""
    text = ", ".join(f"{name}={value}" for name, value in wanted.items())
    return Constraint(text, lambda c: all(getattr(c, name) == value for name, value in wanted.items()))


def data_parallel() -> Constraint:
    """The batch is split over all ranks, and nothing else is."""
    return Constraint("data parallel", lambda c: c.tp == 1 and c.pp == 1)


def tensor_parallel() -> Constraint:
    """Operations are split over all ranks."""
    return Constraint("tensor parallel", lambda c: c.dp == 1 and c.pp == 1)


def pipeline() -> Constraint:
    """Every rank runs a stage."""
    return Constraint("pipeline", lambda c: c.dp == 1 and c.tp == 1)


def replicate(graph: Graph, operations: Sequence[str]) -> Constraint:
    """These operations run whole on every rank of tp. Raises NnscalerError("plan_illegal") for unknown names."""
    named = {op.name for op in select(graph, tuple(operations))}
    return Constraint(
        f"replicate {', '.join(operations)}", allows=lambda op, choice: op.name not in named or not _splits(choice)
    )


def forbid(graph: Graph, operations: Sequence[str], identifier: str) -> Constraint:
    """These operations do not split this identifier. Raises NnscalerError("plan_illegal") for unknown names."""
    named = {op.name for op in select(graph, tuple(operations))}
    return Constraint(
        f"forbid {identifier} of {', '.join(operations)}",
        allows=lambda op, choice: op.name not in named or not _splits(choice, identifier),
    )


def require(graph: Graph, operations: Sequence[str], identifier: str) -> Constraint:
    """These operations split this identifier on tp. Raises NnscalerError("plan_illegal") for unknown names."""
    named = {op.name for op in select(graph, tuple(operations))}
    return Constraint(
        f"require {identifier} of {', '.join(operations)}",
        lambda c: c.tp > 1,
        lambda op, choice: op.name not in named or _splits(choice, identifier),
    )


def _splits(choice: Choice, identifier: str | None = None) -> bool:
    return isinstance(choice, Split) and identifier in (None, choice.identifier)


_ALONE = {"data_parallel": data_parallel, "tensor_parallel": tensor_parallel, "pipeline": pipeline}
_NUMBERS = ("dp", "tp", "pp", "micro_batches")
_KEYS: Mapping[str, frozenset[str]] = {
    **dict.fromkeys(_ALONE, frozenset({"kind"})),
    "sizes": frozenset({"kind", *_NUMBERS, "recompute"}),
    "replicate": frozenset({"kind", "operations"}),
    "forbid": frozenset({"kind", "operations", "identifier"}),
    "require": frozenset({"kind", "operations", "identifier"}),
}


def read_constraints(path: Path, graph: Graph) -> Constraint:
    """What a TOML file says. Raises NnscalerError("plan_illegal") with the entry that is wrong and what is legal."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise NnscalerError("plan_illegal", f"{path}: {error}", help="[[constraint]] with a kind") from None
    entries = data.get("constraint")
    if set(data) - {"constraint"} or not isinstance(entries, list):
        raise NnscalerError("plan_illegal", f"{path}: it has {sorted(data)}", help="it has tables of [[constraint]]")
    return all_of(_constraint(entry, f"{path}: constraint {i + 1}", graph) for i, entry in enumerate(entries))


def _constraint(entry: Any, place: str, graph: Graph) -> Constraint:
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
    if kind == "sizes":
        return sizes(**{k: _number(k, v, place) for k, v in entry.items() if k != "kind"})
    names = entry.get("operations")
    if isinstance(names, str):
        names = [names]
    if not isinstance(names, list) or not names or not all(isinstance(n, str) for n in names):
        raise NnscalerError(
            "plan_illegal", f"{place} ({kind}): operations are {names!r}", help='operations = ["blocks.*.mlp"]'
        )
    if kind == "replicate":
        return replicate(graph, names)
    identifier = entry.get("identifier")
    if not isinstance(identifier, str):
        raise NnscalerError("plan_illegal", f"{place} ({kind}): identifier is {identifier!r}", help='identifier = "n"')
    return (forbid if kind == "forbid" else require)(graph, names, identifier)


def _number(name: str, value: Any, place: str) -> int | bool:
    if name == "recompute" and isinstance(value, bool):
        return value
    if name != "recompute" and isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return value
    legal = "true or false" if name == "recompute" else "a whole number from 1 on"
    raise NnscalerError("plan_illegal", f"{place} (sizes): {name} is {value!r}", help=f"{name} is {legal}")
