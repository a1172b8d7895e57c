"""Derive the facts of one call's results from those of its operands: views, permutations, sums, and calls of operators.

A call of an operator is looked up among the model's by its operands (their terms and factors); its parameters are to
be those of a shard's call. What the model does not have is a new term: a product that DTensor divides by the number
of ranks first, say, which has to come back to a term of the model to be of use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import islice
from itertools import product as combinations
from typing import Any

import torch

from nnscaler.layout import Axis
from verify.evidence.dimension_types.states import CONSTANT, SAME, ZERO, PartialSum, Shard
from verify.external.proof import facts as layouts
from verify.external.proof.call_normal_form import OperatorForm, Sum
from verify.external.proof.facts import Fact, NoFact
from verify.external.proof.pull_out_linear_factors import tensors_of
from verify.external.proof.rank_graph import CallOutput, Form
from verify.external.proof.recognised_idioms import own_rows
from verify.external.proof.reference_as_terms import ProofReference, multiplied_by_one, operand_order, parameters
from verify.external.proof.result_states_of_rank_call import (
    Failure,
    Laid,
    Lifting,
    Pair,
    PairedCall,
    States,
    local_shape,
)
from verify.external.proof.terms import UNIT, Shape, WholeTerm

MOST = 16  # combinations of operands' facts, and of dims that axes may divide
_ROUNDS = frozenset({"aten._to_copy.default"})  # what it does to terms of a sum is rounding, not another value
_A, _B = CallOutput(0, 0), CallOutput(0, 1)

FactsOf = Callable[[CallOutput], Sequence[Fact]]  # raises NoFact


@dataclass(frozen=True, slots=True)
class Candidate:
    """A call of the whole. `shapes`: of its operands, in the key's order; `terms`: of its outputs; None: a new call."""

    parameters: Mapping[str, Any]
    shapes: tuple[Shape, ...]
    outputs: tuple[tuple[Shape, str] | None, ...]
    terms: tuple[int | None, ...] | None


