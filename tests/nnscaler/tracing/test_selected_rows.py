"""What is computed of rows that a mask selects, where how many they are depends on the data."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nnscaler.errors import NnscalerError
from nnscaler.tracing import run_graph, trace

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]  # of scores, a mask and labels


def written(h: Tensor, _m: Tensor, _y: Tensor) -> Tensor:
    """Where boxes overlap, as the losses of torchvision have it."""
    overlap, area = h[:, 0] > 0, torch.zeros_like(h[:, 0])
    area[overlap] = (h[:, 1][overlap] - h[:, 2][overlap]) * 2
    return area.square().sum()


def tokens(h: Tensor, m: Tensor, y: Tensor) -> Tensor:
    """Of a mask over two dims, which is computed twice."""
    rows = h.view(6, 2, 4)[m.view(6, 2)]
    return F.cross_entropy(F.layer_norm(rows, (4,)) @ torch.ones(4, 4).triu().to(h), y.view(6, 2)[m.view(6, 2)])


LOSSES: dict[str, Loss] = {
    "mean": lambda h, m, y: h[m].mean() + h[~m].pow(2).sum(),
    "roots": lambda h, m, y: torch.log(h[h > 0.01]).mean() + (h[m] - h.flip(1)[m]).pow(2).sum(-1).sqrt().mean(),
    "differences": lambda h, m, y: F.mse_loss(h[m], h.detach().flip(1)[m]) + F.l1_loss(h[m], h[m] * 2, reduction="sum"),
    "unreduced": lambda h, m, y: F.smooth_l1_loss(h[m], h.detach().flip(1)[m], reduction="none").mean(),
    "labels": lambda h, m, y: F.cross_entropy(h[y != 1], y[y != 1], label_smoothing=0.1),
    "log-probabilities": lambda h, m, y: (
        F.nll_loss(h.log_softmax(-1)[m], y[m]) + h[m].double().softmax(-1).pow(2).sum()
    ),
    "layers": tokens,
    "written": written,
}


class Selects(nn.Module):
    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.proj, self.loss = nn.Linear(5, 4), loss

    def forward(self, x: Tensor, m: Tensor, y: Tensor) -> Tensor:
        return self.loss(self.proj(x), m, y)


def batch(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(12, 5, generator=generator), torch.randint(0, 4, (12,), generator=generator)
    return {"x": x, "m": torch.rand(12, generator=generator) > 0.5, "y": y}


@pytest.mark.parametrize("name", LOSSES)
def test_the_graph_is_right_for_other_masks(name: str) -> None:
    torch.manual_seed(0)
    model = Selects(LOSSES[name])
    traced = trace(model, batch(0))  # with its self-check
    assert batch(0)["m"].sum() != batch(1)["m"].sum()
    expected = model(**batch(1))
    parameters = dict(model.named_parameters())
    found = run_graph(traced.graph, {**traced.state, **parameters}, batch(1))[traced.graph.loss]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    gradients = [torch.autograd.grad(loss, list(parameters.values())) for loss in (found, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)


def test_none_selected_is_what_torch_says() -> None:
    model, nothing = Selects(LOSSES["mean"]), {**batch(0), "m": torch.zeros(12, dtype=torch.bool)}
    traced = trace(model, batch(0))
    assert run_graph(traced.graph, dict(traced.state), nothing)[traced.graph.loss].isnan() and model(**nothing).isnan()


def changed_mask(h: Tensor, m: Tensor, y: Tensor) -> Tensor:
    mask = m.clone()
    rows = h[mask]
    mask[:3] = False
    return rows.sum() + h[mask].sum()


@pytest.mark.parametrize("loss", [lambda h, m, y: h[m].cumsum(0).sum(), lambda h, m, y: h[m].std(), changed_mask])
def test_what_counts_rows_or_changes_the_mask_is_refused(loss: Loss) -> None:
    with pytest.raises(NnscalerError, match="a tensor's shape depends on data") as caught:
        trace(Selects(loss), batch(0))
    assert caught.value.where is not None and caught.value.where.file == __file__
