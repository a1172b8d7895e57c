"""The importer's output: a graph whose operations may still write into their inputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from nnscaler.ir.graph import Graph


@dataclass(frozen=True)
class RawGraph:
    """A graph as the importer makes it.

    graph      may hold in-place operators
    storages   by tensor, a number for its memory; equal numbers alias
    """

    graph: Graph
    storages: Mapping[str, int]


@lru_cache(maxsize=8192)
def written_inputs(operator: str) -> tuple[int, ...]:
    """Positions of the arguments that an operator of torch writes into; empty for operators of ours."""
    overload = overload_of(operator)
    if overload is None:
        return ()
    arguments = overload._schema.arguments
    return tuple(i for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write)


@lru_cache(maxsize=8192)
def overload_of(operator: str) -> torch._ops.OpOverload | None:
    """torch's operator called `aten.linear.default`; None when there is none."""
    parts = operator.split(".")
    if len(parts) != 3:
        return None
    found = getattr(getattr(getattr(torch.ops, parts[0]), parts[1], None), parts[2], None)
    return found if isinstance(found, torch._ops.OpOverload) else None


def storage_of(value: Tensor) -> int:
    """Return a number for the memory behind a (fake) tensor, valid while it lives."""
    return value.untyped_storage()._cdata