class Operators:
    """Makes facts of results from facts of operands. `form`: shape and dtype of a tensor of the rank."""

    def __init__(
        self, reference: ProofReference, axes: Sequence[Axis], lifting: Lifting, form: Callable[[CallOutput], Form]
    ) -> None:
        self.reference, self.terms = reference, reference.terms
        self.axes, self.lifting, self.form = tuple(axes), lifting, form
        self.size = reference.size

    def everywhere(self, whole: WholeTerm) -> Fact:
        """Return the fact of what every rank has whole."""
        state = ZERO if whole.term == self.terms.zero else CONSTANT if whole.term == self.terms.one else SAME
        return Fact(whole.coefficient, whole.term, (state,) * len(self.axes))

    def viewed(self, fact: Fact, before: Form, out: Form) -> list[Fact]:
        """Return the facts of a tensor under other dims. Raises NoFact."""
        if self.terms.is_constant(fact.term):
            return [fact]
        shape = self._shape(fact, before)
        cuts = [i for i, s in enumerate(fact.states) if isinstance(s, Shard)]
        found: list[Fact] = []
        problem: Failure | None = None
        for dims in islice(combinations(range(len(out.shape)), repeat=len(cuts)), MOST * 4):
            whole = list(out.shape)
            for axis, dim in zip(cuts, dims, strict=True):
                whole[dim] *= self.axes[axis].size
            call = PairedCall(
                torch.ops.aten.view.default,
                {"self": _A, "size": out.shape},
                {},
                {_A: (Pair(shape, before.shape, before.dtype), fact.states)},
                (Pair(tuple(whole), out.shape, out.dtype),),
                ("size",),
            )
            results = self.lifting.results(call)
            if isinstance(results, Failure):
                problem = results
            elif results[0] is not None:
                view = self.terms.view(fact.term, tuple(whole))
                own = replace(fact, term=view.term, states=results[0].states)
                found.append(own.times(view.coefficient))
        if not found:
            raise NoFact(problem.reason if problem else "a view that is no shard's", problem.axis if problem else "")
        return sorted(found, key=lambda f: f.term)  # the model's own terms come first

    def unstacked(self, fact: Fact, out: Form) -> Fact | None:
        """Return the fact of pieces that lie one after the other in memory as they do in the tensor, under its own
        dims; None for anything else."""
        pieces, whole = fact.pieces, self.terms.shape(fact.term)
        if pieces is None or pieces.index is not None or whole is None:
            return None
        local = local_shape(whole, fact.states, self.axes)
        if local != out.shape or any(size != 1 for size in local[: pieces.dim]):
            return None
        return replace(fact, pieces=None)

    def otherwise(self, facts: Sequence[Fact], form: Form) -> list[Fact]:
        """Return the facts, and others that follow from them: the model's own terms, for what is known as others."""
        found = self._expanded(facts, form)
        if any(f.term < self.reference.size for f in found):
            return found
        for fact in facts:
            if fact.pieces is None and self.terms[fact.term].operator == "view":
                found += [f for f in self.viewed(fact, form, form) if f.term < self.reference.size]
        return found

    def _expanded(self, facts: Sequence[Fact], form: Form) -> list[Fact]:
        """Return the facts, and what else it is that a rank has: its one row of what the model expands to several."""
        found = list(facts)
        for fact in facts:
            known = self.terms.known("aten.expand.default", ((UNIT, fact.term),)) if 1 in form.shape else []
            for term in (k.outputs[0] for k in known if fact.pieces is None):
                if term is None or len(self.terms[term].shape) != len(form.shape) or self.terms.is_constant(fact.term):
                    continue
                call = PairedCall(
                    torch.ops.aten.expand.default,
                    {"self": _A, "size": form.shape},
                    {},
                    {_A: (Pair(self._shape(fact, form), form.shape, form.dtype), fact.states)},
                    (Pair(self.terms[term].shape, form.shape, form.dtype),),
                    ("size",),
                )
                results = self.lifting.results(call)
                if not isinstance(results, Failure) and results[0] is not None:
                    found.append(replace(fact, term=term, states=results[0].states))
        return found

    def permuted(self, fact: Fact, order: tuple[int, ...]) -> Fact:
        """Return the fact of a tensor with its dims in another order."""
        states = tuple(replace(s, dim=order.index(s.dim)) if isinstance(s, Shard) else s for s in fact.states)
        return replace(fact, term=self.terms.permute(fact.term, order), states=states)

    def _shape(self, fact: Fact, form: Form) -> tuple[int, ...]:
        """Return the shape of the whole tensor. Raises NoFact if the rank's is not that of its shard."""
        whole = self.terms.shape(fact.term)
        if whole is None:
            return form.shape
        if local_shape(whole, fact.states, self.axes) != form.shape:
            raise NoFact(f"a shard of {list(whole)} has the shape {list(form.shape)}")
        return whole

    def sum(self, found: Sum, facts: FactsOf) -> list[Fact]:
        """Return the facts of a sum. Raises NoFact."""
        parts: list[list[tuple[Fact, Form]]] = []
        for factor, part in found.parts:
            if isinstance(part, CallOutput):
                made, form = facts(part), self.form(part)
            else:
                (made, *_), form = self.called(part, facts), found.out
            parts.append([(fact.times(factor), form) for fact in made])
        results: list[Fact] = []
        problem: NoFact | None = None
        for chosen in islice(combinations(*parts), MOST):
            try:
                results.append(self._added(chosen, found))
            except NoFact as no:
                problem = problem or no
        if not results:
            raise problem or NoFact("a sum of nothing")
        return results

    def _added(self, parts: Sequence[tuple[Fact, Form]], found: Sum) -> Fact:
        number = [] if not found.number else [(self.everywhere(WholeTerm(found.number, self.terms.one)), found.out)]
        every = [*parts, *number]
        for axis, (name, size) in enumerate((a.name, a.size) for a in self.axes):
            if any(isinstance(f.states[axis], PartialSum) for f, _ in every):
                try:
                    every = [(layouts.as_terms(f, axis, size), form) for f, form in every]
                except NoFact as no:
                    raise NoFact(no.reason, name, partial=True) from None
        laid = [(f, form) for f, form in every if not self.terms.is_constant(f.term)]
        ignored: frozenset[int] = frozenset().union(*(f.ignored for f, _ in every))
        if not laid:
            states = next((f.states for f, _ in every), (ZERO,) * len(self.axes))
            total = self.terms.sum([WholeTerm(f.coefficient, f.term) for f, _ in every], found.out.shape, "")
            return Fact(total.coefficient, total.term, states, None, ignored)
        fact, form = laid[0]
        states, shape, local = fact.states, self._shape(fact, form), form.shape
        for other, its in laid[1:]:
            theirs = self._shape(other, its)
            both, here = _broadcast(shape, theirs), _broadcast(local, its.shape)
            call = PairedCall(
                torch.ops.aten.add.Tensor,
                {"self": _A, "other": _B, "alpha": 1},
                {},
                {_A: (Pair(shape, local, form.dtype), states), _B: (Pair(theirs, its.shape, its.dtype), other.states)},
                (Pair(both, here, found.out.dtype),),
            )
            results = self.lifting.results(call)
            if isinstance(results, Failure) or results[0] is None:
                reason = results if isinstance(results, Failure) else Failure("an unknown sum")
                raise NoFact(reason.reason, reason.axis, reason.partial)
            states, shape, local = results[0].states, both, here
        if local != found.out.shape:
            raise NoFact("constants give a sum its shape")
        total = self.terms.sum([WholeTerm(f.coefficient, f.term) for f, _ in every], shape, str(found.out.dtype))
        return Fact(total.coefficient, total.term, states, None, ignored)

    def called(self, call: OperatorForm, facts: FactsOf) -> Sequence[Sequence[Fact]]:
        """Return the facts of a call of an operator. Raises NoFact where there are none for any output."""
        if call.overload.namespace != "aten":
            raise NoFact(f"no rule for `{call.overload}`")
        names = tensors_of(call.arguments)
        refs = list(dict.fromkeys(ref for _, ref in names))
        made: list[list[Fact]] = [[] for _ in call.outputs]
        problems: list[NoFact] = []
        choices = [facts(ref) for ref in refs]
        for chosen in islice(combinations(*choices), MOST):
            given = dict(zip(refs, chosen, strict=True))
            try:
                found = self.of(call, given)
            except NoFact as no:
                rows = own_rows(call, given, {ref: self.form(ref) for ref in refs}, self.terms, self.lifting)
                made[0] += rows
                problems += [] if rows else [no]
                continue
            for own, its in zip(made, found, strict=True):
                own += its
        if not any(made):
            first = next((p for p in problems if p.partial), problems[0] if problems else NoFact("it has no output"))
            certain = first.partial and str(call.overload) not in _ROUNDS
            raise NoFact(f"`{call.overload}`: {first.reason}", first.axis, certain)
        return made

    def of(self, call: OperatorForm, given: Mapping[CallOutput, Fact]) -> Sequence[list[Fact]]:
        """Return the facts of a call, with one fact for each operand."""
        names = tensors_of(call.arguments)
        chosen = [given[ref] for _, ref in names]
        forms = [self.form(ref) for _, ref in names]
        pulled = self.reference.factors.pulled(call, forms, [f.coefficient for f in chosen])
        terms = [f.term for f in chosen]
        other = multiplied_by_one(call, terms, [f.shape for f in forms], pulled.left, self.terms)
        if other is not None:
            fact = next(f for f in chosen if f.term == other)
            return [[replace(fact, coefficient=pulled.outputs[0])]]
        if str(call.overload) == "aten.expand.default" and self.terms.is_constant(terms[0]):
            return [[chosen[0]]]
        operands = [(left, term) for left, term in zip(pulled.left, terms, strict=True)]
        order = operand_order(call, operands)
        key = tuple(operands[i] for i in order)
        problem: NoFact | None = None
        ignored: frozenset[int] = frozenset().union(*(f.ignored for f in chosen))
        made: list[list[Fact]] = [[] for _ in call.outputs]
        for candidate in self._candidates(call, key, order, given):
            if candidate.terms is None and any(made):
                break
            try:
                found = self._beside(call, given, candidate, order)
            except NoFact as no:
                if candidate.terms is None and not self._resembles(str(call.overload), key):
                    no = NoFact(no.reason, no.axis)  # of a call that the model does not have, nothing is certain
                problem = problem if problem is not None and problem.partial else no
                continue
            outputs = candidate.terms or self.terms.call(
                str(call.overload), key, candidate.parameters, candidate.shapes, candidate.outputs
            )
            for own, laid, term, factor in zip(made, found, outputs, pulled.outputs, strict=True):
                if laid is not None and term is not None:
                    relies = ignored if laid.ignored is None else ignored | {laid.ignored}
                    own.append(Fact(factor * laid.factor, term, laid.states, None, relies))
        if not any(made):
            raise problem or NoFact("the model has no such call")
        return made

    def _resembles(self, operator: str, key: tuple[tuple[Fraction, int], ...]) -> bool:
        """Return whether the model has the call with sums of the same parts, in other proportions: where terms of a sum
        meet what every rank has whole, and are not summed before, that counts once for each rank."""

        def parts(operand: tuple[Fraction, int]) -> Any:
            row = self.terms[operand[1]]
            return (row.shape, {t for _, t in row.operands}) if row.operator == "sum" else operand

        wanted = [parts(operand) for operand in key]
        models = (operands for operands, known in self.terms.calls_of(operator) if _of_model(known.outputs, self.size))
        return any(len(operands) == len(key) and [parts(o) for o in operands] == wanted for operands in models)

    def _beside(
        self, call: OperatorForm, given: Mapping[CallOutput, Fact], candidate: Candidate, order: Sequence[int]
    ) -> Sequence[Laid | None]:
        """Return how the outputs lie, if this is a shard's call of the candidate. Raises NoFact."""
        names = tensors_of(call.arguments)
        operands: dict[CallOutput, tuple[Pair, States]] = {}
        for i, whole in zip(order, candidate.shapes, strict=True):
            ref = names[i][1]
            form, fact = self.form(ref), given[ref]
            shape = whole if self.terms.is_constant(fact.term) else self._shape(fact, form)
            if len(shape) != len(form.shape):
                raise NoFact("a constant of another number of dims")
            operands[ref] = (Pair(shape, form.shape, form.dtype), fact.states)
        outputs = tuple(
            None if made is None or out is None else Pair(out[0], made.shape, made.dtype)
            for made, out in zip(call.outputs, candidate.outputs, strict=True)
        )
        paired = PairedCall(call.overload, call.arguments, candidate.parameters, operands, outputs, call.follows)
        found = self.lifting.results(paired)
        if isinstance(found, Failure):
            raise NoFact(found.reason, found.axis, found.partial)
        return found

    def _candidates(
        self,
        call: OperatorForm,
        key: tuple[tuple[Fraction, int], ...],
        order: Sequence[int],
        given: Mapping[CallOutput, Fact],
    ) -> Iterator[Candidate]:
        """Yield calls of the whole that this may be a shard's call of: the model's, then new ones."""
        own = parameters(call)
        for known in self.terms.known(str(call.overload), key):
            outputs = tuple(None if t is None else (self.terms[t].shape, self.terms[t].dtype) for t in known.outputs)
            if _fit(known.parameters, own) and _alike(call.outputs, outputs):
                yield Candidate(known.parameters, known.shapes, outputs, known.outputs)
        refs = [tensors_of(call.arguments)[i][1] for i in order]
        shapes = tuple(self._shape(given[ref], self.form(ref)) for ref in refs)
        cuts = sorted({i for f in given.values() for i, s in enumerate(f.states) if isinstance(s, Shard)})
        made = [o for o in call.outputs if o is not None]
        if not made or (cuts and (len(made) > 1 or any(self.terms.is_constant(t) for _, t in key))):
            return
        ndim = len(made[0].shape)
        for dims in islice(combinations([*range(ndim), None], repeat=len(cuts)), MOST):
            whole = list(made[0].shape)
            for axis, dim in zip(cuts, dims, strict=True):
                if dim is not None:
                    whole[dim] *= self.axes[axis].size
            forms = (None if o is None else (tuple(whole) if cuts else o.shape, str(o.dtype)) for o in call.outputs)
            yield Candidate(own, shapes, tuple(forms), None)


