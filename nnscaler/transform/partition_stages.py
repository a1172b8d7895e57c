"""Partition a graph into pipeline stages: contiguous, balanced by cost, cut between layers or else anywhere.

The order of the operations is a chain, and stages are its segments: the linear partition problem, solved exactly by
dynamic programming (`balanced_cuts`). Models differ only in the places at which the chain may be cut:

between layers   where the model has as many layers as stages. The least possible largest stage, ties by what crosses
within layers    where a plan asks for it. The least possible largest stage of all cuts, ties by what crosses
anywhere         where it has not. Of all partitions whose largest stage is at most `SLACK` above the least possible,
                 the one of which the fewest bytes cross the cuts; each module that a cut goes through makes its bytes
                 count more (`pipeline_cuts.weight_of`), so that cuts lie at borders of modules where it is cheap

Operations that need no gradient and depend on no parameter (masks, positions, rotary tables, the number of valid
labels) are repeated on every stage that needs them: nothing is sent for them. All others, the *anchored* ones, run on
exactly one stage, and since stages are contiguous in topological order, no tensor flows to an earlier stage.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from pathlib import Path
from types import MappingProxyType

from nnscaler.errors import NnscalerError
from nnscaler.ir.graph import Graph, LogicalTensor, Operation, element_bytes
from nnscaler.ir.operation_annotations import Signature
from nnscaler.transform.balanced_cuts_at_module_borders import (
    Block,
    balanced_cuts,
    blocks_of,
    cut_limits,
    describe_modules,
    open_modules,
    weight_of,
)
from nnscaler.transform.select_operations import Layer, describe_paths, layers_of

__all__ = ["Layer", "StagePartition", "StageRules", "layers_of", "partition_stages", "repeated_operations"]

SLACK = 0.05  # by which the largest stage may be larger than the least possible, for fewer bytes between stages
PLACES = 2048  # that are compared: all pairs of them; of more, the narrowest ones
NAMED = 6  # operations in a message
UNEVEN = 1.2  # times the mean cost, from which on the largest stage is worth a note


@dataclass(frozen=True, slots=True)
class StagePartition:
    """Operations cut into stages.

    stage_of   operation -> its stages, ascending; several where it is repeated
    layers     per stage, a description of its layers, or of its modules where no layers are told apart
    costs      per stage, the sum of costs of its anchored operations
    notes      for people: the stages of a model that is not cut between layers, and why they are uneven
    """

    stage_of: Mapping[str, tuple[int, ...]]
    layers: tuple[str, ...]
    costs: tuple[float, ...]
    notes: tuple[str, ...] = ()


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

    counts   how many layers, or blocks where there are `blocks`, each has; empty: free
    at       the stage of some operations, from the last one where negative
    joined   operations that stay on one stage together
    blocks   the parts of a model that has no layers, see `parts_of`
    """

    counts: Sequence[int] = ()
    at: Mapping[str, int] = field(default_factory=dict)
    joined: Sequence[Collection[str]] = ()
    blocks: Sequence[Block] = ()


FREE_STAGES = StageRules()


