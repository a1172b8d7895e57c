"""Follow layouts through a rank's graph, call by call, from those of parameters and inputs to those of all tensors.

Each call is given the facts of its operands and makes facts of its results. It is found among the calls of the plain
model by what it reads, never by names; what the model does not have (a product that DTensor divides by the number of
ranks first, say) is a new term, which has to come back to one of the model's to be of use.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from op_registry.source_location import SourceLocation

from nnscaler.layout import Axis
from verify.evidence.dimension_types.states import PARTIAL_SUM, SAME, Shard
from verify.external.proof import facts as layouts
from verify.external.proof.call_normal_form import (
    ConstantForm,
    Identity,
    OperatorForm,
    Permutation,
    Sum,
    View,
    normal_form,
)
from verify.external.proof.derive_facts import FactsOf, Operators
from verify.external.proof.facts import Fact, NoFact
from verify.external.proof.pull_out_linear_factors import tensors_of
from verify.external.proof.rank_graph import Aligned, CallOutput, Form, RecordedCall
from verify.external.proof.recognised_idioms import VocabularyLookup, vocabulary_lookup
from verify.external.proof.reference_as_terms import ProofReference, captured
from verify.external.proof.result_states_of_rank_call import Lifting

_MOST_FACTS = 6
_MOST_OTHERS = 2


@dataclass(frozen=True, slots=True)
class Lost:
    """A tensor of which nothing is known.

    call     where that began
    reason   why
    axis     over which axis; empty: no particular one
    certain  the model's own call reads a tensor whole of which ranks hold terms: no layout of the model's result
    made     the line that made these terms
    """

    call: int
    reason: str
    axis: str = ""
    certain: bool = False
    made: SourceLocation | None = None


@dataclass
class Followed:
    """The facts of one graph. `typed`: calls with facts; `collectives`: those among them."""

    facts: dict[CallOutput, tuple[Fact, ...]] = field(default_factory=dict)
    lost: dict[CallOutput, Lost] = field(default_factory=dict)
    typed: int = 0
    collectives: int = 0

    def set(self, ref: CallOutput, found: Sequence[Fact], size: int) -> None:
        """Note what is known of a tensor: what it is of the model (terms below `size`), or else some of the rest."""
        facts = tuple(dict.fromkeys(found))
        whole = [f for f in facts if f.pieces is None]
        known = [f for f in whole if f.term < size] or whole[:_MOST_OTHERS]
        self.facts[ref] = (*known, *(f for f in facts if f.pieces is not None))[:_MOST_FACTS]


class Follower:
    """Follows one graph; `given` are the facts of tensors that were there before the step."""

    def __init__(self, aligned: Aligned, reference: ProofReference, axes: Sequence[Axis], lifting: Lifting) -> None:
        self.aligned, self.graph, self.reference = aligned, aligned.graph, reference
        self.axes, self.lifting, self.terms = tuple(axes), lifting, reference.terms
        self.place = {a.name: i for i, a in enumerate(self.axes)}
        self.operators = Operators(reference, axes, lifting, self.form)
        self.found = Followed()

    def run(self, given: Mapping[CallOutput, Fact | str]) -> Followed:
        """Follow all calls."""
        for number, call in enumerate(self.graph.calls):
            if call.overload is None:
                self._begin(CallOutput(number, 0), call, given)
                continue
            try:
                made = self._made(number, call)
            except NoFact as no:
                self._lose(number, call, no)
                continue
            self.found.typed += 1
            for output, found in enumerate(made):
                if found:
                    every = self.operators.otherwise(found, self.form(CallOutput(number, output)))
                    self.found.set(CallOutput(number, output), every, self.reference.size)
                else:
                    lost = Lost(number, f"nothing is known of output {output} of `{call.name}`")
                    self.found.lost[CallOutput(number, output)] = lost
        return self.found

    def form(self, ref: CallOutput) -> Form:
        """Return shape and dtype of a tensor of the rank."""
        found = self.graph.calls[ref.call].outputs[ref.output]
        assert found is not None
        return found

    def _begin(self, ref: CallOutput, call: RecordedCall, given: Mapping[CallOutput, Fact | str]) -> None:
        known = given.get(ref)
        if isinstance(known, Fact):
            self.found.set(ref, [known], self.reference.size)
            return
        whole = captured(call, self.terms)
        if known is None and whole is not None:
            self.found.set(ref, [self.operators.everywhere(whole)], self.reference.size)
            return
        self.found.lost[ref] = Lost(ref.call, known or f"a tensor of unknown origin ({call.name})")

    def _lose(self, number: int, call: RecordedCall, no: NoFact) -> None:
        """Note that nothing is known of the results: because of the earliest operand of which nothing is, or `no`."""
        roots = [self.found.lost[r] for _, r in tensors_of(call.arguments) if r in self.found.lost]
        lost = min(roots, key=lambda r: r.call, default=None) or Lost(
            number, no.reason, no.axis, no.partial, self._terms_made(call, no) if no.partial else None
        )
        for output, form in enumerate(call.outputs):
            if form is not None:
                self.found.lost[CallOutput(number, output)] = lost

    def _terms_made(self, call: RecordedCall, no: NoFact) -> SourceLocation | None:
        """Return the line that made an operand that is a term of a sum over the axis."""
        axis = self.place[no.axis]
        for _, ref in tensors_of(call.arguments):
            if any(f.states[axis] == PARTIAL_SUM for f in self.found.facts.get(ref, ())):
                return self.graph.calls[ref.call].where
        return None

    def _facts(self, ref: CallOutput) -> tuple[Fact, ...]:
        if ref not in self.found.facts:
            raise NoFact("an operand is lost")
        return self.found.facts[ref]

    def _whole(self, ref: CallOutput) -> list[Fact]:
        """Return the facts of a tensor that is no piece of another."""
        found = [f for f in self._facts(ref) if f.pieces is None]
        if not found:
            raise NoFact("a piece of a tensor is used as a tensor of its own")
        return found

    def _made(self, number: int, call: RecordedCall) -> Sequence[Sequence[Fact]]:
        masked = vocabulary_lookup(self.aligned, number)
        if masked is not None:
            return [self._looked_up(masked)]
        call, pieces = self._own_pieces(number, call)
        if call.name.startswith(("_c10d_functional.", "c10d.", "_dtensor.")) and "wait_tensor" not in call.name:
            made = self._collective(call)
            self.found.collectives += 1
            return made

        def facts(ref: CallOutput) -> Sequence[Fact]:
            return pieces.get(ref) or self._whole(ref)

        match normal_form(call, self.form):
            case Identity(of):
                return [pieces.get(of) or self._facts(of)]
            case ConstantForm(value):
                return [[self.operators.everywhere(self.terms.constant(value))]]
            case View(of, out):
                unstacked = [f for f in (self.operators.unstacked(f, out) for f in self._facts(of)) if f is not None]
                return [unstacked or self._any(facts(of), lambda f: self.operators.viewed(f, self.form(of), out))]
            case Permutation(of, order):
                return [[self.operators.permuted(f, order) for f in facts(of)]]
            case Sum() as found:
                return [self.operators.sum(found, facts)]
            case OperatorForm() as found:
                return self._moved(found, facts) or self.operators.called(found, facts)
        raise AssertionError(call.name)

    # -- what follows the rank's coordinates

    def _own_pieces(self, number: int, call: RecordedCall) -> tuple[RecordedCall, dict[CallOutput, list[Fact]]]:
        """Return the facts of operands that are the rank's own piece of a tensor; raise NoFact for other numbers that
        differ from rank to rank."""
        varies = self.aligned.varies.get(number)
        if not varies:
            return call, {}
        found: dict[CallOutput, list[Fact]] = {}
        for path, follows in varies.items():
            ref = _at(call.arguments, path)
            if follows is None or follows.axis not in self.place:
                raise NoFact("a number differs from rank to rank, and follows no coordinate")
            if isinstance(ref, CallOutput) and follows.start == 0 and follows.step == 1:
                axis = self.place[follows.axis]
                own = [self._own(f, axis) for f in self._facts(ref)]
                found[ref] = [f for f in own if f is not None]
            elif call.name == "aten.slice.Tensor" and path[0] in ("start", "end"):
                return self._own_slice(call, varies)
            else:
                raise NoFact(f"a number differs from rank to rank over {follows.axis}", follows.axis)
        if any(not own for own in found.values()):
            raise NoFact("a piece that differs from rank to rank is no shard")
        return call, found

    def _own(self, fact: Fact, axis: int) -> Fact | None:
        """Return the piece of the rank's own number as a shard; None if it is none."""
        if fact.pieces is None or fact.pieces.index is None or fact.pieces.parts != self.axes[axis].size:
            return None
        try:
            return layouts.scattered(replace(fact, pieces=None), axis, fact.pieces.dim, self.axes)
        except NoFact:
            return None

    def _own_slice(
        self, call: RecordedCall, varies: Mapping[Any, Any]
    ) -> tuple[RecordedCall, dict[CallOutput, list[Fact]]]:
        """Return the rank's own slice as the same tensor again, with the facts of a shard."""
        of, start, end = call.arguments["self"], varies.get(("start",)), varies.get(("end",))
        dim = call.arguments["dim"] % max(len(self.form(of).shape), 1)
        size, length = self.form(of).shape[dim], call.outputs[0].shape[dim] if call.outputs[0] else 0
        axis = None if start is None else self.place.get(start.axis)
        fits = axis is not None and length * self.axes[axis].size == size and call.arguments["step"] == 1
        if not fits or start is None or (start.start, start.step) != (0, length):
            raise NoFact("a slice that differs from rank to rank is no shard")
        if end is not None and (end.axis, end.start, end.step) != (start.axis, length, length):
            raise NoFact("a slice that differs from rank to rank is no shard")
        assert axis is not None
        own = [layouts.scattered(f, axis, dim, self.axes) for f in self._whole(of)]
        made = replace(call, overload=torch.ops.aten.alias.default, name="aten.alias.default", arguments={"self": of})
        return made, {of: own}

    # -- communication

    def _collective(self, call: RecordedCall) -> Sequence[Sequence[Fact]]:
        given = call.arguments
        group = given.get("group_name", given.get("process_group"))
        spans = self.graph.groups.get(group)
        if spans is None:
            raise NoFact("its group spans no axes of the mesh")
        axes = [self.place[name] for name in spans]
        kind = call.name.split(".")[1]
        reduction = str(given.get("reduce_op", ""))
        if kind in ("all_reduce", "allreduce_"):
            refs = given["tensors"] if kind == "allreduce_" else (given["input"],)
            return [self._each(ref, lambda f: self._all_reduced(f, axes, reduction)) for ref in refs]
        if kind == "all_reduce_coalesced":
            return [self._each(ref, lambda f: self._all_reduced(f, axes, reduction)) for ref in given["inputs"]]
        if len(axes) > 1:
            raise NoFact(f"a `{kind}` over several axes at once")
        if not axes:  # one rank
            return [self._facts(given["input"])]
        (axis,) = axes
        if kind == "all_gather_into_tensor":
            return [self._each(given["input"], lambda f: layouts.gathered(_not_pieces(f), axis, self.axes))]
        if kind == "reduce_scatter_tensor":
            scatter = lambda f: layouts.reduce_scattered(f, axis, self.axes, reduction)  # noqa: E731
            return [self._each(given["input"], scatter)]
        if kind == "shard_dim_alltoall":
            gather, shard = given["gather_dim"], given["shard_dim"]
            return [self._each(given["input"], lambda f: self._exchanged(f, axis, gather, shard))]
        raise NoFact(f"no rule for `{call.name}`")

    def _each(self, ref: CallOutput, change: Callable[[Fact], Fact]) -> list[Fact]:
        return self._any(self._facts(ref), lambda f: [change(f)])

    def _any(self, facts: Sequence[Fact], change: Callable[[Fact], list[Fact]]) -> list[Fact]:
        """Return what becomes of each fact. Raises NoFact where nothing becomes of any."""
        found: list[Fact] = []
        problem: NoFact | None = None
        for fact in facts:
            try:
                found += change(fact)
            except NoFact as no:
                problem = no
        if not found and problem is not None:
            raise problem
        return found

    def _all_reduced(self, fact: Fact, axes: Sequence[int], reduction: str) -> Fact:
        for axis in axes:
            fact = layouts.summed(fact, axis, self.axes, reduction)
        return fact

    def _exchanged(self, fact: Fact, axis: int, gather: int, shard: int) -> Fact:
        if fact.states[axis] != Shard(gather, 1):
            raise NoFact(f"an all_to_all of dim {gather} of what is {fact.states[axis]}", self.axes[axis].name)
        whole = replace(layouts.gathered(_not_pieces(fact), axis, self.axes), pieces=None)
        return layouts.scattered(whole, axis, shard, self.axes)

    # -- pieces

    def _moved(self, call: OperatorForm, facts: FactsOf) -> Sequence[Sequence[Fact]] | None:
        """Return the facts of pieces that are cut and joined around a collective; None for what is no such thing."""
        name = str(call.overload)
        if name in ("aten.split.Tensor", "aten.split_with_sizes.default", "aten.chunk.default"):
            return self._cut(call, facts)
        if name == "aten.cat.default":
            refs = call.arguments["tensors"]
            dim = call.arguments["dim"] % max(len(self.form(refs[0]).shape), 1)
            lists = [[f for f in self._facts(r) if f.pieces is not None] for r in refs]
            for first in lists[0]:
                chain = [first]
                for i, later in enumerate(lists[1:], 1):
                    assert first.pieces is not None
                    wanted = replace(first, pieces=replace(first.pieces, index=i))
                    chain += [f for f in later if f == wanted][:1]
                whole = layouts.joined(chain, dim) if len(chain) == len(refs) else None
                if whole is not None:
                    return [[whole]]
        return None

    def _cut(self, call: OperatorForm, facts: FactsOf) -> Sequence[Sequence[Fact]] | None:
        """Return the model's own pieces, and those of any tensor that is cut into equal parts."""
        of = call.arguments["self"]
        dim = call.arguments["dim"] % max(len(self.form(of).shape), 1)
        equal = len(set(call.outputs)) == 1
        made: list[list[Fact]] = [[] for _ in call.outputs]
        if equal:
            for fact in self._facts(of):
                for own, piece in zip(made, layouts.cut(fact, dim, len(made)), strict=False):
                    own.append(piece)
        try:
            for own, known in zip(made, self.operators.called(call, facts), strict=True):
                own[:0] = known
        except NoFact:
            if not any(made):
                raise
        return made

    def _looked_up(self, found: VocabularyLookup) -> list[Fact]:
        """Return the facts of an embedding of whose rows each rank has some, and zeros where the id is not its own."""
        if found.axis not in self.place:
            raise NoFact("a lookup of the rank's own rows over no axis of the mesh")
        axis = self.place[found.axis]
        parts, own = self.axes[axis].size, self.form(found.table)
        every = replace(own, shape=(found.rows * parts, *own.shape[1:]))  # as if this axis did not divide the table

        def form(ref: CallOutput) -> Form:
            return every if ref == found.table else self.form(ref)

        call = OperatorForm(torch.ops.aten.embedding.default, found.arguments, (self.form(found.result),))
        operators = Operators(self.reference, self.axes, self.lifting, form)
        made: list[Fact] = []
        for table in self._whole(found.table):
            for ids in self._whole(found.ids):
                if own.shape[0] != found.rows or table.states[axis] != Shard(0, 1) or ids.states[axis] != SAME:
                    continue
                (facts,) = operators.of(call, {found.table: table.at(axis, SAME), found.ids: ids})
                made += [fact.at(axis, PARTIAL_SUM) for fact in facts if fact.states[axis] == SAME]
        if not made:
            raise NoFact("a lookup of the rank's own rows that is no shard's", found.axis)
        return made


def _at(arguments: Mapping[str, Any], path: tuple[Any, ...]) -> Any:
    found: Any = arguments
    for step in path:
        found = found[step]
    return found


def _not_pieces(fact: Fact) -> Fact:
    if fact.pieces is not None:
        raise NoFact("pieces are gathered")
    return fact
