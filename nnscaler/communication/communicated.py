"""The communicated graph: per stage, statements in order, with every conversion and message explicit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from op_registry.call import Call

from nnscaler.ir.conversion import Move
from nnscaler.ir.layout import Layout
from nnscaler.ir.operation import Operation
from nnscaler.ir.placement import PartitionedGraph, Placement, Stage


@dataclass(frozen=True, slots=True)
class Version:
    """One layout in which a stage holds a logical tensor, and the variable of the rank program that has it."""

    tensor: str
    layout: Layout
    variable: str


@dataclass(frozen=True, slots=True)
class Compute:
    """One operation on shards. `call` has the arguments for one shard."""

    operation: Operation
    placement: Placement
    call: Call
    inputs: tuple[Version, ...]
    outputs: tuple[Version | None, ...]


@dataclass(frozen=True, slots=True)
class Convert:
    """One row of the conversion table on one axis."""

    source: Version
    target: Version
    move: Move


Statement = Compute | Convert


def reads(statement: Statement) -> tuple[Version, ...]:
    """Versions that a statement reads."""
    return statement.inputs if isinstance(statement, Compute) else (statement.source,)


def writes(statement: Statement) -> tuple[Version, ...]:
    """Versions that a statement makes."""
    if isinstance(statement, Compute):
        return tuple(v for v in statement.outputs if v is not None)
    return (statement.target,)


@dataclass(frozen=True, slots=True)
class Stored:
    """A parameter, buffer or constant on a stage. `leaf` is the layout of the autograd leaf: `at_rest` with
    `Replicated` where the reduction of the gradient is deferred to the end of the step, over the axes `reduce`.
    `copies`: the stages that hold it."""

    tensor: str
    variable: str
    at_rest: Layout
    leaf: Layout
    reduce: tuple[str, ...]
    copies: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Feed:
    """A piece of an input of the model, cut out of the global batch."""

    version: Version


@dataclass(frozen=True, slots=True)
class Message:
    """A tensor that goes from one stage to a later one, rank to rank in position order, in one layout; or, between
    meshes of different shape, from `source` to `target` by regions."""

    tensor: str
    source_stage: int
    target_stage: int
    source: Version
    target: Version
    needs_grad: bool

    @property
    def key(self) -> str:
        """The tensor and the stage that reads it."""
        return f"{self.tensor}@{self.target_stage}"


@dataclass(frozen=True, slots=True)
class StageProgram:
    """What one stage does. `prepare` runs once per step, `forward` once per micro-batch."""

    stage: Stage
    stored: tuple[Stored, ...]
    feeds: tuple[Feed, ...]
    prepare_feeds: tuple[Feed, ...]
    prepare: tuple[Statement, ...]
    prepared: tuple[Version, ...]
    forward: tuple[Statement, ...]
    receives: tuple[Message, ...]
    sends: tuple[Message, ...]
    loss: Version | None
    updates: tuple[tuple[str, Version], ...] = ()


@dataclass(frozen=True)
class CommunicatedGraph:
    """A partitioned graph with its communication. `unused`: parameters that no operation reads."""

    partitioned: PartitionedGraph
    stages: tuple[StageProgram, ...]
    volumes: Mapping[tuple[str, str], tuple[int, float]] = field(default_factory=dict)

    @property
    def edges(self) -> frozenset[tuple[int, int]]:
        """(producing stage, consuming stage) of every message."""
        return frozenset((m.source_stage, m.target_stage) for s in self.stages for m in s.receives)
