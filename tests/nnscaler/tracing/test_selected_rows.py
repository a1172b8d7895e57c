"""Rows that a mask selects: how many they are depends on the data, and what is computed of them does not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nnscaler.errors import NnscalerError
from nnscaler.tracing import run_graph, trace
from nnscaler.tracing.export.selected_rows import keep_rows_in_place

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]  # of scores, a mask and labels


def written(h: Tensor, _m: Tensor, _y: Tensor) -> Tensor:
    """Where boxes overlap, as the losses of torchvision have it."""
    overlap, area = h[:, 0] > 0, torch.zeros_like(h[:, 0])
    area[overlap] = (h[:, 1][overlap] - h[:, 2][overlap]) * 2
    return area.square().sum()


def prompted(h: Tensor, m: Tensor, y: Tensor) -> Tensor:
    """Points of prompts take an embedding of their kind, as Segment Anything adds it to them."""
    points, kinds = h * 1.5, h[:2].tanh()
    points[y == 0] = 0.0
    points[y == 0] += kinds[0]
    points[m] += kinds[1:]
    points[m] *= 2
    return points.square().sum()


def changed_between(h: Tensor, m: Tensor, y: Tensor) -> Tensor:
    rows = h[m]
    before = rows * 3
    rows += h[0]
    rows *= before
    return rows.sum() + before.square().sum()


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
    "added to": prompted,
    "changed between": changed_between,
}


# What computes its mask twice: torch 2.11 does not know that the rows are as many, as later releases do.
TWICE = ("labels", "layers") if torch.__version__ < "2.12" else ()


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
    if name in TWICE:
        with pytest.raises(NnscalerError, match=r"(?s)Ne\(u0, u1\).*help: .* compute it once and select by it twice"):
            trace(Selects(LOSSES[name]), batch(0))
    else:
        assert_right_for_other_masks(LOSSES[name])


def assert_right_for_other_masks(loss: Loss) -> None:
    torch.manual_seed(0)
    model = Selects(loss)
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


def changed_rows(h: Tensor, m: Tensor, y: Tensor) -> Tensor:
    rows = h[m]
    rows[:, 0] = 0
    return rows.mean()


def changed_under_a_view(h: Tensor, m: Tensor, y: Tensor) -> Tensor:
    rows = h[m]
    first = rows[:, :2]
    rows += h[0]
    return first.mean()


def changed_past_autograd(h: Tensor, m: Tensor, y: Tensor) -> Tensor:
    doubled = h[m] * 2
    doubled.detach().mul_(2)
    return doubled.mean()


REFUSED: dict[str, Loss] = {
    "counts": lambda h, m, y: h[m].cumsum(0).sum(),
    "deviates": lambda h, m, y: h[m].std(),
    "unfinite norm": lambda h, m, y: F.layer_norm(h[m], (4,), h[0], eps=0.0).mean(),
    "changed mask": changed_mask,
    "changed rows": changed_rows,
    "changed under a view": changed_under_a_view,
    "changed past autograd": changed_past_autograd,
}


@pytest.mark.parametrize("loss", REFUSED.values(), ids=REFUSED)
def test_what_counts_rows_or_changes_them_is_refused(loss: Loss) -> None:
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
    "matmul": lambda rows, head: (rows @ head.weight.T).sqrt().mean(),
    "after NaN": lambda rows, head: head((1 / (1 - rows)).square()).sqrt().mean(),
    "pointwise": lambda rows, head: (head.bias / (1 - rows)).mean(),
    "product": lambda rows, head: (rows * head.weight[0] + 1).sqrt().sum(),
    "layer norm": lambda rows, head: F.layer_norm((1 - rows).rsqrt(), (4,), head.weight[0]).mean(),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_no_other_row_makes_a_gradient_nan(name: str) -> None:
    """The self-check sees the first weights alone: with the second, ones have no root."""
    model, rows, m = Weighed(OPERATORS[name]), torch.full((8, 4), 0.4), torch.arange(8) % 2 > 0
    rows[:, 3], labels = 0.1, torch.zeros(8, dtype=torch.int64)
    traced = trace(model, {"rows": rows, "m": m, "y": labels})
    model.head.weight.data.copy_(torch.tensor([0.5, 0.5, 0.5, -2.0]).repeat(4, 1))
    model.head.bias.data.zero_()
    parameters = dict(model.named_parameters())
    expected = model(rows, m, labels)
    found = run_graph(traced.graph, {**traced.state, **parameters}, {"rows": rows, "m": m, "y": labels})
    losses = (found[traced.graph.loss], expected)
    gradients = [torch.autograd.grad(loss, list(parameters.values()), allow_unused=True) for loss in losses]
    torch.testing.assert_close(*gradients)
    assert all(g is None or g.isfinite().all() for g in gradients[0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_mean_is_right_where_the_sum_of_its_dtype_is_not(dtype: torch.dtype) -> None:
    """The sum of 65,792 ones is infinite in float16, and 65,536 in bfloat16."""
    model, many = Selects(lambda h, m, y: h.exp()[m].mean()), 16_450
    model.to(dtype).proj.weight.data.zero_()
    model.proj.bias.data.zero_()
    inputs = {"x": torch.ones(many, 5, dtype=dtype), "m": torch.arange(many) > 1, "y": torch.zeros(1)}
    traced = trace(model, inputs)
    assert run_graph(traced.graph, dict(traced.state), inputs)[traced.graph.loss].item() == 1 == model(**inputs).item()


@pytest.mark.parametrize("name", ["changed rows", "changed past autograd"])
def test_no_graph_leaves_a_write_into_rows_out(name: str) -> None:
    """Were the shape not refused, the mean would be that of rows before the write."""
    program = torch.export.export(Selects(REFUSED[name]), tuple(batch(0).values()), strict=False)
    keep_rows_in_place(program)
    left = [node.target for node in program.graph.nodes]
    assert torch.ops.aten.mean.default in left and torch.ops.aten.index.Tensor in left


def test_masks_that_are_drawn_are_not_taken_for_one() -> None:
    def drawn(h: Tensor, _m: Tensor, _y: Tensor) -> Tensor:
        masks = [torch.randint(0, 2, (12,), dtype=torch.bool) for _ in range(2)]
        return (h[masks[0]].mean() * h[masks[1]].mean()).sum()

    program = torch.export.export(Selects(drawn), tuple(batch(0).values()), strict=False)
    keep_rows_in_place(program)
    counted = [n.args[0] for n in program.graph.nodes if n.target == torch.ops.aten.sum.default]
    assert len({n for n in counted if n.meta["val"].dtype == torch.bool}) == 2
