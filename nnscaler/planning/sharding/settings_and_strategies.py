"""The settings in which a graph's choices are searched (axes, what is given on them), and each operation's
strategies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product

from nnscaler.errors import NnscalerError
from nnscaler.ir.derive_operand_layouts import explain_illegal_choices, input_layouts, output_layouts
from nnscaler.ir.graph import Graph, Operation
from nnscaler.ir.operation_annotations import Signature
from nnscaler.ir.operation_placement import Choice, RunInvariant, RunPartial, RunReplicated, Split
from nnscaler.layout import MICRO, Layout, local_shape
from nnscaler.planning.context_and_expert_parallel import context_parallel, expert_steps
from nnscaler.planning.cost.model_protocol import AxisPlace
from nnscaler.transform.complete_plan import batch_of, batch_states, follow_batch
from nnscaler.transform.plan import CP, DP, EP, Axes, Plan, Step
from nnscaler.transform.propagate_choices import all_candidates, reach


@dataclass(frozen=True)
class Setting:
    """
    searched       the axis whose choices are searched; () where there is none
    given          other mesh axes, which follow the batch: micro-batches are parts of it as ranks of dp are
    made           the choices on `given`, then on micro-batches, by operation; equal ones are one object
    places         by axis, where its groups of ranks lie in the cluster
    """

    searched: Axes
    given: Axes
    made: Mapping[str, tuple[Choice, ...]]
    places: Mapping[str, AxisPlace]

    @cached_property
    def axes(self) -> Axes:
        """The axes of layouts here: searched, given, micro-batches."""
        return (*self.searched, *self.given, (MICRO, 1))

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        return tuple(size for _, size in self.axes)

    def local(self, layout: Layout, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the largest shard of a rank in one micro-batch."""
        return local_shape(layout, self.sizes, shape)


