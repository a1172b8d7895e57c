"""The harness that holds rules against torch: its tensors are in the states that they should be in, and what is in
another state is found."""

from __future__ import annotations

import os
from collections.abc import Sequence
from random import Random

import pytest
import sympy
import torch

from op_registry.samples.sample import F, S

from verify.evidence.dimension_types.rules import conclude
from verify.evidence.dimension_types.rules.call_with_states import Operand, RuleCall
from verify.evidence.dimension_types.states import (
    CONSTANT,
    PARTIAL_MAX,
    PARTIAL_SUM,
    SAME,
    ZERO,
    Constant,
    PartialSum,
    Shard,
    State,
    Unknown,
    Zero,
)
from verify.evidence.inputs.draw_values import random_terms
from verify.self_test.transfer_rules.draw_calls_and_states import (
    DrawnCall,
    draw_split,
    draw_states,
    drawn_calls,
    operands_of,
)
from verify.self_test.transfer_rules.handwritten_calls import direct_calls
from verify.self_test.transfer_rules.rule_fuzz import QUICK, Effort, RuleResult, fuzz_rule, replaced, with_states
from verify.self_test.transfer_rules.run import RulesReport, fuzz_in_children
from verify.self_test.transfer_rules.tensors_in_states import Ranks, Undecided, draw, evaluate, make_ranks, problem

K, M, Q = sympy.symbols("k m q", integer=True, positive=True)
SIZES = (M, 2 * K * 3)
STATES: tuple[State, ...] = (
    Shard(1, 1),
    Shard(1, 2),
    Shard(1, 6),
    Shard(1, None),
    CONSTANT,
    ZERO,
)
WHOLE: tuple[State, ...] = (SAME, PARTIAL_SUM, PARTIAL_MAX, CONSTANT, ZERO)


def ranks(parts: int, seed: int = 0, *split: sympy.Symbol) -> Ranks:
    generator = torch.Generator().manual_seed(seed)
    return make_ranks({K: 7, M: 4, Q: 5}, frozenset(split or (K,)), parts, generator)


