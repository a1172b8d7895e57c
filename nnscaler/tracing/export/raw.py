"""The importer's output: a graph whose operations may still write into their inputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from torch import Tensor

from op_registry.torch_schema import schema_of

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
    schema = schema_of(operator)
    arguments = () if schema is None else schema.arguments
    return tuple(i for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write)


def storage_of(value: Tensor) -> int:
    """Return a number for the memory behind a (fake) tensor, valid while it lives."""
    return value.untyped_storage()._cdata
