"""The obligations of a plan's proof: operators, run under the plan's choices, make shards of their whole results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from nnscaler.ir.placement import Choice, PartitionedGraph
from nnscaler.ir.signature import Signature


class Obligation(Protocol):
    """One operator, called so, run under one choice per axis. `axes`: (name, size), the micro-batch axis last.

    `uses`: how many statements of the program rely on it. `example`: the name of one operation of the graph.
    """

    @property
    def signature(self) -> Signature: ...
    @property
    def choices(self) -> tuple[Choice, ...]: ...
    @property
    def axes(self) -> tuple[tuple[str, int], ...]: ...
    @property
    def uses(self) -> int: ...
    @property
    def example(self) -> str: ...


@dataclass(frozen=True)
class Stated:
    """An obligation of a partitioned graph."""

    signature: Signature
    choices: tuple[Choice, ...]
    axes: tuple[tuple[str, int], ...]
    uses: int
    example: str


def obligations_of(partitioned: PartitionedGraph, signatures: Mapping[str, Signature]) -> tuple[Stated, ...]:
    """Return the distinct obligations of a partitioned graph: one per call and choices, not per layer,
    stage or rank."""
    found: dict[object, Stated] = {}
    for op in partitioned.graph.operations:
        placement = partitioned.placements[op.name]
        signature = signatures[op.name]
        for index in placement.stages:
            stage = partitioned.stages[index]
            axes = tuple(zip(stage.names, stage.sizes, strict=True))
            key = (repr(signature.call), placement.choices[index], axes)
            known = found.get(key)
            found[key] = (
                Stated(signature, placement.choices[index], axes, 1, op.name)
                if known is None
                else replace(known, uses=known.uses + 1)
            )
    return tuple(found.values())
