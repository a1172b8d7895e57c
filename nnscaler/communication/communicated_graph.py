"""The communicated graph: per stage, statements in order, with every conversion and message explicit."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

from op_registry.bind_and_localise_call import linear_sets
from op_registry.call import Call
from op_registry.registry import default_registry

from nnscaler.ir import gradients_and_kept_values
from nnscaler.ir.conversion_table_and_paths import ConversionStep
from nnscaler.ir.gradients_and_kept_values import kept_slots, reads_alone
from nnscaler.ir.graph import Graph, Operation, as_call
from nnscaler.ir.operation_placement import Chunk, PartitionedGraph, Placement, Stage
from nnscaler.ir.ring_rotation_calls import Circulates
from nnscaler.layout import Layout, Sharded


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
    circulates  (position of an axis, input slots) of operands that it passes around the ranks of the axis
    """

    operation: Operation
    placement: Placement
    call: Call
    inputs: tuple[Version, ...]
    outputs: tuple[Version | None, ...]
    circulates: Circulates = ()


@dataclass(frozen=True, slots=True)
class Convert:
    """One row of the conversion table on one axis. `chunk`: the region in each of whose pieces it is made."""

    source: Version
    target: Version
    move: ConversionStep
    chunk: Chunk | None = None


@dataclass(frozen=True, slots=True)
class Join:
    """The end of a region: what is read outside of it becomes whole on the axis of its pieces, by rows of the table.

    chunk     the region
    sources   results of every piece
    targets   the same tensors outside: sums, joined shards, and those of the first piece
    """

    chunk: Chunk
    sources: tuple[Version, ...]
    targets: tuple[Version, ...]


Statement = Compute | Convert | Join


def chunk_of(statement: Statement) -> Chunk | None:
    """Return the region in each of whose pieces a statement runs."""
    if isinstance(statement, Compute):
        return statement.placement.chunk
    return statement.chunk if isinstance(statement, Convert) else None


def times_of(statement: Statement, stage: Stage) -> int:
    """Return how often a statement runs in a pass of one micro-batch."""
    chunk = chunk_of(statement)
    return 1 if chunk is None else stage.sizes[stage.names.index(chunk.axis)]


def reads(statement: Statement) -> tuple[Version, ...]:
    """Return the versions that a statement reads."""
    if isinstance(statement, Compute):
        return statement.inputs
    return (statement.source,) if isinstance(statement, Convert) else statement.sources


def writes(statement: Statement) -> tuple[Version, ...]:
    """Return the versions that a statement makes."""
    if isinstance(statement, Compute):
        return tuple(v for v in statement.outputs if v is not None)
    return (statement.target,) if isinstance(statement, Convert) else statement.targets


@dataclass(frozen=True, slots=True)
class Stored:
    """A parameter, buffer or constant on a stage.

    tensor     its name
    variable   of the rank program
    at_rest    the layout that optimizer and checkpoint see
    leaf       the layout of the autograd leaf: `at_rest` with `Replicated` where the gradient's reduction is deferred
    reduce     the axes over which the gradient is summed at the end of the step
    copies     the stages that hold it
    scatter    when the gradient is divided as the tensor at rest is: after the "step", or each "micro_batch"
    """

    tensor: str
    variable: str
    at_rest: Layout
    leaf: Layout
    reduce: tuple[str, ...]
    copies: tuple[int, ...]
    scatter: str = "step"

    @property
    def rest(self) -> tuple[int, ...]:
        """Return the axes, by position, over which it is sharded between steps only."""
        pairs = zip(self.at_rest, self.leaf, strict=True)
        return tuple(i for i, (r, f) in enumerate(pairs) if isinstance(r, Sharded) and not isinstance(f, Sharded))

    def summed(self, names: Sequence[str]) -> tuple[str, ...]:
        """Return the axes over which the gradient is summed as a whole: those that do not divide it."""
        return tuple(axis for axis in self.reduce if names.index(axis) not in self.rest)


@dataclass(frozen=True, slots=True)
class Feed:
    """A piece of an input of the model, cut out of the global batch."""

    version: Version


@dataclass(frozen=True, slots=True)
class StageMessage:
    """A tensor that goes from one stage to a later one.

    Between meshes of one shape it goes rank to rank in position order, in one layout; between others, from `source` to
    `target` by regions.

    tensor         its name
    source_stage   that sends it
    target_stage   that reads it
    source         the version that is sent
    target         the version that is received
    needs_grad     whether its gradient comes back: where the loss depends on what the target stage makes of it
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
    results         (name, version) of what it returns besides the loss, as it is made
    """

    stage: Stage
    stored: tuple[Stored, ...]
    feeds: tuple[Feed, ...]
    prepare_feeds: tuple[Feed, ...]
    prepare: tuple[Statement, ...]
    prepared: tuple[Version, ...]
    forward: tuple[Statement, ...]
    receives: tuple[StageMessage, ...]
    sends: tuple[StageMessage, ...]
    loss: Version | None
    updates: tuple[tuple[str, Version], ...] = ()
    results: tuple[tuple[str, Version], ...] = ()

    @property
    def gradient(self) -> bool:
        """Say if a gradient arrives, so that the stage runs backward: of the loss, or of what it sends."""
        return self.loss is not None or any(message.needs_grad for message in self.sends)


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

    def on(self, device: int) -> tuple[StageProgram, ...]:
        """Return the programs of the stages of a pipeline device."""
        return tuple(program for program in self.stages if device in program.stage.devices)

    @property
    def without_gradient(self) -> frozenset[int]:
        """The stages that no gradient reaches: they run no backward."""
        return frozenset(s.stage.index for s in self.stages if not s.gradient)


