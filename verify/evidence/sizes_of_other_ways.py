"""Sizes at which a user's operator goes another way through its code than the one that its proof follows.

The conditions of a proof say where that is. Such a way may ask for more, `n % 7` where `n % 5` is 0: a trace at these
sizes tells, whose conditions lead on to further ways.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice

import sympy  # type: ignore[import-untyped]

from nnscaler.training.functional_optimizer import Update
from verify.evidence.dimension_types.prove import Proof, prove
from verify.evidence.oracle.annotation_claims import Target, choice_of, split_by
from verify.evidence.oracle.case_runner import OperatorRunner
from verify.evidence.oracle.enumerate_cases import Base
from verify.evidence.split_case import Inputs
from verify.evidence.user_code_path_on_fake_tensors import places_on_values
from verify.results.verdict import Condition, Strength

MOST_TRACES = 8  # of one target of one call
_LARGEST_SIZE = 1 << 21
_EVERY_SIZE = 160  # up to this one, all are looked at
_LARGEST_TRACED = 4096  # elements do not matter to a trace, but the whole runs before it


Traced = MutableMapping[Inputs, Sequence[Proof]]  # the proofs at sizes that were looked at, of all targets


def sizes_of_other_ways(
    runner: OperatorRunner, base: Base, target: Target, proved: Strength, traced: Traced
) -> Iterator[Mapping[str, int]]:
    """Yield sizes of identifiers, other than those of the call, at which a condition fails that the proof takes for
    granted, and at which what is asked there goes the other way."""
    bound, name = base.signature.bound, split_by(target)
    if bound is None:
        return
    together = bound.tied.get(name, (name,)) if name is not None else ()
    waiting: deque[tuple[Mapping[str, int], Sequence[Condition]]] = deque([({}, proved.conditions)])
    seen: set[frozenset[str]] = set()
    traces = 0
    while waiting:
        changed, conditions = waiting.popleft()
        for condition in conditions:
            if changed and _fixes_a_size(condition):
                continue
            others = [other for other in conditions if other is not condition and other.relation is not None]
            for change in _sizes_beyond(condition, others if changed else [], {**bound.sizes, **changed}, together):
                yield (further := {**changed, **change})
                if traces == MOST_TRACES or max(further.values()) > _LARGEST_TRACED or _fixes_a_size(condition):
                    continue
                traces += 1
                found = _conditions_at(runner, base, target, further, traced)
                texts = frozenset(map(str, found))
                if found and texts not in seen and texts != frozenset(map(str, conditions)):
                    seen.add(texts)
                    waiting.append((further, found))


def _fixes_a_size(condition: Condition) -> bool:
    """Return whether the condition is that a size is one number: where it is another, it is that one."""
    relation = condition.relation
    return isinstance(relation, sympy.Eq) and relation.lhs.is_Symbol and relation.rhs.is_Integer


def _conditions_at(
    runner: OperatorRunner, base: Base, target: Target, change: Mapping[str, int], traced: Traced
) -> tuple[Condition, ...]:
    """Return what the operator asks of its sizes where they are these; nothing where it does not run."""
    if isinstance(runner.spec.target, Update):
        return ()
    inputs = replace(base.inputs, sizes=tuple({**dict(base.inputs.sizes), **change}.items()))
    if inputs not in traced:
        traced[inputs] = ()
        with suppress(Exception):  # sizes were our choice
            prepared = runner.prepare(inputs)
            concrete = prepared.whole.concrete
            way = places_on_values(runner.function(concrete), prepared.whole)
            traced[inputs] = prove(runner.spec, prepared.signature, concrete, way=way).proofs
    wanted = choice_of(target)
    return next((proof.conditions for proof in traced[inputs] if proof.target == wanted), ())


def _sizes_beyond(
    condition: Condition, others: Sequence[Condition], sizes: Mapping[str, int], together: Collection[str]
) -> Iterator[Mapping[str, int]]:
    """Yield the nearest other size of each identifier at which a condition fails and the `others` hold; of those that
    are split, also one at which that is so of the halves."""
    if condition.relation is None or not condition.names <= sizes.keys():
        return
    own = {int(atom) for atom in condition.relation.atoms() if getattr(atom, "is_Integer", False)}
    near = {n + d for n in {*own, *(sizes[n] for n in condition.names)} for d in (-2, -1, 0, 1, 2)}
    powers = (2**n for n in range(1, 22))  # of a product of sizes, one alone may be far beyond
    every = {*range(1, _EVERY_SIZE + 1), *near, *(2 * n for n in near), *powers}
    for name in sorted(condition.names):
        step = 2 if name in together else 1
        nearest = sorted((n for n in every if 1 <= n <= _LARGEST_SIZE), key=lambda n: abs(n - sizes[name]))

        def beyond(size: int, name: str = name) -> bool:
            there = {**sizes, name: size}
            return not condition.holds(there) and all(other.holds(there) for other in others)

        yield from ({name: n} for n in islice((n for n in nearest if n % step == 0 and beyond(n)), 1))
        if name in together:
            halves = (n for n in nearest if n % 2 == 0 and beyond(n // 2) and (others or beyond(n)))
            yield from ({name: n} for n in islice(halves, 1))