def _of_model(outputs: Sequence[int | None], size: int) -> bool:
    return all(term is None or term < size for term in outputs)


def _broadcast(a: Shape, b: Shape) -> Shape:
    """Return the shape of a sum. Raises NoFact."""
    try:
        return tuple(torch.broadcast_shapes(a, b))
    except RuntimeError:
        raise NoFact(f"{list(a)} and {list(b)} are added") from None


def _alike(made: Sequence[Form | None], wholes: Sequence[tuple[Shape, str] | None]) -> bool:
    """Return whether outputs have the dtypes, and as many dims, as the whole's."""
    if len(made) != len(wholes):
        return False
    for form, whole in zip(made, wholes, strict=True):
        if form is None or whole is None:
            if (form is None) != (whole is None):
                return False
        elif whole[1] != str(form.dtype) or len(whole[0]) != len(form.shape):
            return False
    return True


def _fit(whole: Any, local: Any) -> bool:
    """Return whether parameters are the same, but for numbers that a shard's call may have smaller."""
    if isinstance(whole, Mapping):
        return whole.keys() == local.keys() and all(_fit(whole[n], local[n]) for n in whole)
    if isinstance(whole, list | tuple) and isinstance(local, list | tuple):
        return len(whole) == len(local) and all(map(_fit, whole, local))
    if type(whole) is int and type(local) is int:
        return whole == local or (local > 0 and whole > local and whole % local == 0)
    return type(whole) is type(local) and bool(whole == local)
