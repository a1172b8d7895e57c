"""One way to run a graph on ranks, for which the choices of operations are searched: the question, not the answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from nnscaler.ir.graph import Graph
from nnscaler.ir.operation_annotations import Signature
from nnscaler.ir.placement import Choice
from nnscaler.layout import MICRO, Layout, local_shape
from nnscaler.planning.context_and_expert_parallel import context_parallel, expert_steps
from nnscaler.planning.cost.model_protocol import AxisPlace
from nnscaler.transform.complete_plan import follow_batch
from nnscaler.transform.plan import CP, DP, EP, Axes, Plan, Step


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
