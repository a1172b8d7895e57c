"""Batches whose parts count as many labels by chance: losses by hand, masks, and what only looks like them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from tests.verify.external import programs
from verify.external.differential_run import ExternalSettings
from verify.external.program import ExternalProgram
from verify.external.unequal_label_counts import NAME
from verify.external.verify import verify_program
from verify.results.verdict import Verdict

Batch = dict[str, Tensor]
WORDS = 7


def words() -> nn.Module:
    return nn.Sequential(nn.Embedding(WORDS, 4), nn.Linear(4, WORDS))


def batch(mask: Tensor) -> Batch:
    """Four rows of words and their labels, of which each row ignores two; `mask` beside them."""
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randint(WORDS, (2, 4, 5), generator=generator)
    y[:, :2] = -100
    return {"x": x, "y": y, "mask": mask}


PROMPTS = torch.tensor([0.0, 0.0, 1.0, 1.0, 1.0]).repeat(4, 1)
# as many count in both parts, and again where ever fewer do from row to row
EVEN = torch.tensor([[1.0, 0, 0, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 1, 1], [0, 0, 0, 0, 0]])
# so with labels that are ignored beside it, where both are thinned, and not where one of them is
CROSSED = F.one_hot(torch.tensor([2, 2, 4, 4]), 5).double()
ROWS = torch.ones(4, dtype=torch.long)  # one value for each


def losses(model: Any, given: Batch) -> Tensor:
    logs = model(given["x"]).log_softmax(-1)
    return -logs.gather(-1, given["y"].clamp(min=0)[..., None])[..., 0]


def by_hand(model: Any, given: Batch) -> Tensor:
    counted = given["y"] != -100
    return (losses(model, given) * counted).sum() / counted.sum()


def masked(model: Any, given: Batch) -> Tensor:
    return (losses(model, given) * given["mask"]).sum() / given["mask"].sum()


def both(model: Any, given: Batch) -> Tensor:
    counted = given["mask"] * (given["y"] != -100)
    return (losses(model, given) * counted).sum() / counted.sum()


def by_row(model: Any, given: Batch) -> Tensor:
    mask = given["mask"]
    return (losses(model, given).mean(1) * mask).sum() / mask.sum()


def chosen(model: Any, given: Batch) -> Tensor:
    return losses(model, given)[given["mask"]].mean()


def targets(model: Any, given: Batch) -> Tensor:
    """Right where ranks average: the mask is a target, and every row counts."""
    return F.binary_cross_entropy_with_logits(model(given["x"])[..., 0], given["mask"].double())


def together(model: Any, given: Batch) -> Tensor:
    """Right on ranks: losses are divided by the labels of all of them."""
    counted = given["mask"] * (given["y"] != -100)
    total = counted.sum()
    parts = 1.0
    if dist.is_initialized():
        dist.all_reduce(total)
        parts = float(dist.get_world_size())
    return (losses(model, given) * counted).sum() * parts / total


def verified(step: Callable[[Any, Batch], Tensor], mask: Tensor, reference: str = "whole") -> Any:
    one = ExternalProgram(
        "masks", words, lambda: batch(mask), programs.replicated, (("dp", 2),), ("dp",), step, reference=reference
    )
    return verify_program(one, ExternalSettings(steps=1, isolate=False))


WRONG = {
    "labels": (by_hand, PROMPTS),
    "mask of prompts": (masked, PROMPTS),
    "mask of integers": (masked, PROMPTS.long()),
    "mask without zeros": (masked, torch.ones(4, 5)),
    "even where thinned by rows": (masked, EVEN),
    "even where all are thinned": (both, CROSSED),
    "truths": (chosen, PROMPTS.bool()),
    "one for each row": (by_row, ROWS),
}


@pytest.mark.parametrize("name", WRONG)
def test_means_over_parts_are_refuted(name: str) -> None:
    step, mask = WRONG[name]
    report = verified(step, mask)
    assert (report.verdict, [check.name for check in report.checks if check.refuted]) == (Verdict.REFUTED, [NAME])
    assert {finding.counter_example["cause"] for finding in report.findings} == {"mean_of_means"}
    counted = "labels" if step in (by_hand, both) else "ones in a mask"
    assert all(finding.message.startswith(f"with unequal numbers of {counted}: ") for finding in report.findings)


@pytest.mark.parametrize("mask", [PROMPTS, torch.ones(4, 5), torch.tensor([0.0, 1, 1, 1, 1]).repeat(4, 1)])
def test_counts_of_all_ranks_are_right(mask: Tensor) -> None:
    report = verified(together, mask)
    assert report.verdict is Verdict.TESTED_EXACT, [finding.message for finding in report.findings]
    assert any(check.name == NAME and check.count > 5 for check in report.checks)


def test_means_over_parts_that_are_meant_are_right() -> None:
    report = verified(masked, PROMPTS, reference="parts")
    assert report.verdict is Verdict.TESTED_EXACT, [finding.message for finding in report.findings]
    assert any(check.name == NAME for check in report.checks)


def test_targets_of_0_and_1_are_no_mask() -> None:
    report = verified(targets, PROMPTS)
    assert report.verdict is Verdict.TESTED_EXACT, [finding.message for finding in report.findings]
    (note,) = (note for note in report.notes if "unequal numbers of labels were not tried" in note)
    assert "no tensor of `batch()` was found to hold labels" in note


def test_masks_on_which_the_model_does_not_run_are_noted() -> None:
    def full(model: Any, given: Batch) -> Tensor:
        if not bool(given["mask"].all()):
            raise ValueError("rows are full here")
        return losses(model, given).mean()

    report = verified(full, torch.ones(4, 5))
    assert report.verdict is Verdict.TESTED_EXACT, [finding.message for finding in report.findings]
    assert [note for note in report.notes if "were not tried" in note and "rows are full here" in note]


def _in_two(model: Any, given: Batch) -> Tensor:
    """The mean of the means over two micro-batches."""
    total = torch.zeros(())
    for number in range(2):
        loss = by_hand(model, {name: tensor.chunk(2)[number] for name, tensor in given.items()}) / 2
        loss.backward()
        total = total + loss.detach()
    return total


def test_means_over_micro_batches_are_refuted_without_data_parts() -> None:
    right = ExternalProgram(
        "one part", words, lambda: batch(PROMPTS), lambda model, mesh: None, (("tp", 2),), (), by_hand
    )
    wrong = replace(right, step=_in_two, reference_step=by_hand)
    settings = ExternalSettings(steps=1, isolate=False)
    report = verify_program(wrong, settings)
    assert (report.verdict, [check.name for check in report.checks if check.refuted]) == (Verdict.REFUTED, [NAME])
    assert {finding.counter_example["cause"] for finding in report.findings} == {"micro_batches"}
    for one in (right, replace(wrong, reference_step=_in_two)):
        assert verify_program(one, settings).verdict is Verdict.TESTED_EXACT
