"""The items of a gate: operators, models under one plan, and programs of others. An item's name stays the same between
runs."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Literal

from nnscaler.errors import NnscalerError
from verify.external.request import ExternalRequest
from verify.programs.request import PlanRequest

Option = str | int | bool | tuple[str | int, ...]
SourceKind = Literal["name", "file", "module", "user"]


@dataclass(frozen=True)
class PlanItem:
    """
    request   what is verified; its paths are relative to the current folder
    timeout   seconds for the whole item
    """

    name: str
    request: PlanRequest
    timeout: float = 300.0

    @property
    def seed(self) -> int:
        return self.request.seed


@dataclass(frozen=True)
class ExternalItem:
    """Programs that nnScaler did not write: those of one request; fields as of `PlanItem`."""

    name: str
    request: ExternalRequest
    timeout: float = 300.0

    @property
    def seed(self) -> int:
        return self.request.seed


@dataclass(frozen=True)
class OpItem:
    """`address` names the operator in another process; `modules` must be imported for it to be known.

    plan  which registers the operator, perhaps only when its model is built or run; None where importing does
    """

    name: str
    address: str
    modules: tuple[str, ...] = ()
    seed: int = 0
    timeout: float = 60.0
    plan: PlanRequest | None = None


@dataclass(frozen=True)
class OpSource:
    """Where operators come from, as the settings name them.

    `text`: a name or pattern, a file, or a module; for "user" the model files, of which every operator is taken that
    the user's own code registers: when it is imported, or when a plan is verified.
    """

    kind: SourceKind
    text: str
    files: tuple[str, ...] = ()
    seed: int = 0
    timeout: float = 60.0

    @property
    def name(self) -> str:
        """For reports, where its operators cannot be listed."""
        return "operators of the models" if self.kind == "user" else self.text


Item = PlanItem | ExternalItem | OpItem


def item_name(subject: str, options: Mapping[str, Option]) -> str:
    """`gpt.py ranks=4 plan=dp=2,tp=2`."""
    return " ".join([subject, *(f"{key}={_text(value)}" for key, value in options.items())])


def _text(value: Option) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def select(items: Sequence[Item], patterns: Sequence[str]) -> list[Item]:
    """Return the items whose name matches one of the patterns, or contains it; all without patterns.

    Raises NnscalerError `nothing_named` for a pattern that nothing matches: a typing error must not empty a gate.
    """
    if not patterns:
        return list(items)
    chosen: dict[str, Item] = {}
    for pattern in patterns:
        found = [item for item in items if is_meant(item, pattern)]
        if not found:
            close = get_close_matches(pattern, [item.name for item in items], n=1, cutoff=0.3)
            help = f"did you mean {close[0]!r}?" if close else "nnscaler gate --list shows the items"
            raise NnscalerError("nothing_named", f"no item of the gate matches {pattern!r}", help=help)
        chosen |= {item.name: item for item in found}
    return [item for item in items if item.name in chosen]


def is_meant(item: Item, pattern: str) -> bool:
    """Return whether the item's name matches the pattern, or contains it."""
    return fnmatch.fnmatchcase(item.name, pattern) or pattern in item.name


def check_names(items: Sequence[Item]) -> None:
    """Raise NnscalerError `bad_settings` where two items share a name: the baseline could not tell them apart."""
    seen: set[str] = set()
    for item in items:
        if item.name in seen:
            help = 'name = "..." in the settings tells them apart'
            raise NnscalerError("bad_settings", f"two items of the gate are called {item.name!r}", help=help)
        seen.add(item.name)
