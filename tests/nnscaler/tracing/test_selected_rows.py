"""Rows that a mask selects: how many they are depends on the data, and what is computed of them does not."""

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
    "defaults": lambda h, m, y: (
        F.hinge_embedding_loss(h[m], h.detach().sign()[m]) + F.margin_ranking_loss(h[m], h.flip(1)[m], h.sign()[m])
    ),
    "booleans": lambda h, m, y: (h > h.flip(1))[m].float().mean() + ((h > 0)[m] & (h < 1)[m]).sum() * h[m].mean(),
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


class Weighed(nn.Module):
    """The operator's result is positive where a row is selected, and negative, or not finite, elsewhere."""

    def __init__(self, operator: Callable[[Tensor, nn.Linear], Tensor]) -> None:
        super().__init__()
        self.head, self.operator = nn.Linear(4, 4), operator
        nn.init.constant_(self.head.weight, 0.3)

    def forward(self, rows: Tensor, m: Tensor, y: Tensor) -> Tensor:
        return self.operator(rows[m], self.head)


OPERATORS: dict[str, Callable[[Tensor, nn.Linear], Tensor]] = {
    "linear": lambda rows, head: head(rows).sqrt().mean(),
    "matmul": lambda rows, head: (rows @ head.weight).log().mean(),
    "after NaN": lambda rows, head: head((1 / (1 - rows)).square()).sqrt().mean(),
    "pointwise": lambda rows, head: (head.bias / (1 - rows)).mean(),
    "power": lambda rows, head: (rows * head.weight[0]).sqrt().sum(),
    "layer norm": lambda rows, head: F.layer_norm((1 - rows).rsqrt(), (4,), head.weight[0]).mean(),
    "loss": lambda rows, head: F.binary_cross_entropy_with_logits((0.5 - rows).rsqrt(), rows, pos_weight=head.bias),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_no_other_row_makes_a_gradient_nan(name: str) -> None:
    """The self-check sees the first weights alone: with the second, ones have no root."""
    model, rows, m = Weighed(OPERATORS[name]), torch.full((8, 4), 0.4), torch.arange(8) % 2 > 0
    rows[:, 3], labels = 0.1, torch.zeros(8, dtype=torch.int64)
    traced = trace(model, {"rows": rows, "m": m, "y": labels})
    model.head.weight.data.copy_(torch.tensor([0.5, 0.5, 0.5, -2.0]).repeat(4, 1))
    model.head.weight.data[:, :] = model.head.weight.data if name != "matmul" else model.head.weight.data.T
    model.head.bias.data.zero_()
    parameters = dict(model.named_parameters())
    expected = model(rows, m, labels)
    found = run_graph(traced.graph, {**traced.state, **parameters}, {"rows": rows, "m": m, "y": labels})
    losses = (found[traced.graph.loss], expected)
    gradients = [torch.autograd.grad(loss, list(parameters.values()), allow_unused=True) for loss in losses]
    torch.testing.assert_close(*gradients)
    assert all(g is None or g.isfinite().all() for g in gradients[0])
