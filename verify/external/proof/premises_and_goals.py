"""Where a step begins and ends: layouts of parameters and inputs, and whether loss and gradients are the model's.

A gradient has to be the model's, once, in the layout that its own placements say (those of a plain tensor: whole on
every rank). The loss of a rank may be that of its rows: the mean over the data parts is then the model's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from nnscaler.layout import Axis
from verify.evidence.dimension_types.states import PARTIAL_SUM, SAME, Constant, PartialSum, Shard, State, Zero, join
from verify.external.proof.facts import Fact, NoFact, as_terms
from verify.external.proof.rank_graph import CallOutput, HeldInGraph, RankGraph
from verify.external.proof.reference_as_terms import ProofReference
from verify.external.proof.result_states_of_rank_call import States, local_shape
from verify.external.proof.terms import UNIT, Terms, WholeTerm, close


@dataclass(frozen=True, slots=True)
class EndClaim:
    """The claim about a tensor at the end: it is a multiple of the whole tensor, in these states."""

    states: States
    factor: Fraction


@dataclass(frozen=True, slots=True)
class EndDifference:
    """A tensor at the end is a logical tensor of the model, and in another layout or as another multiple of it.

    axis   over which it differs; empty: it is another multiple
    text   what it is
    """

    text: str
    axis: str = ""


def layout_of(held: HeldInGraph, axes: Sequence[Axis]) -> EndClaim:
    """Return the layout that a tensor's placements say. Raises NoFact for one that is not followed."""
    place = {a.name: i for i, a in enumerate(axes)}
    states: list[State] = [SAME] * len(axes)
    factor = UNIT
    order: dict[int, int] = {}  # dim -> the last axis that divides it
    for placement, spans in zip(held.placements or (), held.axes, strict=True):
        if spans is None:
            raise NoFact("its mesh spans no axes of the program's mesh")
        for name in spans:
            at = place[name]
            if placement.is_replicate():
                continue
            if placement.is_partial():
                states[at] = PARTIAL_SUM
                if placement.reduce_op == "avg":
                    factor *= axes[at].size
                elif placement.reduce_op != "sum":
                    raise NoFact(f"terms of a {placement.reduce_op}")
                continue
            dim = placement.dim % max(len(held.shape), 1)
            if order.get(dim, -1) > at:
                raise NoFact("its mesh has the axes in another order")
            order[dim] = at
            states[at] = Shard(dim, getattr(placement, "split_factor", 1))
    return EndClaim(tuple(states), factor)


def beginning(
    graph: RankGraph, reference: ProofReference, axes: Sequence[Axis], data: Sequence[str], names: Mapping[str, str]
) -> dict[CallOutput, Fact | str]:
    """Return the fact of each tensor that is there before the step; text: why there is none."""
    found: dict[CallOutput, Fact | str] = {}
    for name, held in graph.stored.items():
        whole = reference.values.get(f"stored {names.get(name, name)}")
        made = _stored(name, held, whole, graph, reference.terms, axes)
        known = found.get(held.ref)
        if isinstance(known, Fact) and known != made:
            made = f"`{name}` has two meanings"  # names that the model does not tie
        found[held.ref] = made
    states = tuple(Shard(0, 1) if a.name in data else SAME for a in axes)
    for path, ref in graph.inputs.items():
        whole = reference.values[f"batch {path}"]
        shape = reference.terms.shape(whole.term) or ()
        found[ref] = Fact(UNIT, whole.term, states if shape else (SAME,) * len(axes))
    return found


def _stored(
    name: str, held: HeldInGraph, whole: WholeTerm | None, graph: RankGraph, terms: Terms, axes: Sequence[Axis]
) -> Fact | str:
    if whole is None:
        return f"the model has no parameter or buffer `{name}`"
    if held.doubt:
        return held.doubt
    try:
        laid = layout_of(held, axes)
    except NoFact as no:
        return f"`{name}`: {no.reason}"
    form = graph.calls[held.ref.call].outputs[0]
    shape = terms.shape(whole.term)
    if form is None or shape is None or laid.factor != 1 or local_shape(shape, laid.states, axes) != form.shape:
        has = list(form.shape) if form is not None else "no shape"
        return f"`{name}` {list(shape or ())} has the shape {has} on a rank: no equal shards by its placements"
    return Fact(whole.coefficient, whole.term, laid.states)


def compare(
    facts: Sequence[Fact], whole: WholeTerm, wanted: EndClaim, axes: Sequence[Axis]
) -> Fact | EndDifference | None:
    """Return the fact that shows that a tensor is the model's; an `EndDifference` if it shows that it is not; None if
    it shows neither."""
    different: EndDifference | None = None
    for fact in facts:
        if fact.pieces is not None or fact.term != whole.term:
            continue
        found = _differs(fact, whole, wanted, axes)
        if found is None:
            return fact
        different = different or found
    return different


def _differs(fact: Fact, whole: WholeTerm, wanted: EndClaim, axes: Sequence[Axis]) -> EndDifference | None:
    for i, (axis, state) in enumerate(zip(axes, wanted.states, strict=True)):
        if isinstance(state, PartialSum):
            try:
                fact = as_terms(fact, i, axis.size)
            except NoFact:
                return EndDifference(
                    f"has a shard of it over {axis.name}, and is said to have a term of a sum", axis.name
                )
            continue
        own = fact.states[i]
        if isinstance(own, Constant | Zero) or own == state:
            continue
        if isinstance(own, Shard) and isinstance(state, Shard) and own.dim == state.dim and join(own, state):
            continue
        if isinstance(own, PartialSum):
            return EndDifference(f"has only a term of it: it is not summed over {axis.name}", axis.name)
        return EndDifference(f"has {own} of it over {axis.name}, and is to have {state}", axis.name)
    expected = whole.coefficient * wanted.factor
    if close(fact.coefficient, expected):
        return None
    ratio = fact.coefficient / expected
    return EndDifference(f"has {ratio if ratio.denominator < 10**6 else float(ratio)} times it")


def loss_of_parts(facts: Sequence[Fact], data: Sequence[str], axes: Sequence[Axis]) -> list[Fact]:
    """Return facts in which the mean over data parts stands for the parts' losses."""
    found: list[Fact] = []
    for fact in facts:
        for i, axis in enumerate(axes):
            if axis.name in data and isinstance(fact.states[i], PartialSum):
                fact = fact.times(Fraction(1, axis.size)).at(i, SAME)
        found.append(fact)
    return found