def held(
    state: State, sizes: Sequence[sympy.Basic], at: Ranks, seed: int = 0
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return draw(Operand(tuple(sizes), torch.float64, state), at, "normal", (0, 1), generator)


@pytest.mark.parametrize("parts", [2, 3])
@pytest.mark.parametrize("seed", range(5))
def test_ranks_hold_all_indices_once(parts: int, seed: int) -> None:
    found = ranks(parts, seed)
    pieces = found.indices[K]
    assert torch.cat(pieces).sort().values.tolist() == list(range(7))
    for piece, local in zip(pieces, found.local, strict=True):
        assert len(piece) == local[K] >= 1 and local[M] == 4
        assert piece.tolist() == sorted(piece.tolist())


@pytest.mark.parametrize("parts", [2, 3])
@pytest.mark.parametrize("state", STATES, ids=str)
def test_drawn_shards_are_in_their_state_and_in_no_other(state: State, parts: int) -> None:
    at = ranks(parts)
    whole, pieces = held(state, SIZES, at)
    fits = [other for other in STATES if problem(other, whole, pieces, SIZES, at, 1.0) is None]
    shards = [other for other in STATES if isinstance(other, Shard)]
    also = {Zero: [*shards, CONSTANT, ZERO], Constant: [*shards, CONSTANT]}.get(type(state), [state])
    assert fits == (shards if state == Shard(1, None) else also)


@pytest.mark.parametrize("parts", [2, 3])
@pytest.mark.parametrize("state", WHOLE, ids=str)
def test_drawn_tensors_are_in_their_state_and_in_no_other(state: State, parts: int) -> None:
    at = ranks(parts)
    whole, pieces = held(state, (M, Q), at)
    fits = {str(other) for other in WHOLE if problem(other, whole, pieces, (M, Q), at, 1.0) is None}
    equal = {SAME, PARTIAL_MAX}  # the maximum of equal tensors is each of them
    expected: dict[State, set[State]] = {SAME: equal, CONSTANT: equal | {CONSTANT}, ZERO: {*WHOLE}}
    assert fits == {str(other) for other in expected.get(state, {state})}


def test_sections() -> None:
    at = ranks(2, 0, K, Q)
    state = Shard(1, 1, (K, Q))
    whole, pieces = held(state, (M, K + Q), at)
    assert problem(state, whole, pieces, (M, K + Q), at, 1.0) is None
    assert problem(Shard(1, 1, (Q, K)), whole, pieces, (M, K + Q), at, 1.0) is not None
    first = torch.cat([p[:, : local[K]] for p, local in zip(pieces, at.local, strict=True)], 1)
    assert sorted(first[0].tolist()) == sorted(whole[0, :7].tolist())


def test_terms_are_rounded_as_the_coarsest_of_what_went_in() -> None:
    """Those of a float32 tensor that is added to a float64 one: the sum is a float64 with the rounding of a float32."""
    at, generator = ranks(3), torch.Generator().manual_seed(0)
    fine, coarse = torch.randn(4, 5, dtype=torch.float64, generator=generator), torch.randn(4, 5, generator=generator)
    first, *others = random_terms(coarse, 3, generator, real=True)
    pieces, whole = [first + fine, *(term.double() for term in others)], coarse + fine

    def found(pieces: list[torch.Tensor], dtype: torch.dtype) -> str | None:
        return problem(PARTIAL_SUM, whole, pieces, (M, Q), at, 1.0, torch.finfo(dtype).eps)

    assert found(pieces, torch.float32) is None
    assert found(pieces, torch.float64) == "the sum is another"
    assert found([pieces[0] + 0.5, *pieces[1:]], torch.float32) == "the sum is another"
    assert (
        problem(SAME, whole, [whole, whole + 1e-6, whole], (M, Q), at, 1.0, 1e-7) is not None
    )  # nothing else is rounded so


def test_a_wrong_shape_or_dtype_is_a_problem() -> None:
    at = ranks(2)
    whole, pieces = held(SAME, (M, Q), at)
    assert "shape" in str(problem(SAME, whole, [pieces[0], pieces[1][:2]], (M, Q), at, 1.0))
    assert "float32" in str(problem(SAME, whole, [pieces[0], pieces[1].float()], (M, Q), at, 1.0))


def test_what_is_not_finite_shows_nothing_of_sums() -> None:
    at = ranks(2)
    whole, pieces = held(PARTIAL_SUM, (M, Q), at)
    pieces[0][0, 0] = float("nan")
    with pytest.raises(Undecided):
        problem(PARTIAL_SUM, whole, pieces, (M, Q), at, 1.0)


def test_numbers_that_are_none() -> None:
    assert evaluate((2, K * M, [K]), {K: 3, M: 5}) == [2, 15, [3]]
    with pytest.raises(Undecided):
        evaluate(Q, {K: 3})


def direct(*rows: str) -> list[DrawnCall]:
    return [call for call in direct_calls() if str(call.overload) in rows]


@pytest.mark.long
def test_a_died_process_is_unsound_and_the_others_go_on() -> None:
    def dying(call: RuleCall) -> tuple[State, ...]:
        if "nansum" in str(call.overload):
            os.abort()
        return conclude(call)

    names = ["aten.linear.default", "aten.nansum.default", "aten.outer.default"]
    results = fuzz_in_children({name: direct(name) for name in names}, dying, effort=QUICK)
    assert list(results) == names
    assert [bool(result.unsound) for result in results.values()] == [False, True, False]
    assert "process" in results[names[1]].unsound[0].problem
    assert results[names[2]].verified >= QUICK.wanted


@pytest.mark.long
@pytest.mark.apart
def test_a_process_that_is_ended_from_outside_is_an_error() -> None:
    """It says nothing of the rule: not that it is unsound, and not that a planted mistake is found."""
    with pytest.raises(RuntimeError, match="ended outside of a run"):
        fuzz_in_children({"aten.outer.default": direct("aten.outer.default")}, lambda call: os._exit(9), effort=QUICK)


@pytest.mark.long
def test_a_rule_that_says_nothing_is_short_and_no_pass() -> None:
    silent = replaced({"aten.linear.default": lambda call: (Unknown("silent"),)})
    result = fuzz_rule(direct("aten.linear.default"), silent, effort=Effort(limit=50))
    assert result.asked == 50 and result.verified == 0 and not result.unsound
    report = RulesReport({"aten.linear.default": result}, (), {}, 1, ())
    assert not report.passed and report.short == {"aten.linear.default": 0}


def test_no_rules_are_no_pass() -> None:
    full = RuleResult("aten.linear.default", asked=90, verified=80)
    assert RulesReport({full.overload: full}, (), {}, 1, ()).passed
    assert not RulesReport({}, (), {}, 1, ()).passed
    assert not RulesReport({full.overload: full}, ("aten.mm.default",), {}, 1, ()).passed
    assert not RulesReport({full.overload: full}, (), {}, 0, ()).passed
    assert not RulesReport({full.overload: full}, (), {}, 1, ("aten.mm.default is wrong",)).passed


def test_what_is_trivial_is_not_counted() -> None:
    same = replaced({"aten.linear.default": lambda call: (SAME,)})
    result = fuzz_rule(direct("aten.linear.default"), same, effort=Effort(limit=200, unsound=1))
    assert result.unsound  # and before that nothing but equal outputs of equal inputs
    assert not any(set(kinds.split(" -> ")[0].split()) == {"Same"} for kinds in result.kinds)


@pytest.mark.long
def test_draws_cover_states_and_factors() -> None:
    random = Random(0)
    (call,) = direct("aten.outer.default")
    kinds: set[str] = set()
    outers: set[object] = set()
    for _ in range(300):
        drawn = call.with_factors(random)
        split = draw_split(drawn, random)
        for state in draw_states(operands_of(drawn), split, random):
            kinds.add(type(state).__name__)
            if isinstance(state, Shard):
                outers.add(state.outer)
    assert kinds == {"Same", "Shard", "PartialSum", "PartialMax", "Constant", "Zero"}
    assert {None, 1, 2, 3} <= outers


@pytest.mark.long
def test_states_go_to_their_operands() -> None:
    (call, _, _) = direct("aten.linear.default")
    asked = with_states(call, [SAME, PARTIAL_SUM, ZERO], frozenset())
    assert [type(o.state) for o in asked.operands()] == [type(SAME), PartialSum, Zero]


def test_what_cannot_be_traced_is_named() -> None:
    drawn = drawn_calls([S("relu", F(6, 12)), S("relu", F(6, 12), 1)])
    assert list(map(str, drawn.untraced)) == ["relu(n[6,12], 1)"]
    assert {str(call.overload) for call in drawn.calls} >= {"aten.relu.default", "aten.threshold_backward.default"}
