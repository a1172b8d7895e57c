"""Numbers that mean something of their own among ids are tried, wherever an operator takes them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.sampling import every
from tests.verify.op_checks.test_beyond_bounds import verified
from verify.evidence.inputs.draw_values import with_sentinels
from verify.results.verdict import Verdict

EOS = (151643, 151645)


class Config:
    pad = 31999


def mean_times_count(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels) * labels.numel()  # the mean is of fewer: -100 is ignored


def over_the_share_of_valid_ones(logits: Tensor, labels: Tensor, ignored: int = -100) -> Tensor:
    valid = labels != ignored
    chosen = torch.where(valid, labels, 0)
    losses = -logits.log_softmax(-1).gather(-1, chosen[:, None])[:, 0]
    return losses * valid / valid.to(losses.dtype).mean()


def without_ends(x: Tensor, ids: Tensor) -> Tensor:
    return x * (1 - torch.isin(ids, torch.tensor(list(EOS))).to(x.dtype).mean())


def without_padding(x: Tensor, ids: Tensor) -> Tensor:
    return x * (1 - (ids.long() == Config.pad).to(x.dtype).mean())


WRONG = [
    (mean_times_count, "n+ v^, n+ -> ()"),
    (over_the_share_of_valid_ones, "n v^, n -> n"),
    (without_ends, "n d, n -> n d"),
    (without_padding, "n d, n -> n d"),
]


@pytest.mark.parametrize("seed", [0, pytest.param(3, marks=pytest.mark.long)])
@pytest.mark.parametrize(("function", "annotation"), every(2, WRONG))
def test_shards_with_unequal_numbers_of_them_are_refuted(function: Any, annotation: str, seed: int) -> None:
    report = verified(function, annotation, seed)
    assert report.verdict is Verdict.REFUTED
    (finding,) = report.findings
    assert finding.code == "annotation_wrong" and "in input 1, among others" in finding.counter_example["ids"]


def summed(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels, reduction="sum")


def masked(logits: Tensor, labels: Tensor) -> Tensor:
    valid = labels != -100
    chosen = labels.masked_fill(~valid, 0)
    return -logits.log_softmax(-1).gather(-1, chosen[:, None])[:, 0] * valid


def rows_of(ids: Tensor, table: Tensor) -> Tensor:
    return F.embedding(ids, table).exp()  # which raises for an id out of range


def rows_from_the_end(ids: Tensor, table: Tensor) -> Tensor:
    return table[ids].exp()  # of which -1 is an id


@pytest.mark.parametrize(
    ("function", "annotation"),
    [
        (summed, "n+ v^, n+ -> ()"),
        (masked, "n v^, n -> n"),
        (rows_of, "n, v^ d -> n d"),
        (rows_from_the_end, "n, v^ d -> n d"),
    ],
)
def test_right_ones_pass(function: Any, annotation: str) -> None:
    assert verified(function, annotation).verdict.passes


def test_a_third_of_the_elements_more_towards_one_end() -> None:
    ids = torch.zeros(12, dtype=torch.long)
    first, second = (with_sentinels((ids,), ((0, -100), (0, 7)), seed)[0] for seed in (0, 1))
    for found in (first, second):
        assert sorted(found[found != 0].tolist()) == [-100, -100, 7, 7]
    assert (first[:6] != 0).sum() > (first[6:] != 0).sum() and (second[:6] != 0).sum() < (second[6:] != 0).sum()
    assert not ids.any()
