"""A lemma is decided whatever is drawn to look at it: a count that is drawn as 0 leaves nothing to be compared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from op_registry.call import TensorArgument
from op_registry.registry import default_registry

from nnscaler.ir.graph import Graph
from nnscaler.ir.operation_placement import RunPartial, Split
from tests.verify.lemmas.planted import SECONDS, called, floats, integers, stated
from verify.programs.lemmas import LemmaResult, prove_obligations
from verify.programs.lemmas.small_call import represent
from verify.programs.typing import Obligation
from verify.results.verdict import Verdict

FIRST = RunPartial(frozenset({0}))
# what is divided, and the counts that divide it: a loss by its labels, rows by theirs
SHAPES = [((), ()), ((64,), ()), ((64,), (64,)), ((64, 48), (64, 1))]
# at the first four, the count of labels was drawn as 0 five times in a row
SEEDS = (204, 408, 502, 503, *range(16))
PLANS = (("dp=2", 2, 1), ("tp=2", 2, 1), ("dp=2,tp=2", 4, 1), ("dp=2,tp=3", 6, 1), ("dp=3", 3, 2), ("dp=2,tp=2", 4, 3))


def proved(obligations: list[Obligation], seed: int) -> LemmaResult:
    return prove_obligations(obligations, seconds=SECONDS, seed=seed)


def divided(whole: tuple[int, ...], count: tuple[int, ...]) -> Obligation:
    call = called("aten.div.Tensor", [whole], floats(*whole), integers(*count))
    return stated("aten.div.Tensor", call, FIRST)


@pytest.mark.parametrize(("whole", "count"), SHAPES)
def test_the_divisor_of_a_partial_sum_is_a_count(whole: tuple[int, ...], count: tuple[int, ...]) -> None:
    for seed in SEEDS[:10]:
        small = represent(divided(whole, count).signature, seed)
        divisor = small.runner.concrete(small.inputs).tensors[1]
        assert bool((divisor != 0).all()) and bool((divisor > 1).any()), f"seed {seed}: {divisor}"


@pytest.mark.parametrize(("whole", "count"), SHAPES)
def test_a_partial_sum_divided_by_a_count_is_decided(whole: tuple[int, ...], count: tuple[int, ...]) -> None:
    """Also where 0 was drawn each time, for the seeds of which it was seen."""
    for seed in SEEDS[:4]:
        (lemma,) = proved([divided(whole, count)], seed).lemmas
        assert lemma.strength is Verdict.PROVED_ALL_SIZES, f"seed {seed}: {lemma}"


def test_labels_that_lie_alike_in_all_shards_are_drawn_again() -> None:
    """With this seed the labels that count lie so that wrong shards of their gradients look right."""
    call = called("nnscaler.ce_tail", [()], floats(18), floats(18), floats(18), integers(18), -100)
    (lemma,) = proved([stated("nnscaler.ce_tail", call, Split("n"))], 5400).lemmas
    assert lemma.strength is Verdict.PROVED_ALL_SIZES, str(lemma)


@pytest.mark.long
@pytest.mark.parametrize("operator", ["aten.div.Tensor", "aten.pow.Tensor_Tensor"])
def test_a_claim_that_is_not_linear_is_refuted(operator: str) -> None:
    """Whatever is drawn, a wrong claim does not pass: neither a quotient of two sums, nor a power of one."""
    spec = default_registry().lookup(operator)
    assert spec is not None
    slots = frozenset({0} if "pow" in operator else {0, 1})
    tensors: list[TensorArgument] = [floats(), integers() if "pow" in operator else floats()]
    obligation = stated(replace(spec, linear=(slots,)), called(operator, [()], *tensors), RunPartial(slots))
    for seed in SEEDS[:2]:
        (lemma,) = proved([obligation], seed).lemmas
        assert lemma.strength is Verdict.REFUTED, f"seed {seed}: {lemma}"


@pytest.mark.long
@pytest.mark.parametrize("name", ["custom_op", "moe", "t5_hf", "gpt", "llama_hf"])
def test_every_lemma_of_an_example_is_decided_for_every_seed(
    name: str, planned: Callable[..., tuple[Graph, tuple[Obligation, ...]]]
) -> None:
    """Six plans and twenty seeds of each model: 120 pairs, of which plans share most lemmas."""
    obligations = [stated for plan in PLANS for stated in planned(name, *plan)[1]]
    for seed in SEEDS:
        result = proved(obligations, seed)
        left = [str(lemma) for lemma in result.lemmas if not lemma.strength.passes]
        assert not left, f"seed {seed}: {left}"
        assert len(result.lemmas) > 20
