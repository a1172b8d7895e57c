"""Plans: the list of transform steps that turns a graph into a partitioned graph. Serialisable.

A policy, a hand-written function and `plan.json` all produce the same value.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import accumulate, pairwise
from math import lcm, prod
from typing import Any, ClassVar

from nnscaler.errors import NnscalerError
from nnscaler.instructions import read_instruction
from nnscaler.ir.mixed_precision_dtypes import Precision
from nnscaler.records_as_json import with_tuples

DP, TP, PP = "dp", "tp", "pp"  # the axes that policies and the planner use: for the batch, operators, stages
SHARED = TP  # along which the devices of a stage on several of them lie
CP = "cp"  # context parallelism: for the tokens of a sequence
SHARD = "shard"  # the inner part of data parallelism, over which parameters rest where both are named
EP = "ep"  # the inner part of data parallelism, over which experts are divided where both are named
ZERO = 3  # the stage of ZeRO in which parameters rest in shards at all times


@dataclass(frozen=True, slots=True)
class SplitStep:
    """Split an identifier of the operations over a mesh axis, viewed as (outer, parts, inner).

    operations   names or patterns
    axis         the mesh axis
    identifier   of the annotation
    outer        how many blocks the identifier has, each of which is split
    sections     sizes of concatenated parts, each of which is split
    sizes        of unequal pieces, one per rank; without them, a size that does not divide is cut into pieces that
                 differ by one
    circulating  a second identifier, split alike, whose shards are passed around the axis; empty for none
    """

    kind: ClassVar[str] = "split"
    operations: tuple[str, ...]
    axis: str
    identifier: str
    outer: int = 1
    sections: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()
    circulating: str = ""


@dataclass(frozen=True, slots=True)
class ReplicateStep:
    """Run the operations whole on every rank of the axis.

    operations   names or patterns
    axis         the mesh axis
    deferred     whether their gradients stay partial sums
    partial      input slots with partial sums, on which the operations, being linear, run
    """

    kind: ClassVar[str] = "replicate"
    operations: tuple[str, ...]
    axis: str
    deferred: bool = False
    partial: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class AssignStep:
    """Run the operations on these pipeline stages (more than one: repeated on each)."""

    kind: ClassVar[str] = "assign"
    operations: tuple[str, ...]
    stages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class OrderStep:
    """Within a stage, run the first operations before the second ones."""

    kind: ClassVar[str] = "order"
    first: tuple[str, ...]
    second: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RecomputeStep:
    """Do not keep the activations of these operations; compute them again in backward."""

    kind: ClassVar[str] = "recompute"
    operations: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ChunkStep:
    """Run regions of operations in pieces, one after another on the same ranks (coshard: Lin et al., nnScaler, 2024).

    Consecutive operations are one region, and each module that a pattern names is one by itself. The pieces are an axis
    in time: one operation is split as said, the others of its region follow.

    operations   names or patterns
    axis         name of the axis in time; steps may share one that has as many parts
    identifier   of the first operation of the region that has it; `pattern:identifier` for that of another one
    parts        how many pieces
    recompute    whether each piece is computed again in backward, so that one piece's activations exist at a time
    """

    kind: ClassVar[str] = "chunk"
    operations: tuple[str, ...]
    axis: str
    identifier: str
    parts: int
    recompute: bool = True


@dataclass(frozen=True, slots=True)
class RestStep:
    """Keep parameters, and what the optimizer has of them, sharded over an axis whose ranks all read them (Rajbhandari
    et al., ZeRO, 2020).

    parameters   each named by itself, by a module that has it, or by a glob
    axis         of the mesh
    zero         3: between their uses, gathered where forward and backward read them; 1 and 2: between steps, gathered
                 before the first forward. Gradients are divided where they arise (3), after each backward (2), or last
    owned        of 1 and 2: each parameter rests whole on one of the ranks, its owner, and is divided over none; an
                 update that needs the whole of a matrix, as Muon's does, runs on its owner
    """

    kind: ClassVar[str] = "rest"
    parameters: tuple[str, ...]
    axis: str = DP
    zero: int = ZERO
    owned: bool = False


Axes = tuple[tuple[str, int], ...]  # (name, size)
_WHERE_GIVEN = ("stage_devices", "orders", "slices")  # entries of plan.json that plans without them do not have
Step = SplitStep | ReplicateStep | AssignStep | OrderStep | RecomputeStep | ChunkStep | RestStep
_KINDS: dict[str, type[Any]] = {
    s.kind: s for s in (SplitStep, ReplicateStep, AssignStep, OrderStep, RecomputeStep, ChunkStep, RestStep)
}


@dataclass(frozen=True, slots=True)
class Plan:
    """The steps that partition a graph, and the mesh for which they are.

    Operations (and patterns) name an operation, a module path or a glob over either. Later steps win.

    mesh            (axis, size) in rank order: `pp`, for pipeline devices, outermost, the last axis innermost
    steps           in order
    micro_batches   pieces in time of the batch of a rank
    schedule        name of the pipeline's order
    chunks          stages per device (interleaved), where `stage_devices` does not say where they are
    data_axes       axes whose operations, where no step says otherwise, follow the batch dim of the inputs
    notes           for people
    stage_axes      the axes of each pipeline device where they differ (`mesh` then has `pp` alone); the devices may
                    differ in rank count too
    precision       the dtypes in which the model runs; None: its own
    stage_devices   the pipeline devices of each stage, which run it together where they are several; (): stage s is on
                    device s modulo the devices
    orders          per pipeline device its passes in order, `F0.0 I0.0 W0.0`: they are the schedule, whatever its name
                    is; (): what the schedule of this name makes
    slices          the shares of tokens in which each micro-batch runs, one slice after another (TeraPipe); (): whole
    """

    mesh: Axes
    steps: tuple[Step, ...] = ()
    micro_batches: int = 1
    schedule: str = "1f1b"
    chunks: int = 1
    data_axes: tuple[str, ...] = (DP,)
    notes: tuple[str, ...] = field(default=())
    stage_axes: tuple[Axes, ...] = ()
    precision: Precision | None = None
    stage_devices: tuple[tuple[int, ...], ...] = ()
    orders: tuple[str, ...] = ()
    slices: tuple[int, ...] = ()

    @property
    def ranks(self) -> int:
        """How many ranks the plan is for, over all pipeline devices."""
        return sum(prod(size for _, size in axes) for axes in self.device_axes)

    def for_ranks(self, ranks: int) -> Plan:
        """Return the plan itself. Raises NnscalerError("plan_illegal") where it is for another number of ranks."""
        if self.ranks != ranks:
            message = f"the plan is for {self.ranks} ranks ({self.describe()}), and there are {ranks}"
            raise NnscalerError("plan_illegal", message, help=f"use --ranks {self.ranks}")
        return self

    @property
    def devices(self) -> int:
        """Pipeline devices: groups of ranks that run the same role."""
        return dict(self.mesh).get(PP, 1)

    @property
    def stages(self) -> int:
        """How many stages the pipeline has: 1 without one."""
        return len(self.stage_devices) or self.devices * self.chunks

    @property
    def places(self) -> tuple[tuple[int, ...], ...]:
        """The pipeline devices of each stage."""
        return self.stage_devices or stage_devices(self.devices, self.chunks)

    def with_micro_batches(self, number: int) -> Plan:
        """Return the plan for fewer micro-batches: orders of its own lose the passes of those that are left out.

        Raises NnscalerError("plan_illegal") where there are orders of its own, and none for so many micro-batches.
        """
        if number == self.micro_batches:
            return self
        if self.orders and number > self.micro_batches:
            message = f"the plan has orders for {self.micro_batches} micro-batches, and {number} are asked for"
            raise NnscalerError("plan_illegal", message, help=f"use {self.micro_batches} or fewer")

        def stays(word: str) -> bool:
            read = read_instruction(word)
            return read is None or read.micro < number

        orders = tuple(" ".join(word for word in order.split() if stays(word)) for order in self.orders)
        return replace(self, micro_batches=number, orders=orders)

    @property
    def device_axes(self) -> tuple[Axes, ...]:
        """Per pipeline device, the mesh axes inside of it."""
        alike = tuple((name, size) for name, size in self.mesh if name != PP)
        given = self.stage_axes or (alike,) * self.devices
        return tuple(tuple((name, size) for name, size in axes if size > 1) for axes in given)

    @property
    def device_ranks(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each pipeline device: consecutive ones."""
        ends = [0, *accumulate(prod(size for _, size in axes) for axes in self.device_axes)]
        return tuple(tuple(range(start, end)) for start, end in pairwise(ends))

    @property
    def mesh_axes(self) -> tuple[Axes, ...]:
        """Per stage, the axes of its mesh: those of each of its devices, which lie one after another along `SHARED`."""
        alone = [dict(axes) for axes in self.device_axes]
        found = ({**alone[at[0]], SHARED: alone[at[0]].get(SHARED, 1) * len(at)} for at in self.places)
        return tuple(tuple((name, size) for name, size in axes.items() if size > 1) for axes in found)

    @property
    def chunk_axes(self) -> Axes:
        """The axes in time of regions, in the order of the steps that name them first."""
        return tuple({step.axis: step.parts for step in self.steps if isinstance(step, ChunkStep)}.items())

    @property
    def times(self) -> tuple[int, ...]:
        """The size of each axis in time of a step: micro-batches, then slices where there are some."""
        return (self.micro_batches, len(self.slices)) if self.slices else (self.micro_batches,)

    @property
    def data_parts(self) -> int:
        """Number of parts of the batch before micro-batches: the same samples form one on every device."""
        return lcm(*(prod(size for name, size in axes if name in self.data_axes) for axes in self.device_axes))

    def describe(self) -> str:
        """Return `dp=2 tp=2 pp=2`; `pp=2 (dp=2 | tp=3)` where the devices differ.

        It ends with `zero=3` where parameters rest in shards, `some` where not all do, and with the precision.
        """
        rest = [step for step in self.steps if isinstance(step, RestStep)]
        stages = "+".join(str(zero) for zero in sorted({step.zero for step in rest}))
        some = "" if any("*" in step.parameters for step in rest) else "some "
        zero = f" {some}zero={stages}{' owned' * all(step.owned for step in rest)}" if rest else ""
        zero += f" slices={slices_text(self.slices)}" if self.slices else ""
        zero += "" if self.precision is None else f" ({self.precision.describe()})"
        if self.stage_axes:
            return f"pp={self.devices} ({' | '.join(describe_axes(axes) for axes in self.device_axes)})" + zero
        return describe_axes(self.mesh) + zero

    def to_json(self) -> str:
        """Return the plan as text that `from_json` reads."""
        steps = [{"step": s.kind, **_told(s)} for s in self.steps]
        head = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("steps", "precision")}
        head = {k: v for k, v in head.items() if v != () or k not in _WHERE_GIVEN}
        if self.precision is not None:
            head["precision"] = asdict(self.precision)
        body = ",\n".join("  " + json.dumps(step) for step in steps)
        lines = [f' "{key}": {json.dumps(value)}' for key, value in head.items()]
        return "{\n" + ",\n".join([*lines, f' "steps": [\n{body}\n ]' if steps else ' "steps": []']) + "\n}\n"

    @staticmethod
    def from_json(text: str, source: str = "plan.json") -> Plan:
        """Read a plan. Raises NnscalerError("plan_illegal") naming the entry that is wrong."""
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise NnscalerError("plan_illegal", f"{source} is not JSON: {error}") from None
        if not isinstance(data, dict) or "mesh" not in data:
            raise NnscalerError("plan_illegal", f'{source} has no "mesh"', help='"mesh": [["dp", 2], ["tp", 2]]')
        known = {f.name for f in fields(Plan)}
        unknown = sorted(set(data) - known)
        if unknown:
            raise NnscalerError("plan_illegal", f"{source}: unknown entries {unknown}", help=f"known: {sorted(known)}")
        if not isinstance(data.get("steps", []), list):
            raise NnscalerError("plan_illegal", f"{source}: steps are {data['steps']!r}, not a list of steps")
        steps = tuple(_step(entry, i, source) for i, entry in enumerate(data.get("steps", ())))
        simple = {k: with_tuples(v) for k, v in data.items() if k != "steps"}
        every = simple.get("stage_axes", ())
        for axes in (simple["mesh"], *(every if isinstance(every, tuple) else (every,))):
            if not _are_axes(axes):
                help = 'axes are pairs: [["dp", 2], ["tp", 2]]'
                raise NnscalerError("plan_illegal", f"{source}: {json.dumps(axes)} are not mesh axes", help=help)
        _check_types(Plan, simple, source)
        if simple.get("precision") is not None:
            simple["precision"] = _precision(simple["precision"], source)
        return Plan(**{**simple, "steps": steps})


