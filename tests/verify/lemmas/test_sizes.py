"""The sizes for which a plan holds: stated, then tried."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nnscaler.compile import WantedPlan, compile_traced, make
from nnscaler.errors import NnscalerError
from nnscaler.ir.graph import Graph
from nnscaler.tracing import trace
from nnscaler.transform.apply import apply_plan
from tests.sampling import every
from tests.verify.lemmas.planted import obligations_of
from verify import verify_plan
from verify.programs.lemmas import SizesResult, sizes_result
from verify.programs.typing import Obligation

Planned = Callable[..., tuple[Graph, tuple[Obligation, ...]]]


class Small(nn.Module):
    """Two projections."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 10)
        self.down = nn.Linear(10, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x))).square().sum()


class Paired(Small):
    """Neighbours in the sequence are paired."""

    def forward(self, x: Tensor) -> Tensor:
        pairs = x.unflatten(1, (-1, 2))
        return self.up(pairs[:, :, 0] * pairs[:, :, 1]).square().sum()


class Table(Small):
    """A table of one row per position."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(8, 6))

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x + self.table).square().sum()


class Contrasts(Small):
    """Every row against the others: which entries those are is a constant of the sample's batch."""

    def forward(self, x: Tensor) -> Tensor:
        rows = self.up(x)
        products = rows @ rows.t()
        return products[~torch.eye(len(x), dtype=torch.bool)].square().sum() + rows[:, torch.arange(10) > 3].sum()


def sizes_of(module: nn.Module, sample: tuple[Any, ...], plan: str, ranks: int, micro_batches: int = 1) -> SizesResult:
    traced = trace(module, sample)
    planned = make(traced.graph, WantedPlan(ranks, plan, micro_batches=micro_batches))
    known = dict(planned.signatures)
    return sizes_result(traced.graph, obligations_of(apply_plan(traced.graph, known, planned.plan), known))


@pytest.mark.long
def test_batch_and_sequence_of_a_model_without_numbers() -> None:
    result = sizes_of(Small(), (torch.randn(12, 8, 6),), "dp=2,tp=2", 4, 3)
    assert result.text == (
        "holds for every batch divisible by 6 (dp x micro-batches) and every size of dim 1 of `x` above 1"
    )
    assert not result.assumptions and not result.others


class Tokens(Small):
    """Two texts of other lengths, an image and a row of features: only texts have a sequence length."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 6)
        self.patches = nn.Conv2d(3, 6, 2)

    def forward(self, ids: Tensor, prefix: Tensor, image: Tensor, features: Tensor, choices: Tensor) -> Tensor:
        seen = self.patches(image).mean((2, 3)) + self.down(torch.relu(self.up(features)))
        read = self.table(ids).mean(1) + self.table(prefix).mean(1)
        return (read + seen).square().sum() + choices.to(read.dtype).sum()


@pytest.mark.long
def test_only_a_batch_of_token_sequences_has_a_sequence_length() -> None:
    ids, prefix = torch.randint(0, 11, (4, 7)), torch.randint(0, 11, (4, 5))
    sample = (ids, prefix, torch.randn(4, 3, 8, 9), torch.randn(4, 6), torch.randint(0, 2, (4, 9)))
    names = {symbol.name: symbol.sample for symbol in sizes_of(Tokens(), sample, "dp=2", 2).symbols}
    assert names == {
        "batch": 4,
        "sequence length": 7,
        "sequence length of `prefix`": 5,
        "size of dim 1 of `image`": 3,
        "size of dim 1 of `features`": 6,
        "size of dim 1 of `choices`": 9,
    }


def test_a_factor_of_a_dim_is_a_condition() -> None:
    result = sizes_of(Paired(), (torch.randn(4, 8, 6),), "dp=2", 2)
    first, assumption = result.text.splitlines()
    assert first == "holds for every batch divisible by 2 (dp) and every size of dim 1 of `x` divisible by 2"
    assert assumption.endswith("is taken for the size of dim 1 of `x` / 2")


def test_a_table_of_fixed_length_fixes_the_sequence() -> None:
    result = sizes_of(Table(), (torch.randn(4, 8, 6),), "dp=2", 2)
    batch, sequence = result.symbols
    assert batch.divisor == 2 and not batch.blocker
    assert "aten.add.Tensor at test_sizes.py:" in sequence.blocker and "size of dim 1 of `x` is 8" in sequence.blocker
    assert "the size of dim 1 of `x` stays 8: " in result.text


@pytest.mark.parametrize(
    ("name", "line"),
    every(
        2,
        [
            ("gpt", "every batch divisible by 4 (dp x micro-batches) and every sequence length above 1"),
            ("llama_hf", "every batch divisible by 4 (dp x micro-batches)"),
            ("t5_hf", "every batch divisible by 4 (dp x micro-batches), every sequence length divisible by 2 (tp)"),
            ("vit_hf", "every batch divisible by 4 (dp x micro-batches)"),
            ("custom_op", "every batch divisible by 4 (dp x micro-batches) and every sequence length above 1"),
        ],
    ),
)
def test_sizes_of_an_example(name: str, line: str, planned: Planned) -> None:
    assert sizes_result(*planned(name)).text.startswith(f"holds for {line}")


@pytest.mark.long
def test_numbers_that_are_taken_for_sizes_are_listed(planned: Planned) -> None:
    result = sizes_result(*planned("gpt"))
    (assumption,) = result.assumptions
    assert assumption.startswith("16 in aten.arange.default at gpt.py:")
    assert assumption.endswith("is taken for the sequence length") and assumption in result.text


class Batched(Small):
    """Positions are counted by a number of the sequence's length."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.down(torch.relu(self.up(x)))
        positions = torch.arange(x.shape[1])
        weights = (positions + 1).to(x.dtype).view(1, -1, 1)
        return (hidden * weights).square().sum()


@pytest.mark.parametrize(
    ("batch", "length", "right"), every(2, [(4, 5, True), (8, 3, True), (6, 8, False), (2, 8, False)])
)
def test_the_plan_holds_where_it_is_said_to_and_is_refused_elsewhere(batch: int, length: int, right: bool) -> None:
    """At the sizes of the statement the program equals the model; where the batch does not divide, it is refused."""
    result = sizes_of(Batched(), (torch.randn(8, 6, 6),), "dp=2,tp=2", 4, 2)
    first, second = result.symbols
    assert first.divisor == 4 and second.divisor == 1 and not first.blocker and not second.blocker
    assert (batch % first.divisor == 0) == right
    if right:
        report = verify_plan(Batched(), (torch.randn(batch, length, 6),), ranks=4, plan="dp=2,tp=2", micro_batches=2)
        assert report.verdict.passes
        return
    traced = trace(Batched(), (torch.randn(batch, length, 6),))
    with pytest.raises(NnscalerError, match=r"divi|split"):
        compile_traced(traced, WantedPlan(4, "dp=2,tp=2", micro_batches=2), model={"name": "batched"})


def test_entries_that_constants_number_hold_the_size() -> None:
    (batch, _) = sizes_of(Contrasts(), (torch.randn(8, 6),), "dp=2", 2).symbols
    assert "aten.index.Tensor at test_sizes.py:" in batch.blocker and "whose numbers are constants" in batch.blocker


def test_a_plan_that_does_not_split_them_asks_for_nothing() -> None:
    result = sizes_of(Small(), (torch.randn(4, 8, 6),), "tp=2", 2)
    assert [s.divisor for s in result.symbols] == [1, 1]
