"""A checkpoint of any plan under any other: every tensor of the model and of the optimizer, bitwise."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.nnscaler.training.saving.resharding import OPTIMIZERS, PLANS, Ranks, load, save

FEW = ("tp=3", "dp=3,zero=3", "pp=2,tp=2")


def reshard(plans: tuple[str, ...], folder: Path) -> int:
    """Save under each plan and load under each; return how many pairs were right."""
    ranks = {plan: Ranks(plan) for plan in plans}
    done = 0
    for optimizer in OPTIMIZERS:
        for source in plans:
            place = folder / f"{optimizer} {source}"
            save(ranks[source], place, optimizer, source)
            for target in plans:
                assert load(ranks[target], place, optimizer, source) > 20 * PLANS[target] / 2
                done += 1
    return done


@pytest.mark.long
def test_three_plans(tmp_path: Path) -> None:
    assert reshard(FEW, tmp_path) == 18


@pytest.mark.long
def test_twelve_plans(tmp_path: Path) -> None:
    assert reshard(tuple(PLANS), tmp_path) == 288
