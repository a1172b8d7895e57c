"""The lemmas of the examples' plans, counted by strength."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from nnscaler.ir.graph import Graph
from tests.sampling import only
from tests.verify.lemmas.planted import SECONDS
from verify.programs.lemmas import Memo, prove_obligations
from verify.programs.lemmas.result import NAME
from verify.programs.typing import Obligation
from verify.results.verdict import Verdict

Plan = Callable[..., tuple[Graph, tuple[Obligation, ...]]]
# what is proved at bounded sizes only: the pick of a split vocabulary, alone and with the batch; `arange` split by
# sequence; a convolution, whose windows have to fit
BOUNDED = {
    "gpt": {"nnscaler.ce_pick"},
    "llama_hf": {"nnscaler.ce_pick"},
    "t5_hf": {"nnscaler.ce_pick", "aten.arange.default"},
    "vit_hf": {"aten.conv2d.default"},
    "custom_op": {"nnscaler.ce_pick"},
}


@pytest.mark.long
@pytest.mark.parametrize("name", only((0, 4), BOUNDED))
def test_every_lemma_of_an_example_is_proved(name: str, planned: Plan) -> None:
    _, obligations = planned(name)
    result = prove_obligations(obligations, seconds=SECONDS)
    assert set(result.counts) == {Verdict.PROVED_ALL_SIZES, Verdict.PROVED_BOUNDED}
    weaker = [m for m in result.lemmas if m.strength is Verdict.PROVED_BOUNDED]
    assert {m.operator for m in weaker} <= BOUNDED[name]
    assert len(weaker) < 6 < result.counts[Verdict.PROVED_ALL_SIZES]
    assert all(m.blocker for m in weaker)
    (outcome,) = result.outcomes
    assert outcome.check.name == NAME and outcome.check.verdict is Verdict.PROVED_BOUNDED and not outcome.findings
    assert outcome.check.count == len(result.lemmas) and "the weakest: `" in outcome.check.detail


@pytest.mark.long
def test_lemmas_do_not_mention_ranks_axes_or_sizes(planned: Plan) -> None:
    """A plan with other numbers of ranks relies on the same lemmas; a memo knows all of them."""
    _, small = planned("gpt")
    _, large = planned("gpt", "dp=3,tp=4", 12)
    memo = Memo()
    one = prove_obligations(small, seconds=SECONDS, memo=memo)
    two = prove_obligations(_renamed(large), seconds=0.0, memo=memo)  # nothing is left to be tested
    texts = {m.text for m in one.lemmas}
    assert {m.text for m in two.lemmas if m.strength.passes} <= texts
    assert len({m.text for m in two.lemmas} & texts) > 40


def _renamed(obligations: tuple[Obligation, ...]) -> list[Obligation]:
    return [replace(o, axes=tuple((f"axis {n}", size) for n, size in o.axes)) for o in obligations]


@pytest.mark.long
def test_uses_count_statements(planned: Plan) -> None:
    _, obligations = planned("gpt", "tp=2", 2, 1)
    result = prove_obligations(obligations, seconds=SECONDS)
    up = next(m for m in result.lemmas if m.text == "`aten.gelu.default` (`* -> *`) splits `*2`")
    assert up.uses == 4  # one per block


def test_an_axis_of_one_rank_asks_for_nothing(planned: Plan) -> None:
    _, obligations = planned("gpt", "dp=1", 1, 1)
    result = prove_obligations(obligations, seconds=SECONDS)
    assert all(m.text.endswith("runs whole") for m in result.lemmas)


def test_no_obligation_is_no_proof() -> None:
    (outcome,) = prove_obligations((), seconds=SECONDS).outcomes
    assert outcome.check.verdict is Verdict.INCONCLUSIVE and outcome.check.count == 0


def test_time_that_is_spent_is_said(planned: Plan) -> None:
    _, obligations = planned("gpt")
    result = prove_obligations(obligations, seconds=0.0)
    assert result.verdict is Verdict.INCONCLUSIVE
    assert result.weakest is not None and "processor time was reached before it was tested" in result.weakest.blocker
