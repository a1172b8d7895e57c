"""Test every transfer rule of the prover against torch: from arbitrary states, do the claimed states come out?

A call of an ATen operator is drawn from what built-in operators do on their samples, forward and backward
(`calls`), with more factors in its dims; then what is split and a state for every tensor. Where the rule
claims anything, tensors that are in these states are made for two and three ranks (asymmetric terms, uneven shards
of any indices), the operator runs on the whole and on every rank, and the claim is compared with what ranks hold.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch
from torch import Tensor

from op_registry.call import map_leaves

from nnscaler.runtime.tensor_bits_and_differences import largest_finite
from verify.evidence.dimension_types.functional_trace import written
from verify.evidence.dimension_types.rules import conclude
from verify.evidence.dimension_types.rules.call_with_states import Operand, Rule, RuleCall
from verify.evidence.dimension_types.states import PartialMax, PartialSum, Same, Shard, State, Symbols, Unknown, checked
from verify.evidence.inputs.concrete_call import flat
from verify.evidence.operator_trace import arguments_of
from verify.self_test.transfer_rules.draw_calls_and_states import (
    DrawnCall,
    Values,
    draw_split,
    draw_states,
    operands_of,
)
from verify.self_test.transfer_rules.tensors_in_states import (
    KINDS,
    Kind,
    Ranks,
    Undecided,
    draw,
    evaluate,
    make_ranks,
    problem,
)

SMALL = (2, 3, 4, 5)


@dataclass(frozen=True)
class Unsound:
    """A claim of a rule that is not true."""

    overload: str
    states: str
    claim: str
    problem: str
    call: str


@dataclass
class RuleResult:
    """
    asked      how often the rule was asked
    verified   claims that say more than that equal inputs give equal outputs, and hold
    strong     those of them that claim a shard or a partial sum or maximum
    undecided  claims that no drawn values could test, with `reasons`
    kinds      which states came out of which, how often
    unsound    claims that do not hold
    """

    overload: str
    asked: int = 0
    verified: int = 0
    strong: int = 0
    undecided: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    unsound: list[Unsound] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class Effort:
    """How long a rule is tried.

    It is asked until `wanted` of its claims were compared, at least `least` times and every call `each` times, and at
    most `limit` times; a third of that for as many strong claims, which some rules never make; and until `unsound` of
    its claims were wrong.
    """

    wanted: int = 60
    least: int = 150
    each: int = 4
    limit: int = 9000
    unsound: int = 5


THOROUGH, QUICK = Effort(), Effort(wanted=10, least=30, each=1, limit=300)


def fuzz_rule(
    calls: Sequence[DrawnCall], conclude: Rule = conclude, seed: int = 0, effort: Effort = THOROUGH
) -> RuleResult:
    """Try the rule of the one overload of `calls`."""
    name = str(calls[0].overload)
    random = Random(f"{seed} {name}")
    result = RuleResult(name)
    generator = torch.Generator().manual_seed(random.randrange(2**31))
    with torch.no_grad():
        least = max(effort.least, effort.each * len(calls))
        while result.asked < effort.limit:
            weak = result.strong < effort.wanted and result.asked < effort.limit // 3
            if result.verified >= effort.wanted and result.asked >= least and not weak:
                break
            call = calls[result.asked % len(calls)]
            if random.random() < 0.6:
                call = call.with_factors(random)
            result.asked += 1
            _try(call, conclude, random, generator, result)
            if len(result.unsound) >= effort.unsound:
                break
    return result


def by_overload(calls: Iterable[DrawnCall]) -> dict[str, list[DrawnCall]]:
    """Return the calls of every overload, overloads in the order of their names."""
    found: dict[str, list[DrawnCall]] = {}
    for call in calls:
        found.setdefault(str(call.overload), []).append(call)
    return dict(sorted(found.items()))


def _try(call: DrawnCall, conclude: Rule, random: Random, generator: torch.Generator, result: RuleResult) -> None:
    """Draw a split and states, and compare the rule's claims."""
    split = draw_split(call, random)
    states = draw_states(operands_of(call), split, random)
    asked = with_states(call, states, split)
    claims = conclude(asked)
    if all(isinstance(claim, Unknown) for claim in claims) or not _says_something(states, claims):
        return
    try:
        found = _compare(call, asked, claims, random, generator)
    except Undecided as why:
        result.undecided += 1
        result.reasons[str(why)[:80]] += 1
        return
    if found is None:
        result.verified += 1
        result.strong += any(isinstance(claim, Shard | PartialSum | PartialMax) for claim in claims)
        result.kinds[f"{_kinds(states)} -> {_kinds(claims)}"] += 1
        return
    shown = ", ".join(f"{_sizes(o)} {s}" for o, s in zip(operands_of(call), states, strict=True))
    result.unsound.append(Unsound(result.overload, shown, "; ".join(map(str, claims)), found, call.origin))


def _says_something(states: Sequence[State], claims: Sequence[State]) -> bool:
    """Return whether the claims say something: equal outputs of equal inputs are no news."""
    return (
        not states
        or any(not isinstance(s, Same) for s in states)
        or any(not isinstance(c, Same | Unknown) for c in claims)
    )


def _kinds(states: Iterable[State]) -> str:
    return " ".join(type(state).__name__ for state in states)


def _sizes(operand: Operand) -> str:
    return "[" + ", ".join(map(str, operand.sizes)) + "]"


def with_states(call: DrawnCall, states: Sequence[State], split: Symbols) -> RuleCall:
    """Return the call as a rule is asked about it."""
    given = iter(states)

    def convert(value: Any) -> Any:
        if isinstance(value, Operand):
            return value.with_state(next(given))
        return value

    arguments = {n: map_leaves(v, convert, tuple) for n, v in call.arguments.items()}
    return RuleCall(call.overload, arguments, call.outputs, split)