def partition_stages(
    graph: Graph,
    stages: int,
    cost: Callable[[Operation], float],
    *,
    finer: bool = False,
    within: bool = False,
    random: Collection[str] = (),
    rules: StageRules = FREE_STAGES,
) -> StagePartition:
    """Split the operations into `stages` stages that minimise the largest sum of `cost`, exactly or within `SLACK`.

    Where there are as many layers as stages, cuts lie between layers: every stage has at least one, and what is outside
    of layers stays with its neighbours in order. Otherwise a cut may lie between any two operations, see the top of
    this file. `finer`: the stages are chunks of an interleaved pipeline; those that are less than a layer are cut for
    balance alone. `within`: cuts may lie within layers, for balance alone, also where there are enough. Operators in
    `random` are never repeated. `rules`: what is decided already.

    Raises NnscalerError("plan_illegal") when there are not enough places to cut.
    """
    repeated = repeated_operations(graph, random)
    anchored = [op for op in graph.operations if op.name not in repeated]
    layers = layers_of(graph, max(stages, 2), ignore=repeated)
    index = {op.name: i for i, op in enumerate(anchored)}
    forbidden = _forbidden_cuts(graph, anchored) | _inside(index, rules.joined)
    candidates = _part_cuts(anchored, rules.blocks or layers).without(forbidden)
    counts, at = rules.counts, rules.at
    anywhere = not counts and (within or stages > candidates.largest)
    if counts:
        candidates = candidates.after({sum(counts[: i + 1]) - 1 for i in range(len(counts) - 1)})
    elif anywhere:
        candidates = _everywhere(anchored, forbidden)
    if stages < 1 or stages > candidates.largest:
        raise _too_many_stages(stages, anchored, candidates)
    costs = [cost(op) for op in anchored]
    by_modules = (anywhere and not ((finer or within) and layers)) or bool(rules.blocks)
    across = _bytes_across(graph, anchored) if by_modules else _across(graph, anchored, lambda tensor: tensor.elements)
    if by_modules and len(candidates.positions) > PLACES:
        fewer = _thinned(candidates, costs, across)
        candidates = fewer if stages <= fewer.largest else candidates
    crossing = [across[position] for position in candidates.positions]
    limits = cut_limits(stages, len(anchored), [(index[name], stage) for name, stage in at.items() if name in index])
    cuts = None
    if limits is not None:
        slack = SLACK if by_modules else 0.0
        cuts = balanced_cuts(costs, candidates.positions, candidates.groups, crossing, stages, limits, slack)
    if cuts is None:
        assert at, (stages, candidates)
        asked = ", ".join(f"{name} on {stage}" for name, stage in list(at.items())[:4])
        help = "stages follow the order of operations, each with a layer, or with an operation where there are none"
        raise NnscalerError("plan_illegal", f"no {stages} pipeline stages have {asked}", help=help)
    bounds = list(pairwise([0, *cuts, len(anchored)]))
    anchored_stage = {op.name: stage for stage, (start, end) in enumerate(bounds) for op in anchored[start:end]}
    found = StagePartition(
        MappingProxyType(with_repeated(graph, anchored_stage)),
        tuple(_describe(anchored[start:end], layers, anchored) for start, end in bounds),
        tuple(float(sum(costs[start:end])) for start, end in bounds),
    )
    return replace(found, notes=_notes(found, anchored, costs)) if by_modules and stages > 1 else found


def parts_of(graph: Graph, signatures: Mapping[str, Signature], within: bool = False) -> tuple[Layer | Block, ...]:
    """Return the layers of a model; where there are none, or with `within`, blocks of modules that are cut by work."""
    layers = () if within else layers_of(graph)
    if layers:
        return layers
    repeated = repeated_operations(graph, random_operators(signatures))
    anchored = [op for op in graph.operations if op.name not in repeated]
    return blocks_of(anchored, _forbidden_cuts(graph, anchored), lambda op: work_of(graph, signatures, op))


def work_of(graph: Graph, signatures: Mapping[str, Signature], op: Operation) -> float:
    """Return the work of an operation, forward and backward: its FLOP three times, and the elements that it writes."""
    written = sum(graph.tensors[n].elements for n in op.outputs if n is not None)
    return 3.0 * signatures[op.name].flops + written


def random_operators(signatures: Mapping[str, Signature]) -> frozenset[str]:
    """Return the operators that draw random numbers."""
    return frozenset(s.spec.name for s in signatures.values() if s.spec is not None and s.spec.random)


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


def _part_cuts(anchored: Sequence[Operation], parts: Sequence[Layer | Block]) -> _Candidates:
    """Return the places between each two layers or blocks: at either end of what lies between them, and where the
    module changes."""
    index = {op.name: i for i, op in enumerate(anchored)}
    positions: list[int] = []
    groups: list[int] = []
    for group, (before, after) in enumerate(pairwise(parts)):
        start, end = index[before.operations[-1]] + 1, index[after.operations[0]]
        inside = [i for i in range(start + 1, end) if anchored[i].module != anchored[i - 1].module]
        found = sorted({start, *inside, end})
        positions += found
        groups += [group] * len(found)
    return _Candidates(tuple(positions), tuple(groups))


def _everywhere(anchored: Sequence[Operation], forbidden: Collection[int]) -> _Candidates:
    """Return all places, each for itself."""
    places = tuple(place for place in range(1, len(anchored)) if place not in forbidden)
    return _Candidates(places, places)


