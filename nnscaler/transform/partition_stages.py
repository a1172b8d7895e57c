"""Partition of a graph into pipeline stages: contiguous, cut between layers, balanced by cost.

Operations that need no gradient and depend on no parameter (masks, positions, rotary tables, the number of valid
labels) are repeated on every stage that needs them: nothing is sent for them. All others, the *anchored* ones, run on
exactly one stage, and since stages are contiguous in topological order, no tensor flows to an earlier stage.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from types import MappingProxyType

from nnscaler.errors import NnscalerError
from nnscaler.ir.graph import Graph, Operation
from nnscaler.transform.balance import balanced_cuts, cut_limits
from nnscaler.transform.select import Layer, describe_layers, describe_paths, layers_of

__all__ = ["Layer", "StagePartition", "StageRules", "layers_of", "partition_stages", "repeated_operations"]


@dataclass(frozen=True, slots=True)
class StagePartition:
    """Operations cut into stages.

    stage_of   operation -> its stages, ascending; several where it is repeated
    layers     per stage, a description of its layers
    costs      per stage, the sum of costs of its anchored operations
    """

    stage_of: Mapping[str, tuple[int, ...]]
    layers: tuple[str, ...]
    costs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class _Candidates:
    """Where anchored operations may be cut. Of the positions in one group at most one is used."""

    positions: tuple[int, ...]
    groups: tuple[int, ...]

    @property
    def largest(self) -> int:
        """The largest possible number of stages."""
        return len(set(self.groups)) + 1

    def after(self, wanted: Collection[int]) -> _Candidates:
        """Return the candidates of these groups."""
        kept = [(p, g) for p, g in zip(self.positions, self.groups, strict=True) if g in wanted]
        return _Candidates(tuple(p for p, _ in kept), tuple(g for _, g in kept))

    def without(self, forbidden: Collection[int]) -> _Candidates:
        kept = [(p, g) for p, g in zip(self.positions, self.groups, strict=True) if p not in forbidden]
        return _Candidates(tuple(p for p, _ in kept), tuple(g for _, g in kept))


@dataclass(frozen=True, slots=True)
class StageRules:
    """The decisions on stages that are made already.

    counts   how many layers each has; empty: free
    at       the stage of some operations, from the last one where negative
    joined   operations that stay on one stage together
    """

    counts: Sequence[int] = ()
    at: Mapping[str, int] = field(default_factory=dict)
    joined: Sequence[Collection[str]] = ()


FREE_STAGES = StageRules()


def partition_stages(
    graph: Graph,
    stages: int,
    cost: Callable[[Operation], float],
    *,
    finer: bool = False,
    random: Collection[str] = (),
    rules: StageRules = FREE_STAGES,
) -> StagePartition:
    """Split the operations into `stages` stages that minimise the largest sum of `cost` (exactly).

    Ties are broken by the elements that cross the cuts, then by evenness. Every stage has at least one layer; what
    is outside of layers stays with its neighbours in order. With `finer`, and only when there are fewer layers than
    stages, a cut may lie between any two operations. Operators in `random` are never repeated. `rules`: what is
    decided already.
    Raises NnscalerError("plan_illegal") when there are not enough places to cut.
    """
    repeated = repeated_operations(graph, random)
    anchored = [op for op in graph.operations if op.name not in repeated]
    layers = layers_of(graph, max(stages, 2), ignore=repeated)
    index = {op.name: i for i, op in enumerate(anchored)}
    forbidden = _forbidden_cuts(graph, anchored) | _inside(index, rules.joined)
    candidates = _layer_cuts(anchored, layers).without(forbidden)
    counts, at = rules.counts, rules.at
    if counts:
        candidates = candidates.after({sum(counts[: i + 1]) - 1 for i in range(len(counts) - 1)})
    if finer and stages > candidates.largest:
        everywhere = range(1, len(anchored))
        candidates = _Candidates(tuple(everywhere), tuple(everywhere)).without(forbidden)
    if stages < 1 or stages > candidates.largest:
        raise _too_many_stages(stages, layers, candidates.largest, finer)
    costs = [cost(op) for op in anchored]
    live = _elements_across(graph, anchored)
    crossing = [live[position] for position in candidates.positions]
    limits = cut_limits(stages, len(anchored), [(index[name], stage) for name, stage in at.items() if name in index])
    cuts = None
    if limits is not None:
        cuts = balanced_cuts(costs, candidates.positions, candidates.groups, crossing, stages, limits)
    if cuts is None:
        assert at, (stages, candidates)
        asked = ", ".join(f"{name} on {stage}" for name, stage in list(at.items())[:4])
        help = "stages follow the order of operations, each with a layer"
        raise NnscalerError("plan_illegal", f"no {stages} pipeline stages have {asked}", help=help)
    bounds = list(pairwise([0, *cuts, len(anchored)]))
    anchored_stage = {op.name: stage for stage, (start, end) in enumerate(bounds) for op in anchored[start:end]}
    return StagePartition(
        MappingProxyType(_with_repeated(graph, anchored_stage)),
        tuple(_describe(anchored[start:end], layers) for start, end in bounds),
        tuple(float(sum(costs[start:end])) for start, end in bounds),
    )


def repeated_operations(graph: Graph, random: Collection[str] = ()) -> frozenset[str]:
    """Return the operations that every stage can compute for itself at no risk.

    They have no gradient, and depend only on inputs, constants and buffers that no step changes. Never those that make
    a result or a buffer's new value, nor calls of operators in `random` (they would draw other numbers on each stage).
    """
    updated = {buffer for buffer, _ in graph.updates}
    fixed = {t.name for t in graph.with_role("input", "constant", "buffer") if not t.needs_grad} - updated
    repeated = set()
    for op in graph.operations:
        outputs = [name for name in op.outputs if name is not None]
        if op.operator in random or not fixed.issuperset(op.inputs) or not graph.ends.isdisjoint(outputs):
            continue
        if not any(graph.tensors[name].needs_grad for name in outputs):
            fixed.update(outputs)
            repeated.add(op.name)
    return frozenset(repeated)


def _layer_cuts(anchored: Sequence[Operation], layers: Sequence[Layer]) -> _Candidates:
    """Return the places between each two layers: at either end of what lies between them, and where the module
    changes."""
    index = {op.name: i for i, op in enumerate(anchored)}
    positions: list[int] = []
    groups: list[int] = []
    for group, (before, after) in enumerate(pairwise(layers)):
        start, end = index[before.operations[-1]] + 1, index[after.operations[0]]
        inside = [i for i in range(start + 1, end) if anchored[i].module != anchored[i - 1].module]
        found = sorted({start, *inside, end})
        positions += found
        groups += [group] * len(found)
    return _Candidates(tuple(positions), tuple(groups))


def _forbidden_cuts(graph: Graph, anchored: Sequence[Operation]) -> frozenset[int]:
    """Return the cuts that would separate the loss from the last stage, or the readers of an updated buffer from its
    update."""
    index = {op.name: i for i, op in enumerate(anchored)}
    forbidden: set[int] = set()
    if graph.loss:
        forbidden = set(range(index[graph.producers[graph.loss].name] + 1, len(anchored)))
    for buffer, value in graph.updates:
        users = [index[op.name] for op, _ in graph.consumers[buffer] if op.name in index]
        if value in graph.producers:
            users.append(index[graph.producers[value].name])
        if users:
            forbidden.update(range(min(users) + 1, max(users) + 1))
    return frozenset(forbidden)


def _inside(index: Mapping[str, int], joined: Iterable[Collection[str]]) -> frozenset[int]:
    """Return the cuts that would separate operations that stay together."""
    found: set[int] = set()
    for group in joined:
        places = [index[name] for name in group if name in index]
        found.update(range(min(places, default=0) + 1, max(places, default=0) + 1))
    return frozenset(found)


def _elements_across(graph: Graph, anchored: Sequence[Operation]) -> list[int]:
    """Per position: the elements of all tensors made before it and used after it."""
    index = {op.name: i for i, op in enumerate(anchored)}
    change = [0] * (len(anchored) + 1)
    for made, op in enumerate(anchored):
        for name in op.outputs:
            uses = [index[user.name] for user, _ in graph.consumers[name] if user.name in index] if name else []
            if name and uses:
                change[made + 1] += graph.tensors[name].elements
                change[max(uses) + 1] -= graph.tensors[name].elements
    live, across = 0, []
    for difference in change:
        live += difference
        across.append(live)
    return across


def _with_repeated(graph: Graph, anchored_stage: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    """Return the stages of every operation: a repeated one runs wherever an operation that uses it runs."""
    found: dict[str, tuple[int, ...]] = {}
    following = max(anchored_stage.values())
    for op in reversed(graph.operations):
        users = {s for name in op.outputs if name for user, _ in graph.consumers[name] for s in found[user.name]}
        if op.name in anchored_stage:
            following = anchored_stage[op.name]
            assert min(users, default=following) >= following, f"{op.name} flows to an earlier stage"
            found[op.name] = (following,)
        else:
            found[op.name] = tuple(sorted(users)) or (following,)
    return {op.name: found[op.name] for op in graph.operations}


def _describe(operations: Sequence[Operation], layers: Sequence[Layer]) -> str:
    """Return the layers of one stage; ` (part)` marks those that it does not hold whole."""
    names = {op.name for op in operations}
    entries: list[tuple[tuple[str, int], str]] = []
    for layer in layers:
        held = sum(name in names for name in layer.operations)
        if held:
            entries.append(((layer.prefix, layer.index), "" if held == len(layer.operations) else " (part)"))
    if entries:
        return describe_paths(entries)
    first, last = (op.module or op.name for op in (operations[0], operations[-1]))
    return first if first == last else f"{first} .. {last}"


def _too_many_stages(stages: int, layers: Sequence[Layer], largest: int, finer: bool) -> NnscalerError:
    if stages < 1:
        return NnscalerError("plan_illegal", f"a pipeline has at least one stage, not {stages}", help="use pp=1")
    which = f"it has {len(layers)} ({describe_layers(layers)})" if layers else "no part of it is numbered"
    what = "operations" if finer else "layers"
    found = f"it has {largest} places to run one" if finer else which
    return NnscalerError(
        "plan_illegal",
        f"the model cannot be cut into {stages} pipeline stages: it has too few {what} for that ({found})",
        help=f"the largest number of stages (pp times chunks) that is legal here is {largest}",
    )
