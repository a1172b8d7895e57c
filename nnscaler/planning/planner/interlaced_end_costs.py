"""Price the shared ends of an interlaced pipeline on each rank, and search their choices.

All devices run them together, so that in a configuration they are a problem of their own: over tp x pp ranks, with
whole tensors on the borders to the layers. Their choices are the fastest ones; of these a rank holds a part of each
large parameter whatever they are, which is what the layers' memory is short of.
"""

from __future__ import annotations

from dataclasses import dataclass

from nnscaler.ir.graph import Operation, element_bytes
from nnscaler.ir.operation_placement import Choice, RunInvariant, Split
from nnscaler.planning.constraints.size_and_choice_constraints import Constraint, SharedEnds
from nnscaler.planning.cost.collectives import seconds_per_byte
from nnscaler.planning.cost.model_protocol import AxisPlace
from nnscaler.planning.parallel_configurations import Configuration
from nnscaler.planning.planner.planner_graph import EndsEstimate, PlanningCache
from nnscaler.planning.sharding.build_problem import Weights, once_at, pose
from nnscaler.planning.solver.solve import solve
from nnscaler.transform.plan import DP, PP, TP

NONE = EndsEstimate(0.0, 0.0, 0.0, 0.0, {})


def ends_of(subject: PlanningCache, c: Configuration) -> EndsEstimate:
    """Return what the ends cost in a configuration; nothing where the pipeline has none."""
    ends = subject.constraint.ends
    if ends is None:
        return NONE
    key = (c.dp, c.tp * c.pp, c.parts, c.micro_batches, c.rests)
    if key not in subject.ends:
        subject.ends[key] = _solved(subject, c, ends)
    return subject.ends[key]


def _solved(subject: PlanningCache, c: Configuration, ends: SharedEnds) -> EndsEstimate:
    graph, ranks = subject.graph, c.tp * c.pp
    around = _around(subject, ends)
    places = {TP: AxisPlace(ranks, c.dp), DP: c.places[DP]}  # the devices of a pipeline lie outside of dp
    own = PlanningCache(
        graph,
        subject.signatures,
        subject.cost,
        Constraint("the ends over all ranks", allows=_Allowed(ends)),
        subject.optimizer,
        left_out=around,
        axes=places,
    )
    tables = own.tables_of(ranks, c.parts, c.rests, ends.both | around)
    rates = {axis: seconds_per_byte(subject.cost, place) for axis, place in places.items() if place.size > 1}
    weights = Weights(c.micro_batches, 1.0, rates, c.live(0))
    choices = solve(pose(tables, weights)).choices
    seconds = once = resting = kept = 0.0
    for name, columns, choice in zip(tables.names, tables.columns, choices, strict=True):
        seconds += float(columns.forward[choice] + columns.backward[choice])
        once += once_at(columns, weights, choice)
        resting += float(columns.resting[choice])
        kept += float(columns.kept[choice]) * (c.live(0) if name in ends.first else 1)
    seconds += sum(float(table[choices[a], choices[b]]) for a, b, table in tables.edges)
    made = zip(tables.strategies.items(), choices, strict=False)  # nodes of tensors follow
    chosen = {name: found[k].choices[0] for (name, found), k in made if name in ends.both}
    return EndsEstimate(seconds + _messages(subject, c, ends), once, resting, kept, chosen)


@dataclass(frozen=True)
class _Allowed:
    """The choices of the ends: large parameters are split, and what is not of the ends runs whole."""

    ends: SharedEnds

    def __call__(self, op: Operation, choice: Choice) -> bool:
        if op.name not in self.ends.both:
            return isinstance(choice, RunInvariant)
        wanted = self.ends.cut.get(op.name)
        return wanted is None or (isinstance(choice, Split) and choice.identifier in wanted)


def _around(subject: PlanningCache, ends: SharedEnds) -> frozenset[str]:
    """Return the operations outside of the ends that read what these make, or make what these read."""
    graph, found = subject.graph, set[str]()
    for op in graph.operations:
        readers = {user.name for name in op.outputs if name is not None for user, _ in graph.consumers[name]}
        if op.name in ends.both:
            found.update(readers)
        elif not readers.isdisjoint(ends.both):
            found.add(op.name)
    return frozenset(found - ends.both)


def _messages(subject: PlanningCache, c: Configuration, ends: SharedEnds) -> float:
    """Return the seconds of a micro-batch in which tensors go from the layers to all ranks: what the head reads, and
    the gradient of what the first stage makes, each from the device that has it."""
    graph, total = subject.graph, 0.0
    for tensor in graph.tensors.values():
        producer = graph.producers.get(tensor.name)
        if producer is None or not tensor.needs_grad:
            continue
        readers = {user.name for user, _ in graph.consumers[tensor.name]}
        enters = producer.name not in ends.both and not readers.isdisjoint(ends.last)
        leaves = producer.name in ends.first and not readers <= ends.both
        if enters or leaves:
            size = tensor.elements * element_bytes(tensor.dtype) / c.parts
            total += subject.cost.collective("send", size, c.places[PP])
    return total
