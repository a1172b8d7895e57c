"""The communicated graph: per stage, statements in order, with every conversion and message explicit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from op_registry.call import Call

from nnscaler.ir.conversion import Move
from nnscaler.ir.graph import Operation
from nnscaler.ir.layout import Layout
from nnscaler.ir.placement import PartitionedGraph, Placement, Stage


@dataclass(frozen=True, slots=True)
class Version:
    """One layout in which a stage holds a logical tensor.

    tensor     its name
    layout     a state per axis of the stage
    variable   of the rank program that has it
    """

    tensor: str
    layout: Layout
    variable: str


@dataclass(frozen=True, slots=True)
class Compute:
    """One operation on shards.

    operation   of the graph
    placement   its stages and choices
    call        with the arguments for one shard
    inputs      by slot
    outputs     by position; None for one that is not used
    """

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
    """Return the versions that a statement reads."""
    return statement.inputs if isinstance(statement, Compute) else (statement.source,)


def writes(statement: Statement) -> tuple[Version, ...]:
    """Return the versions that a statement makes."""
    if isinstance(statement, Compute):
        return tuple(v for v in statement.outputs if v is not None)
    return (statement.target,)


@dataclass(frozen=True, slots=True)
class Stored:
    """A parameter, buffer or constant on a stage.

    tensor     its name
    variable   of the rank program
    at_rest    the layout that optimizer and checkpoint see
    leaf       the layout of the autograd leaf: `at_rest` with `Replicated` where the gradient's reduction is deferred
    reduce     the axes over which the gradient is summed at the end of the step
    copies     the stages that hold it
    """

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
    """A tensor that goes from one stage to a later one.

    Between meshes of one shape it goes rank to rank in position order, in one layout; between others, from `source` to
    `target` by regions.

    tensor         its name
    source_stage   that sends it
    target_stage   that reads it
    source         the version that is sent
    target         the version that is received
    needs_grad     whether its gradient comes back
    """

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
    """The program of one stage.

    stage           its mesh and device
    stored          parameters, buffers and constants
    feeds           pieces of inputs that `forward` reads
    prepare_feeds   pieces of inputs that `prepare` reads
    prepare         statements that run once per step
    prepared        versions that `prepare` hands to `forward`
    forward         statements that run once per micro-batch
    receives        messages from earlier stages
    sends           messages to later stages
    loss            on the stage that computes it
    updates         (buffer, its new value)
    """

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
    """A partitioned graph with its communication.

    partitioned   the graph without communication
    stages        one program per stage
    volumes       (axis, collective) -> (calls, elements sent by one rank) in one step
    """

    partitioned: PartitionedGraph
    stages: tuple[StageProgram, ...]
    volumes: Mapping[tuple[str, str], tuple[int, float]] = field(default_factory=dict)

    @property
    def edges(self) -> frozenset[tuple[int, int]]:
        """Pairs (producing stage, consuming stage) of all messages."""
        return frozenset((m.source_stage, m.target_stage) for s in self.stages for m in s.receives)