def slices_text(shares: Sequence[int]) -> str:
    """Return shares as a specification has them: `4` where they are equal, else `3:3:2`."""
    return str(len(shares)) if len(set(shares)) == 1 else ":".join(map(str, shares))


def stage_devices(devices: int, chunks: int) -> tuple[tuple[int, ...], ...]:
    """Return the devices of each of `devices * chunks` stages that go round: stage s is on device s % devices."""
    return tuple((stage % devices,) for stage in range(devices * chunks))


def _told(step: Step) -> dict[str, Any]:
    """Return the fields of a step without empty lists and texts, and without false ones that are false by default."""
    on = {f.name for f in fields(step) if f.default is True}
    return {k: v for k, v in asdict(step).items() if v not in ((), False, "") or k in on}


def _precision(value: Any, source: str) -> Precision:
    known = [f.name for f in fields(Precision)]
    if not isinstance(value, dict) or not set(value) <= set(known):
        raise NnscalerError("plan_illegal", f"{source}: precision is {json.dumps(value)}", help=f"its keys: {known}")
    return Precision(**value)


def describe_axes(axes: Axes) -> str:
    """Return `dp=2 tp=2`."""
    sizes = dict(axes)
    if sizes.get(EP, 1) > 1:  # users say how many ranks share the batch, and how many of them the experts
        axes = ((DP, sizes.get(DP, 1) * sizes[EP]), *(axis for axis in axes if axis[0] != DP))
    return " ".join(f"{name}={size}" for name, size in axes if size > 1) or "1 rank"