# Which tensors get a gradient, by the uses that each stage makes of them.


def differentiated(graph: Graph, program: StageProgram) -> frozenset[str]:
    """Return the variables of `forward` that get a gradient: those from which the loss, or a message whose gradient
    comes back, is reached through operations that record one."""
    roots = {m.source.variable for m in program.sends if m.needs_grad}
    if program.loss is not None:
        roots.add(program.loss.variable)

    def needing(versions: tuple[Version, ...]) -> list[str]:
        return [v.variable for v in versions if graph.tensors[v.tensor].needs_grad]

    lines = [(needing(writes(statement)), needing(reads(statement))) for statement in program.forward]
    return gradients_and_kept_values.differentiated(lines, roots)


def with_gradients(graph: Graph, programs: Sequence[StageProgram]) -> tuple[StageProgram, ...]:
    """Return the programs, each message with its gradient where the stage that reads it has one.

    A tensor may need a gradient where one stage reads it, and none where another one does: under `torch.no_grad`, or
    for what is detached. Messages go to later stages, so that the last stage is known first.
    """
    found: list[StageProgram] = []
    back: set[str] = set()  # keys of messages whose gradients come back
    for program in reversed(programs):
        sends = tuple(replace(m, needs_grad=m.key in back) for m in program.sends)
        known = replace(program, sends=sends)
        live = differentiated(graph, known)
        receives = tuple(replace(m, needs_grad=m.target.variable in live) for m in program.receives)
        back.update(m.key for m in receives if m.needs_grad)
        found.append(replace(known, receives=receives))
    return tuple(reversed(found))


# Activations that operations keep, and conversions that a recomputed group repeats in backward.


def kept_inputs(graph: Graph, statement: Compute) -> tuple[Version, ...]:
    """Return the inputs whose values backward reads."""
    return tuple(statement.inputs[slot] for slot in _kept_slots(graph, statement))


def is_product(graph: Graph, statement: Compute) -> bool:
    """Return whether an operation is linear in each of its operands, so that its backward reads those alone."""
    return reads_alone(_kept_slots(graph, statement), _linear_sets(graph, statement), len(statement.inputs))


def _kept_slots(graph: Graph, statement: Compute) -> tuple[int, ...]:
    recorded = statement.operation.region.grad_enabled and any(
        v is not None and graph.tensors[v.tensor].needs_grad for v in statement.outputs
    )
    grads = [graph.tensors[v.tensor].needs_grad for v in statement.inputs]
    return kept_slots(statement.operation.operator, _linear_sets(graph, statement), grads) if recorded else ()


def _linear_sets(graph: Graph, statement: Compute) -> Collection[Collection[int]]:
    spec = default_registry().lookup(statement.operation.operator)
    # of the call of the graph: a shard's may be of another operator, with other arguments
    return () if spec is None else linear_sets(spec, as_call(statement.operation, graph.tensors))


def group_of(graph: Graph, statements: Sequence[Statement], position: int) -> str | None:
    """Return the recomputed group of a statement; None outside of any.

    A conversion belongs to a group when the operations around it do; that of a parameter, when the operation that reads
    it does, so that the gathered parameter need not be kept.
    """
    statement = statements[position]
    if isinstance(statement, Compute):
        return statement.placement.recompute
    if isinstance(statement, Join) or statement.chunk is not None:
        return None
    following = next((s for s in statements[position:] if isinstance(s, Compute)), None)
    if following is not None and graph.tensors[statement.source.tensor].role == "parameter":
        return following.placement.recompute
    previous = next((s for s in reversed(statements[:position]) if isinstance(s, Compute)), None)
    around = {None if s is None else s.placement.recompute for s in (previous, following)}
    return around.pop() if len(around) == 1 else None


def runs_again(statement: Compute) -> bool:
    """Return whether an operation is computed again in backward."""
    placement = statement.placement
    return placement.recompute is not None or (placement.chunk is not None and placement.chunk.recompute)


def again_in(graph: Graph, statements: Sequence[Statement], position: int) -> str | None:
    """Return the group, or the region with pieces, with which a statement is run again in backward; None if it is
    not."""
    chunk = chunk_of(statements[position])
    if chunk is not None:
        return chunk.name if chunk.recompute else None
    return group_of(graph, statements, position)


def repeated_in_backward(graph: Graph, statements: Sequence[Statement]) -> frozenset[int]:
    """Return the positions of statements that communicate in forward, and run again in backward."""
    again = ((i, statements[i]) for i in computed_again(graph, statements))
    return frozenset(i for i, s in again if isinstance(s, Convert) or (isinstance(s, Compute) and s.circulates))


def computed_again(graph: Graph, statements: Sequence[Statement]) -> frozenset[int]:
    """Return the positions of statements that run again in backward.

    A group is run again up to the last value that backward reads: the rest of it is not needed, nor is the operation
    that reads this value, where it is a product.
    """
    if not any(isinstance(s, Compute) and runs_again(s) for s in statements):
        return frozenset()
    found: set[int] = set()
    groups = ((again_in(graph, statements, i), i) for i in range(len(statements)))
    for group, members in groupby(groups, key=lambda entry: entry[0]):
        run = [i for _, i in members] if group is not None else []
        keeping = [(i, s) for i in run if isinstance(s := statements[i], Compute) and kept_inputs(graph, s)]
        if keeping:
            last, reader = keeping[-1]
            end = last if is_product(graph, reader) and not reader.circulates else last + 1
            found.update(i for i in run if i < end)
    return frozenset(found)