def given_axes(
    graph: Graph,
    signatures: Mapping[str, Signature],
    parts: int,
    ep: int,
    cp: int,
    places: Mapping[str, AxisPlace],
) -> Setting:
    """Return the setting in which the batch is cut into `parts`, `ep` of them divide the experts, and `cp` ranks each
    sequence, on the last axis.

    Raises NnscalerError: plan_illegal where the batch does not divide, micro_batches_coupled.
    """
    mesh: Axes = ((DP, parts),) if parts > 1 else ()
    steps: tuple[Step, ...] = ()
    if ep > 1:
        mesh = ((DP, parts // ep), (EP, ep))
        steps = expert_steps(graph, signatures, Plan(mesh, data_axes=(DP, EP)), mesh, ep)
    plan = Plan(mesh, steps, data_axes=tuple(name for name, _ in mesh))
    made, axes = follow_batch(graph, signatures, plan, mesh)
    order = [[name for name, _ in axes].index(name) for name in (*(n for n, _ in mesh), MICRO)]
    taken = {name: tuple(choices[i] for i in order) for name, choices in made.items()}
    setting = Setting((), mesh, _shared(taken), dict(places))
    return setting if cp == 1 else _with_tokens(graph, signatures, setting, cp)


def _shared(made: Mapping[str, tuple[Choice, ...]]) -> dict[str, tuple[Choice, ...]]:
    """Return the choices by operation, equal ones as one object."""
    same: dict[tuple[Choice, ...], tuple[Choice, ...]] = {}
    return {name: same.setdefault(choices, choices) for name, choices in made.items()}


def _with_tokens(graph: Graph, signatures: Mapping[str, Signature], setting: Setting, cp: int) -> Setting:
    choices, _ = context_parallel(graph, signatures, CP, cp, setting.made, setting.axes)
    joined = {name: (*before[:-1], choices[name], before[-1]) for name, before in setting.made.items()}
    return replace(setting, given=(*setting.given, (CP, cp)), made=_shared(joined))


# The strategies of an operation: one legal choice per searched axis, each with the layouts that it needs and makes.

AxisOptions = Mapping[str, tuple[Choice, ...]]  # operation -> choices on one axis


@dataclass(frozen=True, slots=True)
class Strategy:
    """One way to run an operation.

    choices   per searched axis
    needs     layouts of its input slots, on all axes
    makes     layouts of its outputs, on all axes
    """

    choices: tuple[Choice, ...]
    needs: tuple[Layout, ...]
    makes: tuple[Layout, ...]


def axis_options(graph: Graph, signatures: Mapping[str, Signature], parts: int) -> dict[str, tuple[Choice, ...]]:
    """Return the choices of every operation on an axis of `parts` that are searched, first the one that runs it whole.

    Splits that the batch dim of the inputs reaches are left to the axes that have the batch. An operation that no
    gradient reaches (masks, positions, labels) runs whole: to cut a piece out of its result costs nothing.
    """
    candidates = all_candidates(graph, signatures, parts)
    batch = _reached(graph, signatures, parts)
    result: dict[str, tuple[Choice, ...]] = {}
    same: dict[tuple[Choice, ...], tuple[Choice, ...]] = {}
    for op in graph.operations:
        choices: list[Choice] = [RunInvariant()]
        if any(graph.tensors[n].needs_grad for n in (*op.inputs, *op.outputs) if n is not None):
            choices.append(RunReplicated())
            choices += [c for c in candidates[op.name] if c not in batch[op.name]]
            choices += [RunPartial(slots) for slots in signatures[op.name].linear]
        made = tuple(choices)
        result[op.name] = same.setdefault(made, made)
    return result


def _reached(graph: Graph, signatures: Mapping[str, Signature], parts: int) -> Mapping[str, frozenset[Split]]:
    """Return the splits that follow from one of the batch."""
    states = batch_states(graph, DP, parts, 1) if parts <= batch_of(graph) else {}
    return {name: frozenset(splits) for name, splits in reach(graph, signatures, parts, states).items()}


class Strategies:
    """The strategies of operations in one setting. Equal operations of repeated layers share theirs."""

    def __init__(
        self,
        graph: Graph,
        signatures: Mapping[str, Signature],
        setting: Setting,
        options: Sequence[AxisOptions],
    ) -> None:
        self._graph, self._signatures, self._setting, self._options = graph, signatures, setting, options
        self._known: dict[object, tuple[Strategy, ...]] = {}
        self._by_name: dict[str, tuple[Strategy, ...]] = {}

    def of(self, op: Operation) -> tuple[Strategy, ...]:
        """Return the strategies with distinct layouts, first the one that runs whole.

        Raises NnscalerError("plan_illegal") if none is left.
        """
        if op.name in self._by_name:
            return self._by_name[op.name]
        graph, signature = self._graph, self._signatures[op.name]
        options = tuple(per_axis[op.name] for per_axis in self._options)
        made = self._setting.made[op.name]
        grads = tuple(None if n is None else graph.tensors[n].needs_grad for n in (*op.inputs, *op.outputs))
        key = (id(signature), *map(id, options), id(made), grads)  # equal ones are the same: `axis_options`, `Setting`
        if key not in self._known:
            self._known[key] = tuple(self._make(op, signature, options, made))
        self._by_name[op.name] = self._known[key]
        return self._known[key]

    def _make(
        self, op: Operation, signature: Signature, options: Sequence[tuple[Choice, ...]], made: tuple[Choice, ...]
    ) -> list[Strategy]:
        found: dict[object, Strategy] = {}
        for choices in product(*options):
            every = (*choices, *made)
            if explain_illegal_choices(self._graph, op, signature, every, self._setting.axes):
                continue
            needs = input_layouts(self._graph, op, signature, every)
            makes = output_layouts(self._graph, op, signature, every)
            found.setdefault((needs, makes), Strategy(choices, needs, makes))
        if not found:
            axes = ", ".join(f"{name}={size}" for name, size in self._setting.searched) or "one rank"
            raise NnscalerError(
                "plan_illegal",
                f"the constraints leave {op.name} ({op.operator}) no choice on {axes}",
                where=op.where,
                help="`nnscaler plan MODEL --explain OP` without constraints lists its choices",
            )
        return list(found.values())


def alike(first: Choice, second: Choice) -> bool:
    """Return whether two choices are the same: both whole, both on partial sums, or splits of one identifier by
    name."""
    if isinstance(first, Split) and isinstance(second, Split):
        return first.identifier == second.identifier
    whole = (RunInvariant, RunReplicated)
    if isinstance(first, whole) or isinstance(second, whole):
        return isinstance(first, whole) and isinstance(second, whole)
    return type(first) is type(second)