def _thinned(found: _Candidates, costs: Sequence[float], across: Sequence[int]) -> _Candidates:
    """Return, of places that each are for themselves, the narrowest one in each of `PLACES` shares.

    A share is an equal part of the cost and of the operations, taken together: it has at most 2 / `PLACES` of either.
    So the largest stage is larger by at most 4 / `PLACES` of the whole than with all places.
    """
    before = list(accumulate(costs, initial=0.0))
    narrowest: dict[int, int] = {}
    for place in found.positions:
        passed = before[place] / (before[-1] or 1.0) + place / len(costs)
        share = int(passed * PLACES / 2)
        if share not in narrowest or across[place] < across[narrowest[share]]:
            narrowest[share] = place
    places = tuple(sorted(narrowest.values()))
    return _Candidates(places, places)


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


def _bytes_across(graph: Graph, anchored: Sequence[Operation]) -> list[int]:
    """Per position: the bytes of all tensors made before it and used after it, more where modules are open."""
    across = _across(graph, anchored, lambda tensor: tensor.elements * element_bytes(tensor.dtype))
    opened = open_modules(anchored)
    return [round(size * weight_of(depth)) for size, depth in zip(across, opened, strict=True)]


def _across(graph: Graph, anchored: Sequence[Operation], size: Callable[[LogicalTensor], int]) -> list[int]:
    """Per position: the sum of `size` of all tensors made before it and used after it."""
    index = {op.name: i for i, op in enumerate(anchored)}
    change = [0] * (len(anchored) + 1)
    for made, op in enumerate(anchored):
        for name in op.outputs:
            uses = [index[user.name] for user, _ in graph.consumers[name] if user.name in index] if name else []
            if name and uses:
                change[made + 1] += size(graph.tensors[name])
                change[max(uses) + 1] -= size(graph.tensors[name])
    live, across = 0, []
    for difference in change:
        live += difference
        across.append(live)
    return across


def with_repeated(graph: Graph, anchored_stage: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
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


def _describe(operations: Sequence[Operation], layers: Sequence[Layer], anchored: Sequence[Operation]) -> str:
    """Return the layers of one stage; ` (part)` marks those that it does not hold whole.

    Of a stage without layers, its modules.
    """
    names = {op.name for op in operations}
    entries: list[tuple[tuple[str, int], str]] = []
    for layer in layers:
        held = sum(name in names for name in layer.operations)
        if held:
            entries.append(((layer.prefix, layer.index), "" if held == len(layer.operations) else " (part)"))
    return describe_paths(entries) if entries else describe_modules(operations, anchored)


def _notes(found: StagePartition, anchored: Sequence[Operation], costs: Sequence[float]) -> tuple[str, ...]:
    """Return what stages have of the model's modules and of its cost, and why that is uneven where it is."""
    whole = sum(found.costs) or 1.0
    shares = [f"{where} ({cost / whole:.0%})" for where, cost in zip(found.layers, found.costs, strict=True)]
    listed = f"stages, each with its share of the cost: {' | '.join(shares)}"
    even, largest = whole / len(found.costs), max(found.costs)
    if largest <= UNEVEN * even:
        return (listed,)
    stage = found.costs.index(largest)
    here = [(c, op) for c, op in zip(costs, anchored, strict=True) if found.stage_of[op.name] == (stage,)]
    cost, op = max(here, key=lambda pair: pair[0])
    why = f"stage {stage} has {largest / whole:.0%} of the cost, where {even / whole:.0%} would be even"
    reason = "no cut between operations is more even"
    if cost > even:
        place = f" ({Path(op.where.file).name}:{op.where.line})" if op.where is not None else ""
        reason = f"{op.name}{place} alone has {cost / whole:.0%}, and runs on one stage: tp divides it, pp does not"
    return listed, f"{why}: {reason}"


def _too_many_stages(stages: int, anchored: Sequence[Operation], found: _Candidates) -> NnscalerError:
    if stages < 1:
        return NnscalerError("plan_illegal", f"a pipeline has at least one stage, not {stages}", help="use pp=1")
    starts = [0, *dict(zip(found.groups, found.positions, strict=True)).values()]
    named = ", ".join(op.name for start in starts[:NAMED] for op in anchored[start : start + 1])
    named += ", ..." if len(starts) > NAMED else ""
    where = anchored[0].where if anchored else None
    return NnscalerError(
        "plan_illegal",
        f"the model cannot be cut into {stages} pipeline stages: it has too few operations for that (a stage may begin "
        f"with {found.largest} of them: {named})",
        where=where,
        help=f"the largest number of stages (pp times chunks) that is legal here is {found.largest}",
    )
