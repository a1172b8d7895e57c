"""Draws made once per step for all micro-batches are those that each of them makes for its own rows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nnscaler.compile import parallelize
from verify import verify_plan
from verify.programs.typing import check_program


class Masked(nn.Module):
    """The loss is a mean over rows that are drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.head = nn.Linear(8, 5)
        self.register_buffer("rate", torch.zeros(8))

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        keep = F.dropout(torch.ones_like(x[:, 0]), 0.4)
        losses = F.cross_entropy(self.body(x), labels, reduction="none")
        return (losses * keep).sum() / keep.sum()


class Drawn(Masked):
    """No input tells of what is drawn: the first stage draws for the whole batch, and the last one needs all of it."""

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        keep = (torch.rand_like(x[:, 0]) > 0.4).to(x.dtype)
        losses = F.cross_entropy(self.body(x), labels, reduction="none")
        return (losses * keep).sum() / keep.sum()


class Counted(Masked):
    """A buffer counts what is drawn, and the same is drawn for the rows."""

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        keep = F.dropout(torch.ones_like(x), 0.4)
        self.rate.copy_(keep.mean(0))
        return F.cross_entropy(self.body(x * keep), labels)


class CountedAlone(Masked):
    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        self.rate.copy_(F.dropout(torch.ones_like(x), 0.4).mean(0))
        return F.cross_entropy(self.body(x), labels)


MODELS: list[Callable[[], nn.Module]] = [Masked, Drawn, Counted, CountedAlone]


def inputs() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(5, (8,), generator=generator)
    return {"x": torch.randn(8, 8, generator=generator), "labels": labels}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("plan", ["pp=2", "dp=2"])
def test_draws_for_all_micro_batches_are_the_model_s(model: Callable[[], nn.Module], plan: str) -> None:
    report = verify_plan(model, inputs(), ranks=2, plan=plan, micro_batches=2, backend="simulator")
    assert report.verdict.passes, [f.message for f in report.findings]


@pytest.mark.parametrize("model", [Masked, Counted, CountedAlone])
def test_draws_under_another_key_are_refuted_from_the_text(model: Callable[[], nn.Module]) -> None:
    found = parallelize(model(), inputs(), ranks=2, plan="dp=2", micro_batches=2)
    assert check_program(found.sources, found.graph, "", found.manifest).proved
    changed = {name: text.replace("'dropout'", "'dropout_of_step'") for name, text in found.sources.items()}
    assert changed != found.sources
    result = check_program(changed, found.graph, "", found.manifest)
    assert "random_numbers_differ" in {f.code for outcome in result.outcomes for f in outcome.findings}
