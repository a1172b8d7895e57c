"""Compose an annotation from facts about a function.

Each fact is one identifier. A dim lists the identifiers that split it by their outer factors; what none of them covers
is an integer before the first of them, and a frozen identifier behind the last. Dims that nothing splits are frozen
identifiers, shared by dims that can only change together.
"""

from __future__ import annotations

import string
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from op_registry.annotation.syntax_tree import (
    Annotation,
    Concat,
    Dim,
    Group,
    Identifier,
    Integer,
    Mark,
    Opaque,
    Operand,
    Reduction,
    print_annotation,
)
from op_registry.call import TensorArgument, instances_in
from op_registry.spec import OperatorSpec

from nnscaler.layout import Partial, Replicated, Sharded, State
from verify.operators.suggest.call_with_other_tensors_and_integers import Outputs, Question
from verify.operators.suggest.coupled_sizes import Group as Sizes
from verify.operators.suggest.layout_truth_table import Fact

Place = tuple[int, int]  # (operand, dim); outputs come after inputs
Key = tuple[str, object]  # of an identifier, before it has a name: ("fact", (number, which)), ("frozen", what)
Part = tuple[Key | None, int]  # a factor and its size; without key a literal


@dataclass(frozen=True)
class Evidence:
    """The observations from which an annotation is composed.

    outputs  of the function on the question's own tensors
    facts    splits that hold
    grown    group of sizes -> outputs with these sizes doubled; None where that raises
    """

    question: Question
    outputs: Outputs
    facts: tuple[Fact, ...]
    grown: Mapping[Sizes, Outputs | None]


def consistent(facts: Sequence[Fact]) -> tuple[Fact, ...]:
    """Return the facts that one annotation can say: an operand is additive under every sum that it takes no part in."""
    kept: list[Fact] = []
    sayable = [f for f in facts if len(f.integers) <= 1]  # one identifier gives one argument its size
    for fact in sorted(sayable, key=lambda f: not _terms(f)):  # those with additive operands first
        if _agree(fact, fact) and all(_agree(fact, other) and _agree(other, fact) for other in kept):
            kept.append(fact)
    return tuple(f for f in facts if f in kept)


def _terms(fact: Fact) -> frozenset[int]:
    return frozenset(i for i, s in enumerate(fact.inputs) if isinstance(s, Partial))


def _agree(fact: Fact, other: Fact) -> bool:
    """Return whether the additive operands of `fact` are additive under `other` too (which may be `fact` itself)."""
    partial = [o for o in other.outputs if isinstance(o, Partial)]
    mixed = any(isinstance(o, Sharded) for o in other.outputs) or any(o.reduction != "sum" for o in partial)
    for i in _terms(fact) if partial else ():
        state = other.inputs[i]
        if isinstance(state, Replicated) or (isinstance(state, Partial) and mixed):
            return False
    splits = [(i, s) for i, s in enumerate(fact.inputs) if isinstance(s, Sharded)]
    return other is fact or not any(other.inputs[i] == s for i, s in splits)


def compose(evidence: Evidence, spec: OperatorSpec) -> tuple[str, Mapping[str, Fact]]:
    """Return the canonical text, and the fact behind each of its identifiers that may be split."""
    composer = _Composer(evidence, spec)
    text = composer.text()
    facts = {key[1]: name for key, name in composer.names.items() if key[0] == "fact"}
    return text, {name: evidence.facts[key[0]] for key, name in facts.items() if isinstance(key, tuple)}


