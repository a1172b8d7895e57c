"""Constraints on sizes, and on the choices of named operations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from nnscaler.errors import NnscalerError
from nnscaler.ir.graph import Graph, Operation
from nnscaler.ir.operation_annotations import Signature
from nnscaler.ir.operation_placement import Choice, Split
from nnscaler.planning.parallel_configurations import Configuration
from nnscaler.scheduling.registry import SCHEDULES, get_schedule
from nnscaler.scheduling.schedule import ScheduleKind
from nnscaler.transform.plan import ZERO
from nnscaler.transform.select_operations import select

Identifiers = Mapping[str, frozenset[str]]  # by operation, identifiers of its annotation


@dataclass(frozen=True)
class SharedEnds:
    """The operations of the two stages that all devices of an interlaced pipeline run.

    first  names of those before the layers
    last   names of those after them, with all that reads their results
    cut    of those that read a large parameter, the identifiers one of which is split over all ranks
    """

    first: frozenset[str]
    last: frozenset[str]
    cut: Identifiers

    @property
    def both(self) -> frozenset[str]:
        return self.first | self.last


# Constraints: predicates over configurations and choices, and their conjunction.


@dataclass(frozen=True)
class Constraint:
    """
    text      as the user would say it
    permits   which sizes of axes, micro-batches and recomputation
    allows    which choices of operations on tp
    also      choices that are considered for operations besides those that are searched
    together  groups of operations that take the same choice, and run on one pipeline device
    at        (operation, pipeline device): where it runs; -1 is the last one
    ends      what all pipeline devices run together, split over all of their ranks
    parts     the constraints that it is made of; empty for one that stands for itself
    schedules the names of those that are asked for
    """

    text: str
    permits: Callable[[Configuration], bool] = lambda _: True
    allows: Callable[[Operation, Choice], bool] = lambda _op, _choice: True
    also: Mapping[str, Choice] = field(default_factory=dict)
    together: tuple[tuple[str, ...], ...] = ()
    at: tuple[tuple[str, int], ...] = ()
    ends: SharedEnds | None = None
    parts: tuple[Constraint, ...] = ()
    schedules: frozenset[str] = frozenset()

    @property
    def each(self) -> tuple[Constraint, ...]:
        """The constraints that stand for themselves."""
        return tuple(one for part in self.parts for one in part.each) or (self,)


def all_of(constraints: Iterable[Constraint]) -> Constraint:
    """Return the conjunction of constraints. Raises NnscalerError("plan_illegal") for two interlaced pipelines."""
    every = tuple(constraints)
    ends = [c.ends for c in every if c.ends is not None]
    if len(ends) > 1:
        told = " and ".join(repr(c.text) for c in every if c.ends is not None)
        raise NnscalerError(
            "plan_illegal", f"the constraints {told} are both of a pipeline", help="name all of it in one"
        )
    return Constraint(
        "; ".join(c.text for c in every),
        lambda configuration: all(c.permits(configuration) for c in every),
        lambda op, choice: all(c.allows(op, choice) for c in every),
        dict(item for c in every for item in c.also.items()),
        tuple(group for c in every for group in c.together),
        tuple(place for c in every for place in c.at),
        ends[0] if ends else None,
        every,
        frozenset(name for c in every for name in c.schedules),
    )


def sizes(schedule: str | ScheduleKind | None = None, **wanted: int | bool) -> Constraint:
    """Fix numbers: of `dp`, `cp`, `tp`, `pp`, `ep`, `micro_batches`, whether to `recompute`, and the stage of ZeRO
    over dp (`zero`: 0 to 3; False is none, and True the one in which parameters rest in shards); and the `schedule` of
    pipelines: `zb-v`, `interleaved` with any number of stages on a device, or `interleaved:3`. Raises
    NnscalerError("unknown_schedule")."""
    kind = get_schedule(schedule) if isinstance(schedule, str) else schedule
    told = {} if kind is None else {"schedule": schedule if isinstance(schedule, str) else kind.name}
    text = ", ".join(f"{name}={value}" for name, value in {**told, **wanted}.items())
    exact = {name: ZERO if name == "zero" and value is True else value for name, value in wanted.items()}

    def permits(c: Configuration) -> bool:
        if kind is not None and c.pp > 1:
            any_number = kind is SCHEDULES.get(kind.name)  # else it is one with so many stages on a device
            if c.schedule.name != kind.name or not (any_number or c.chunks == kind.chunks):
                return False
        return all(getattr(c, name) == value for name, value in exact.items())

    return Constraint(text, permits, schedules=frozenset() if kind is None else frozenset({kind.name}))


def data_parallel() -> Constraint:
    """Split the batch over all ranks, and nothing else."""
    return Constraint("data parallel", lambda c: c.tp == c.pp == c.cp == c.ep == 1)


def tensor_parallel() -> Constraint:
    """Split operations over all ranks."""
    return Constraint("tensor parallel", lambda c: c.dp == c.pp == c.cp == 1)


def pipeline() -> Constraint:
    """Let every rank run a stage."""
    return Constraint("pipeline", lambda c: c.dp == c.tp == c.cp == 1)


def replicate(graph: Graph, operations: Sequence[str]) -> Constraint:
    """Run these operations whole on every rank of tp. Raises NnscalerError("plan_illegal") for unknown names."""
    named = {op.name for op in select(graph, tuple(operations))}
    return Constraint(
        f"replicate {', '.join(operations)}", allows=lambda op, choice: op.name not in named or not _splits(choice)
    )


def forbid(graph: Graph, operations: Sequence[str], identifier: str) -> Constraint:
    """Do not split this identifier of these operations. Raises NnscalerError("plan_illegal") for unknown names."""
    named = {op.name for op in select(graph, tuple(operations))}
    return Constraint(
        f"forbid {identifier} of {', '.join(operations)}",
        allows=lambda op, choice: op.name not in named or not _splits(choice, identifier),
    )


def require(graph: Graph, operations: Sequence[str], identifier: str) -> Constraint:
    """Split this identifier of these operations on tp. Raises NnscalerError("plan_illegal") for unknown names."""
    named = {op.name for op in select(graph, tuple(operations))}
    return Constraint(
        f"require {identifier} of {', '.join(operations)}",
        lambda c: c.tp > 1,
        lambda op, choice: op.name not in named or _splits(choice, identifier),
    )


def together(graph: Graph, operations: Sequence[str]) -> Constraint:
    """Make the same choice on tp for these operations, and run them on one pipeline device.

    Choices are the same if both are whole, on partial sums, or split along the identifier of one name. Raises
    NnscalerError("plan_illegal") for unknown names, and for fewer than two operations with a gradient.
    """
    group = _trained(graph, operations)
    text = f"{', '.join(operations)} together"
    if len(group) < 2:
        help = "name two or more, or a module that has as many"
        raise NnscalerError("plan_illegal", f"{text}: these are {len(group)} operations with a gradient", help=help)
    return Constraint(text, together=(group,))


def on_device(graph: Graph, operations: Sequence[str], device: int) -> Constraint:
    """Run these operations on this pipeline device, counted from 0, or from the last one, which is -1.

    Raises NnscalerError("plan_illegal") for unknown names, and for operations without gradient, which run wherever they
    are read.
    """
    group = _trained(graph, operations)
    text = f"{', '.join(operations)} on device {device}"
    if not group:
        help = "name operations that they are computed with"
        raise NnscalerError(
            "plan_illegal", f"{text}: nothing there has a gradient: it runs where it is read", help=help
        )
    return Constraint(text, lambda c: -c.pp <= device < c.pp, at=tuple((name, device) for name in group))


def over_all_devices(graph: Graph, signatures: Mapping[str, Signature], operations: Sequence[str]) -> Constraint:
    """Split the parameters of these operations over all ranks.

    tp then has all ranks, since dp holds a parameter whole, and a pipeline gives it to the ranks of one stage. Raises
    NnscalerError("plan_illegal") for unknown names, and for operations without a parameter that can be split.
    """
    shards = identifiers_of_parameters(graph, signatures, select(graph, tuple(operations)))
    text = f"{', '.join(operations)} over all devices"
    if not shards:
        help = "name an embedding, a linear, or a module that has one"
        raise NnscalerError("plan_illegal", f"{text}: no parameter that is read there can be split", help=help)

    def allows(op: Operation, choice: Choice) -> bool:
        return op.name not in shards or (isinstance(choice, Split) and choice.identifier in shards[op.name])

    return Constraint(text, lambda c: 1 < c.tp == c.ranks, allows)


def identifiers_of_parameters(
    graph: Graph, signatures: Mapping[str, Signature], operations: Iterable[Operation]
) -> Identifiers:
    """Return the identifiers of parameters that these operations read, which may be split; of those that have some."""
    found: dict[str, frozenset[str]] = {}
    for op in operations:
        bound = signatures[op.name].bound
        if bound is not None:
            read = zip(op.inputs, bound.inputs, strict=True)
            held = {i for name, o in read if o and graph.tensors[name].role == "parameter" for i in o.identifiers()}
            may = held & set(signatures[op.name].identifiers)
            if may:
                found[op.name] = frozenset(may)
    return found


def _splits(choice: Choice, identifier: str | None = None) -> bool:
    return isinstance(choice, Split) and identifier in (None, choice.identifier)


def _trained(graph: Graph, operations: Sequence[str]) -> tuple[str, ...]:
    """Return the operations of these names that need a gradient."""
    return tuple(
        op.name
        for op in select(graph, tuple(operations))
        if any(graph.tensors[n].needs_grad for n in (*op.inputs, *op.outputs) if n is not None)
    )