def _compare(
    call: DrawnCall, asked: RuleCall, claims: Sequence[State], random: Random, generator: torch.Generator
) -> str | None:
    """Return why the claims are wrong; None where they hold. Raises Undecided."""
    why = Undecided("no values fit")
    for attempt in range(10):
        ranks = _draw_ranks(call, asked.split, random, generator, usual=attempt >= 5)
        if not all(call.granted(sizes) for sizes in (ranks.whole, *ranks.local)):
            why = Undecided("its trace takes other sizes for granted")
            continue
        kind = KINDS[random.randrange(2) if attempt < 2 else attempt % len(KINDS)]
        try:
            return _compare_at(call, asked, claims, ranks, kind, generator)
        except Undecided as error:
            why = error
    raise why


def _draw_ranks(call: DrawnCall, split: Symbols, random: Random, generator: torch.Generator, usual: bool) -> Ranks:
    """Draw what the ranks hold. `usual`: sizes for which the call is known to run.

    Integers from a real run may be no legal indices at smaller ones, and not every kernel checks that.
    """
    parts = random.choice((2, 3))
    usual = usual or bool(call.integers) or call.unchecked
    sizes = {s: hint if usual else random.choice(SMALL) for s, hint in call.symbols.items()}
    for symbol in split:
        sizes[symbol] = max(sizes[symbol], parts + random.randrange(4))
    return make_ranks(sizes, split, parts, generator)


def _compare_at(
    call: DrawnCall, asked: RuleCall, claims: Sequence[State], ranks: Ranks, kind: Kind, generator: torch.Generator
) -> str | None:
    tensors: list[tuple[Tensor, list[Tensor]]] = []

    def convert(value: Any, integers: Values) -> Any:
        """Return the argument with the number of a tensor where one stands, its tensors drawn."""
        if isinstance(value, Operand):
            tensors.append(draw(value, ranks, kind, integers, generator))
            return _Tensor(len(tensors) - 1)
        if isinstance(value, list | tuple):
            return [convert(item, integers) for item in value]
        return value

    pick = torch.randint(1000, (), generator=generator).item()
    known = {name: found[int(pick) % len(found)] for name, found in call.integers.items()}
    try:
        noted = {name: convert(value, known.get(name, (0, 1, 2))) for name, value in asked.arguments.items()}
        whole = _run(call.overload, noted, [t for t, _ in tensors], ranks.whole)
    except Undecided:
        raise
    except Exception as error:  # noqa: BLE001 - sizes and values may fit no call
        raise Undecided(f"the whole raises {type(error).__name__}: {error}") from None
    _check_shapes(asked, whole, ranks)
    held: list[list[Any]] = []
    for rank, sizes in enumerate(ranks.local):
        try:
            held.append(_run(call.overload, noted, [shards[rank] for _, shards in tensors], sizes))
        except Undecided:
            raise
        except Exception as error:  # noqa: BLE001 - what the whole does and a rank cannot is a wrong claim
            return f"rank {rank} raises {type(error).__name__}: {error}"
        if len(held[-1]) != len(whole):
            return f"rank {rank} has {len(held[-1])} outputs instead of {len(whole)}"
    scale = max((largest_finite(t) for t, _ in tensors if t.is_floating_point()), default=0.0)
    coarsest = max((torch.finfo(t.dtype).eps for t, _ in tensors if t.is_floating_point()), default=0.0)
    for index, (claim, output) in enumerate(zip(claims, asked.outputs, strict=True)):
        if output is not None and not isinstance(claim, Unknown):
            here = [outputs[index] for outputs in held]
            found = problem(claim, whole[index], here, output.sizes, ranks, scale, coarsest)
            if found is not None:
                return f"output {index}: {found}"
    return None


@dataclass(frozen=True, slots=True)
class _Tensor:
    number: int


def _run(overload: Any, noted: Mapping[str, Any], tensors: Sequence[Tensor], sizes: Mapping[Any, int]) -> list[Any]:
    """Return the outputs, and after them tensors that were written to, as a trace lists them."""

    def convert(value: Any) -> Any:
        if isinstance(value, _Tensor):
            return tensors[value.number].clone()
        return evaluate(value, sizes)

    args, kwargs = [], {}
    for parameter in overload._schema.arguments:
        value = map_leaves(noted[parameter.name], convert, list)
        if parameter.kwarg_only:
            kwargs[parameter.name] = value
        else:
            args.append(value)
    results = flat(overload(*args, **kwargs))
    targets = written(overload, arguments_of(overload, tuple(args), kwargs))
    return [*results, *(t for t in targets if not any(t is r for r in results))]


def _check_shapes(asked: RuleCall, whole: Sequence[Any], ranks: Ranks) -> None:
    """Check that the call does what it did when it was traced: sizes may violate a guard of the trace."""
    if len(whole) != len(asked.outputs):
        raise Undecided("the whole has another number of outputs at these sizes")
    for output, tensor in zip(asked.outputs, whole, strict=True):
        if output is not None and list(tensor.shape) != evaluate(output.sizes, ranks.whole):
            raise Undecided("the whole has another shape at these sizes")


def replaced(rules: Mapping[str, Rule]) -> Rule:
    """Return the prover with other rules for some overloads: what planted mistakes run under."""

    def with_rules(call: RuleCall) -> tuple[State, ...]:
        rule = rules.get(str(call.overload))
        if rule is None:
            return conclude(call)
        states = rule(call)
        return tuple(
            state if out is None else checked(state, out.sizes, call.split)
            for state, out in zip(states, call.outputs, strict=True)
        )

    return with_rules
