"""Search the cheapest choices of all operations on one axis, by a dynamic program in topological order, cut to a beam.

Its state is the set of layouts in which each live tensor exists, so that conversions which several consumers share are
paid once. A state from which another one is reached at less than the difference in cost dominates it, and of what is
left the `BEAM` cheapest states are kept. Partial sums look cheap until they are reduced, and could fill the whole
frontier: so further searches do without operations on partial sums, and without strided splits, and the best answer is
taken.

The step from one frontier to the next depends on the frontier's states, their costs relative to the cheapest, and how
the operation refers to live tensors, but not on names: a step that was made before, in an earlier of many equal layers,
is looked up. Costs are whole numbers, so that layers that are equal have frontiers that are equal.

Costs have no unit of time: they count elements that are communicated, and `FLOP`, `TRAFFIC` and `MEMORY` say what other
work weighs beside one such element.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import inf
from typing import Any

from nnscaler.ir.conversion_table_and_paths import find_path
from nnscaler.ir.derive_operand_layouts import input_states, output_states
from nnscaler.ir.graph import Graph, LogicalTensor, Operation
from nnscaler.ir.operation_annotations import Signature
from nnscaler.ir.operation_placement import Choice, RunPartial, Split
from nnscaler.layout import INVARIANT, Replicated, Sharded, State

BEAM = 48
RIVALS = 4  # cheapest states that others are compared with
# what other work weighs, in elements communicated
FLOP = 0.3  # per floating point operation, forward and twice backward
TRAFFIC = 0.1  # per element written
MEMORY = 1.0  # per element of a parameter at rest
UNIT = 1024  # steps of one element's cost, which are counted in whole numbers

Versions = frozenset[State]
Frontier = tuple[tuple[tuple[Versions, ...], int], ...]  # (versions of each live tensor, cost above the cheapest)
Place = tuple[str, int]  # "live", "input" or "output", and which


@dataclass(frozen=True, slots=True)
class _Extension:
    """The effect of one choice.

    choice    of the operation
    cost      in 1 / `UNIT` of an element communicated
    inputs    the versions of each input after it
    outputs   the state of each output
    """

    choice: Choice
    cost: int
    inputs: tuple[Versions, ...]
    outputs: tuple[State, ...]


@dataclass(frozen=True, slots=True)
class _FrontierStep:
    """An operation as a frontier sees it, without names.

    signature   its identity
    options     choices to compare
    slots       by input, the position of its live tensor; None at its first use
    same        by input, the first slot with the same tensor
    inputs      by input, (role, needs gradient)
    outputs     by output, whether it needs a gradient; None for one that is not used
    kept        where each tensor that is live afterwards comes from
    """

    signature: int
    options: tuple[Choice, ...]
    slots: tuple[int | None, ...]
    same: tuple[int, ...]
    inputs: tuple[tuple[str, bool], ...]
    outputs: tuple[bool | None, ...]
    kept: tuple[Place, ...]


@dataclass(frozen=True, slots=True)
class _Advance:
    """A frontier after an operation.

    frontier   its states
    number     by which it is known
    cost       that its cheapest state added
    origins    by state, the number of the state before it and the choice made
    """

    frontier: Frontier
    number: int
    cost: int
    origins: tuple[tuple[int, Choice], ...]


def cheapest_choices(
    graph: Graph, signatures: Mapping[str, Signature], parts: int, options: Mapping[str, tuple[Choice, ...]]
) -> dict[str, Choice]:
    """Return, for every operation, one of its options, such that all together are cheap."""
    reduced = {name: tuple(c for c in made if not isinstance(c, RunPartial)) for name, made in options.items()}
    blocks = {name: tuple(c for c in made if getattr(c, "outer", 1) == 1) for name, made in reduced.items()}
    found = [_search(graph, signatures, parts, given) for given in (blocks, reduced, options)]
    return min(found, key=lambda answer: answer[0])[1]


def _search(
    graph: Graph, signatures: Mapping[str, Signature], parts: int, options: Mapping[str, tuple[Choice, ...]]
) -> tuple[int, dict[str, Choice]]:
    """Return the cost, and the choice for every operation."""
    last_use = {name: i for i, op in enumerate(graph.operations) for name in op.inputs}
    live: tuple[str, ...] = ()
    start: Frontier = (((), 0),)
    numbers: dict[Frontier, int] = {start: 0}
    made: dict[tuple[int, _FrontierStep], _Advance] = {}
    trail = [_Advance(start, 0, 0, ())]
    for i, op in enumerate(graph.operations):
        named = dict.fromkeys((*live, *op.inputs, *(n for n in op.outputs if n is not None)))
        following = tuple(n for n in named if last_use.get(n, -1) > i or n == graph.loss)
        step = _step(graph, op, signatures[op.name], options[op.name], live, following)
        before = trail[-1]
        if (before.number, step) not in made:
            candidates = _advance(graph, op, signatures[op.name], step, parts, before.frontier)
            kept = _undominated(candidates, [graph.tensors[n] for n in following], parts)
            least = kept[0][1][0]
            frontier = tuple((versions, total - least) for versions, (total, _, _) in kept)
            origins = tuple((number, choice) for _, (_, number, choice) in kept)
            number = numbers.setdefault(frontier, len(numbers))
            made[before.number, step] = _Advance(frontier, number, least, origins)
        trail.append(made[before.number, step])
        live = following
    chosen: list[Choice] = []
    at = 0
    for advance in reversed(trail[1:]):
        at, choice = advance.origins[at]
        chosen.append(choice)
    names = (op.name for op in graph.operations)
    return sum(a.cost for a in trail), dict(zip(names, reversed(chosen), strict=True))


def _step(
    graph: Graph,
    op: Operation,
    signature: Signature,
    options: tuple[Choice, ...],
    live: Sequence[str],
    following: Iterable[str],
) -> _FrontierStep:
    at = {name: i for i, name in enumerate(live)}
    places: dict[str, Place] = {name: ("live", i) for name, i in at.items()}
    places.update((name, ("input", op.inputs.index(name))) for name in op.inputs)
    places.update((name, ("output", i)) for i, name in enumerate(op.outputs) if name is not None)
    tensors = [graph.tensors[name] for name in op.inputs]
    return _FrontierStep(
        id(signature),
        options,
        tuple(at.get(name) for name in op.inputs),
        tuple(op.inputs.index(name) for name in op.inputs),
        tuple((t.role, t.needs_grad) for t in tensors),
        tuple(None if name is None else graph.tensors[name].needs_grad for name in op.outputs),
        tuple(places[name] for name in following),
    )


def _advance(
    graph: Graph, op: Operation, signature: Signature, step: _FrontierStep, parts: int, frontier: Frontier
) -> dict[tuple[Versions, ...], tuple[int, int, Choice]]:
    """Return the states after the operation: what each costs, the state before it and the choice made."""
    best: dict[tuple[Versions, ...], tuple[int, int, Choice]] = {}
    cache: dict[Any, list[_Extension]] = {}
    for number, (versions, cost) in enumerate(frontier):
        have = tuple(None if slot is None else versions[slot] for slot in step.slots)
        if have not in cache:
            known = dict(zip(op.inputs, have, strict=True))
            found = [_outcome(graph, op, signature, choice, parts, known) for choice in step.options]
            cache[have] = [outcome for outcome in found if outcome is not None]
        for outcome in cache[have]:
            total = cost + outcome.cost
            after = tuple([_versions_at(place, versions, outcome) for place in step.kept])
            there = best.get(after)
            if there is None or total < there[0]:
                best[after] = (total, number, outcome.choice)
    return best


def _undominated(
    candidates: Mapping[tuple[Versions, ...], tuple[int, int, Choice]], tensors: Sequence[LogicalTensor], parts: int
) -> list[tuple[tuple[Versions, ...], tuple[int, int, Choice]]]:
    """Return the cheapest states, cheapest first, without those that one of the `RIVALS` cheapest dominates."""
    kept: list[tuple[tuple[Versions, ...], tuple[int, int, Choice]]] = []
    for versions, found in sorted(candidates.items(), key=lambda item: item[1][0]):
        if all(there[0] + _distance(have, versions, tensors, parts) > found[0] for have, there in kept[:RIVALS]):
            kept.append((versions, found))
            if len(kept) == BEAM:
                break
    return kept


def _distance(
    have: tuple[Versions, ...], wanted: tuple[Versions, ...], tensors: Sequence[LogicalTensor], parts: int
) -> float:
    """Return the cost of making the versions of one state from those of another; infinite where that cannot be."""
    total = 0.0
    for here, there, tensor in zip(have, wanted, tensors, strict=True):
        if here != there:
            total += _addition(here, there, parts, tensor.shape, tensor.needs_grad)
    return total


@lru_cache(maxsize=65536)
def _addition(here: Versions, there: Versions, parts: int, shape: tuple[int, ...], needs_grad: bool) -> float:
    """Return the cost of making the versions `there` of a tensor that has those `here`."""
    total = 0.0
    for state in there - here:
        paths = (find_path((s,), (state,), (parts,), shape, needs_grad) for s in here)
        total += UNIT * min((path[0] for path in paths if path is not None), default=inf)
    return total


def _versions_at(place: Place, versions: tuple[Versions, ...], outcome: _Extension) -> Versions:
    kind, index = place
    if kind == "live":
        return versions[index]
    return outcome.inputs[index] if kind == "input" else frozenset((outcome.outputs[index],))


def _outcome(
    graph: Graph,
    op: Operation,
    signature: Signature,
    choice: Choice,
    parts: int,
    live: Mapping[str, Versions | None],
) -> _Extension | None:
    now: dict[str, Versions] = {}
    cost = 0.0
    for name, needed in zip(op.inputs, input_states(signature, choice), strict=True):
        tensor = graph.tensors[name]
        if isinstance(needed, Replicated) and not tensor.needs_grad:
            needed = INVARIANT
        have = now.get(name) or live.get(name)
        if have is None:
            have, first = _first_use(tensor.role, tensor.needs_grad, needed, tensor.elements, parts)
            cost += first
        if needed not in have:
            paths = [find_path((s,), (needed,), (parts,), tensor.shape, tensor.needs_grad) for s in have]
            best = min((p for p in paths if p is not None), key=lambda p: p[0], default=None)
            if best is None:
                return None
            cost += best[0]
            have = have.union(*({m.target[0]} for m in best[1]))
        now[name] = have
    outputs: list[State] = []
    for name_out, state in zip(op.outputs, output_states(signature, choice, len(op.outputs)), strict=True):
        if name_out is None:
            outputs.append(INVARIANT)
            continue
        tensor = graph.tensors[name_out]
        if tensor.needs_grad and getattr(state, "reduction", "sum") != "sum":
            return None
        outputs.append(INVARIANT if isinstance(state, Replicated) and not tensor.needs_grad else state)
        cost += TRAFFIC * tensor.elements / _shards(state, parts)
    cost += FLOP * signature.flops / (parts if isinstance(choice, Split) else 1)
    return _Extension(choice, round(cost * UNIT), tuple(now[n] for n in op.inputs), tuple(outputs))


def _shards(state: State, parts: int) -> float:
    """Return how many times the largest shard goes into the whole.

    Work is counted as if shards were equal: at the weight of an operation, a gather that evens it out would seem to
    pay, which is so on no hardware.
    """
    if not isinstance(state, Sharded):
        return 1
    return sum(state.sizes) / max(state.sizes) if state.sizes else parts


def _first_use(role: str, needs_grad: bool, needed: State, elements: int, parts: int) -> tuple[Versions, float]:
    """Return the versions of a stored tensor or an input at its first use, and the cost of holding it so."""
    if role == "input":
        return frozenset((INVARIANT,)), 0.0
    if isinstance(needed, Sharded):
        return frozenset((needed,)), MEMORY * elements / _shards(needed, parts)
    if isinstance(needed, Replicated) and needs_grad:
        return frozenset((needed,)), MEMORY * elements + 2 * (parts - 1) / parts * elements
    return frozenset((INVARIANT,)), MEMORY * elements