def _are_axes(value: Any) -> bool:
    """Return whether this is a tuple of distinct names with sizes."""
    if not isinstance(value, tuple) or not all(isinstance(axis, tuple) and len(axis) == 2 for axis in value):
        return False
    good = all(isinstance(name, str) and isinstance(size, int) and size >= 1 for name, size in value)
    return good and len({name for name, _ in value}) == len(value)


def _step(entry: Mapping[str, Any], position: int, source: str) -> Step:
    kind = _KINDS.get(entry.get("step", "")) if isinstance(entry, Mapping) else None
    if kind is None:
        raise NnscalerError("plan_illegal", f"{source}: step {position} is {entry!r}", help=f"steps: {sorted(_KINDS)}")
    values = {k: with_tuples(v) for k, v in entry.items() if k != "step"}
    for name in ("operations", "first", "second", "parameters"):
        if isinstance(values.get(name), str):
            values[name] = (values[name],)
    _check_types(kind, values, f"{source}: step {position} ({entry['step']})")
    if kind is RestStep and values.get("zero", ZERO) not in (1, 2, 3):
        message = f"{source}: step {position} (rest): zero is {values['zero']}, and ZeRO has the stages 1, 2 and 3"
        raise NnscalerError("plan_illegal", message)
    if kind is RestStep and values.get("owned") and values.get("zero", ZERO) == ZERO:
        message = f"{source}: step {position} (rest): owned with zero=3, which gathers parameters where they are read"
        raise NnscalerError("plan_illegal", message, help="zero=1 or zero=2 let parameters rest on owners")
    try:
        return kind(**values)  # type: ignore[no-any-return]
    except TypeError as error:
        raise NnscalerError(
            "plan_illegal",
            f"{source}: step {position} ({entry['step']}): {str(error).split(') ')[-1]}",
            help=f"a {entry['step']} step has: {[f.name for f in fields(kind)]}",
        ) from None


_TYPES: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "int": ("a whole number", lambda v: isinstance(v, int) and not isinstance(v, bool)),
    "bool": ("true or false", lambda v: isinstance(v, bool)),
    "str": ("a text", lambda v: isinstance(v, str)),
    "tuple[str, ...]": ("a list of texts", lambda v: isinstance(v, tuple) and all(isinstance(i, str) for i in v)),
    "tuple[int, ...]": ("a list of numbers", lambda v: isinstance(v, tuple) and all(isinstance(i, int) for i in v)),
    "tuple[tuple[int, ...], ...]": (
        "a list of lists of numbers, such as [[0], [1], [1], [0]]",
        lambda v: isinstance(v, tuple) and all(isinstance(i, tuple) and all(type(n) is int for n in i) for i in v),
    ),
}


def _check_types(kind: type[Any], values: Mapping[str, Any], source: str) -> None:
    """Check the types of fields. Raises NnscalerError("plan_illegal") for the first value that does not fit."""
    for f in fields(kind):
        what, good = _TYPES.get(str(f.type), ("", lambda _: True))
        if f.name in values and not good(values[f.name]):
            raise NnscalerError("plan_illegal", f"{source}: {f.name} is {json.dumps(values[f.name])}, not {what}")