class _Composer:
    def __init__(self, evidence: Evidence, spec: OperatorSpec) -> None:
        self.evidence = evidence
        self.spec = spec
        self.inputs = [tuple(t.shape) for t in evidence.question.tensors]
        self.units = [self._unit(fact) for fact in evidence.facts]
        self.names: dict[Key, str] = {}
        self.reserved = set(evidence.question.integers)

    def text(self) -> str:
        chains = {
            (index, dim): self._chain(self._splits(index, dim), size, self._group_of((index, dim)), index)
            for index, shape in enumerate(self.inputs)
            for dim, size in enumerate(shape)
        }
        operands = [Operand(tuple(self._dim(chains[i, d]) for d in range(len(s)))) for i, s in enumerate(self.inputs)]
        outputs: list[Operand | Opaque] = []
        for number, output in enumerate(self.evidence.outputs):
            if output is None:
                outputs.append(Opaque())
                continue
            shape = tuple(output.shape)
            dims = [self._output_dim(number, dim, size, chains) for dim, size in enumerate(shape)]
            outputs.append(Operand(tuple(dims)))
        terms = frozenset().union(*(_terms(f) for f in self.evidence.facts))
        additive = [replace(o, additive=True) if i in terms else o for i, o in enumerate(operands)]
        return print_annotation(Annotation(self._with_absent(additive), tuple(outputs)))

    def _with_absent(self, operands: Sequence[Operand]) -> tuple[Operand | Opaque, ...]:
        """Put `?` where an optional tensor before others was not given.

        Behind the others it would say that any tensor may come there, which was not tested.
        """
        question = self.evidence.question
        tensors = {p.name for p in self.spec.parameters if p.tensor}
        found: list[Operand | Opaque] = []
        for name, value in (*zip(question.names, question.concrete.call.args, strict=False), *self._by_keyword()):
            present = [operands[t.index] for t in instances_in(value, TensorArgument)]
            found += present
            if value is None and name in tensors and len(found) < len(operands):
                found.append(Opaque())
        while found and isinstance(found[-1], Opaque):
            found.pop()
        return tuple(found) if sum(isinstance(o, Operand) for o in found) == len(operands) else tuple(operands)

    def _by_keyword(self) -> list[tuple[str, Any]]:
        return list(self.evidence.question.concrete.call.kwargs.items())

    def _unit(self, fact: Fact) -> int:
        """Return the size of a fact's identifier: the integer it divides, else the smallest dim that it splits."""
        for name in fact.integers:
            return self.evidence.question.integers[name]
        number = next(n for n, f in enumerate(self.evidence.facts) if f is fact)
        found: list[int] = []
        for index, shape in enumerate(self.inputs):
            splits = [self._splits(index, dim) for dim in range(len(shape))]
            found += [_room(s, number, size) // fact.tail for s, size in zip(splits, shape, strict=True)]
        for index, output in enumerate(self.evidence.outputs):
            shape = () if output is None or self._concatenates(number) else tuple(output.shape)
            states = [f.outputs[index] for f in self.evidence.facts]
            found += [_room(sorted(_on(states, dim)), number, size) for dim, size in enumerate(shape)]
        return min(f for f in found if f)

    def _splits(self, index: int, dim: int) -> list[tuple[int, int]]:
        """Return (outer, number) of the facts that split a dim of an input, outermost first."""
        states = [f.inputs[index] for f in self.evidence.facts]
        return sorted(_on(states, dim))

    def _group_of(self, place: Place) -> object:
        """Return the sizes that change with a dim; the dim itself where it cannot change."""
        return next((g for g in self.evidence.grown if place in g), place)

    def _concatenates(self, number: int) -> bool:
        """Return whether the fact splits each operand by an identifier of its own, and an output concatenates them."""
        return any(isinstance(o, Sharded) and o.sections for o in self.evidence.facts[number].outputs)

    def _chain(self, splits: Iterable[tuple[int, int]], size: int, group: object, operand: int = 0) -> list[Part]:
        """Return the factors of a dim of an operand."""
        parts: list[Part] = []
        position = 1
        for outer, number in splits:
            if outer > position:
                parts.append(self._gap(outer // position))
            unit = size if self._concatenates(number) else self.units[number]
            parts.append((("fact", (number, operand if self._concatenates(number) else 0)), unit))
            position = outer * unit
            tail = self.evidence.facts[number].tail
            if tail > 1 and size // position % tail == 0:
                parts.append(self._gap(tail))
                position *= tail
        rest = size // position
        if size == 1:
            parts.append((None, 1))
        elif rest > 1:
            parts.append((("frozen", (group, rest)), rest))
        return parts

    def _gap(self, size: int) -> Part:
        """Return the other factor of a dim: an integer argument of that size, else the number itself."""
        for name, value in self.evidence.question.integers.items():
            if value == size and frozenset((name,)) in self.evidence.grown:
                return ("integer", name), size
        return None, size

    def _output_dim(self, number: int, dim: int, size: int, chains: Mapping[Place, list[Part]]) -> Dim:
        for which, fact in enumerate(self.evidence.facts):
            state = fact.outputs[number]
            if isinstance(state, Sharded) and state.dim == dim and state.sections:
                operands = [i for i, s in enumerate(fact.inputs) if isinstance(s, Sharded)]
                if tuple(self.inputs[i][_dim_of(fact, i)] for i in operands) != state.sections:
                    operands = operands[::-1]
                return Concat(tuple(self._identifier(("fact", (which, i))) for i in operands))
        return self._dim(self._output_chain(number, dim, size, chains))

    def _output_chain(self, number: int, dim: int, size: int, chains: Mapping[Place, list[Part]]) -> list[Part]:
        splits = sorted(_on([f.outputs[number] for f in self.evidence.facts], dim))
        chain = self._chain(splits, size, ("output", number, dim))
        own = [self.evidence.facts[n] for _, n in splits]
        ratios = {g: self._ratio(g, number, dim) for g in self.evidence.grown}
        changing = {g for g, ratio in ratios.items() if ratio != 1 and not any(_splits(f, g) for f in own)}
        if chain[0][0] is None and len(chain) == 2 and changing:  # a number that is none: it follows other sizes
            return [(("frozen", ("before", number, dim)), chain[0][1]), chain[1]]
        if chain[-1][0] is None or chain[-1][0][0] != "frozen":
            return chain
        for (index, at), parts in chains.items():  # the frozen part of an input's dim that this one grows with
            key, length = parts[-1]
            group = self._of(index, at)
            grows = ratios.get(group) == 2 and changing <= {group}
            fixed = not changing and not group
            if key is not None and key[0] == "frozen" and length == chain[-1][1] and (grows or fixed):
                return [*chain[:-1], (key, length)]
        return chain

    def _of(self, index: int, dim: int) -> Sizes:
        found = self._group_of((index, dim))
        return found if isinstance(found, frozenset) else frozenset()

    def _ratio(self, group: Sizes, number: int, dim: int) -> float:
        """Return the factor by which a dim of an output grows with a group of sizes."""
        grown = self.evidence.grown[group]
        whole = self.evidence.outputs[number]
        if grown is None or number >= len(grown) or whole is None:
            return 0
        other = grown[number]
        if other is None or other.dim() != whole.dim() or not whole.shape[dim]:
            return 0
        return other.shape[dim] / whole.shape[dim]

    def _dim(self, chain: Sequence[Part]) -> Dim:
        factors = tuple(Integer(size) if key is None else self._identifier(key) for key, size in chain)
        return factors[0] if len(factors) == 1 else Group(factors)

    def _identifier(self, key: Key) -> Identifier:
        kind, what = key
        if key not in self.names:
            self.names[key] = self._name(kind, what)
        name = self.names[key]
        if kind != "fact":
            return Identifier(name, "^")
        assert isinstance(what, tuple)
        mark, reduction = mark_of(self.evidence.facts[what[0]])
        return Identifier(name, mark, reduction)

    def _name(self, kind: str, what: object) -> str:
        if kind == "integer":
            return str(what)
        if kind == "fact" and isinstance(what, tuple):
            for name in self.evidence.facts[what[0]].integers:
                return name
        taken = self.reserved | set(self.names.values())
        return next(n for n in _letters() if n not in taken)


def mark_of(fact: Fact) -> tuple[Mark, Reduction]:
    """Return the mark of a fact's identifier."""
    for state in fact.outputs:
        if isinstance(state, Partial):
            return "+", "sum" if state.reduction == "sum" else "max"
    return "", "sum"


def _room(splits: Sequence[tuple[int, int]], number: int, size: int) -> int:
    """Return the largest size of an identifier in a dim: up to the next one behind it; 0 where it is not in the dim."""
    outers = [outer for outer, n in splits if n == number]
    if not outers:
        return 0
    behind = [outer for outer, _ in splits if outer > outers[0]]
    return min([size, *behind]) // outers[0]


def _splits(fact: Fact, group: Sizes) -> bool:
    """Return whether a fact splits a dim of the group."""
    return any(isinstance(s, Sharded) and (i, s.dim) in group for i, s in enumerate(fact.inputs))


def _dim_of(fact: Fact, operand: int) -> int:
    state = fact.inputs[operand]
    assert isinstance(state, Sharded)
    return state.dim


def _on(states: Sequence[State | None], dim: int) -> Iterator[tuple[int, int]]:
    for number, state in enumerate(states):
        if isinstance(state, Sharded) and state.dim == dim:
            yield state.outer, number


def _letters() -> Iterator[str]:
    yield from string.ascii_lowercase
    for number in range(1, 1000):
        for letter in string.ascii_lowercase:
            yield f"{letter}{number}"
