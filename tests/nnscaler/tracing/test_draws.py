"""Random operators: graphs draw what eager draws in a comparison, and from the right distributions."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nnscaler.errors import NnscalerError
from nnscaler.tracing import run_graph, trace
from nnscaler.tracing.float64_run import without_dropout

SIZE = (40, 50)
DRAWS: dict[str, tuple[Callable[[Tensor], Tensor], float, float]] = {  # of a tensor of halves; mean, deviation
    "rand": (lambda x: torch.rand(SIZE), 0.5, 12**-0.5),
    "rand_like": (torch.rand_like, 0.5, 12**-0.5),
    "randn": (lambda x: torch.randn(*SIZE), 0, 1),
    "randn_like": (torch.randn_like, 0, 1),
    "normal": (lambda x: torch.normal(2.0, 3.0, SIZE), 2, 3),
    "normal of means": (lambda x: torch.normal(x, 3.0), 0.5, 3),
    "normal of deviations": (lambda x: torch.normal(2.0, x), 2, 0.5),
    "normal of both": (lambda x: torch.normal(x, x), 0.5, 0.5),
    "normal_": (lambda x: torch.empty_like(x).normal_(1, 2), 1, 2),
    "uniform_": (lambda x: torch.empty_like(x).uniform_(-1, 3), 1, 4 * 12**-0.5),
    "bernoulli": (torch.bernoulli, 0.5, 0.5),
    "bernoulli_": (lambda x: torch.empty_like(x).bernoulli_(0.2), 0.2, 0.4),
    "bernoulli_ of its default": (lambda x: x.new_empty(SIZE).bernoulli_(0.5), 0.5, 0.5),
    "bernoulli_ of a tensor": (lambda x: torch.empty_like(x).bernoulli_(x), 0.5, 0.5),
    "exponential_": (lambda x: torch.empty_like(x).exponential_(2.0), 0.5, 0.5),
    "randint": (lambda x: torch.randint(3, 7, SIZE), 4.5, 1.25**0.5),
    "randint from 0": (lambda x: torch.randint(4, SIZE), 1.5, 1.25**0.5),
    "randint_like": (lambda x: torch.randint_like(x, 3, 7), 4.5, 1.25**0.5),
    "random_": (lambda x: torch.empty_like(x).random_(4), 1.5, 1.25**0.5),
    "random_ from a number on": (lambda x: torch.empty_like(x).random_(3, 7), 4.5, 1.25**0.5),
    "rrelu": (lambda x: F.rrelu(-x, 0.2, 0.4, training=True), -0.15, 0.1 * 12**-0.5),
    "randperm": (lambda x: torch.randperm(2000), 999.5, 2000 * 12**-0.5),
    "a generator": (lambda x: torch.empty_like(x).normal_(generator=None), 0, 1),
    "gamma": (lambda x: torch.distributions.Gamma(5 * x, 4 * x).sample(), 1.25, 2.5**0.5 / 2),
    "gamma below 1": (lambda x: torch.distributions.Gamma(x, 2 * x).sample(), 0.5, 0.5**0.5),
    "beta": (lambda x: torch.distributions.Beta(x, x).sample(), 0.5, 8**-0.5),
    "dirichlet": (lambda x: torch.distributions.Dirichlet(x).sample(), 1 / 50, (0.02 * 0.98 / 26) ** 0.5),
    "a distribution": (lambda x: torch.distributions.Normal(x, 2 * x).rsample(), 0.5, 1),
}


class Draws(nn.Module):
    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.draw = draw

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        drawn = self.draw(x * self.scale.detach())
        return (drawn * self.scale * torch.linspace(0, 1, drawn.numel()).view_as(drawn)).sum(), drawn


@pytest.mark.parametrize("name", DRAWS)
def test_a_graph_draws_what_a_compared_run_draws(name: str) -> None:
    draw, mean, deviation = DRAWS[name]
    model, x = Draws(draw), torch.full(SIZE, 0.5)
    traced = trace(model, (x,))  # with its self-check
    values = run_graph(traced.graph, dict(traced.state), {"x": x})
    with without_dropout():
        loss, drawn = model(x)
    torch.testing.assert_close(values[traced.graph.loss], loss, rtol=1e-5, atol=1e-5)
    wide = drawn.double()
    assert abs(wide.mean() - mean) < 5 * deviation / 2000**0.5
    assert abs(wide.std() - deviation) < 0.1 * deviation
    used = {op.operator for op in traced.graph.operations}
    assert used & {"nnscaler.random_uniform", "nnscaler.random_normal"}


def test_outside_of_a_comparison_torch_draws() -> None:
    torch.manual_seed(0)
    assert not torch.equal(torch.rand(4), torch.rand(4))
    with without_dropout():
        assert torch.equal(torch.rand(4), torch.rand(4))
        assert not torch.equal(torch.rand(4)[:1], torch.rand(4)[1:2])


def test_the_gradient_of_rrelu_has_the_drawn_slopes() -> None:
    x = torch.linspace(-1, 1, 12).requires_grad_()
    for function in (F.rrelu, lambda t, **k: F.rrelu(t.clone(), inplace=True, **k)):
        with without_dropout():
            y = function(x, training=True)
        (gradient,) = torch.autograd.grad(y.sum(), x)
        torch.testing.assert_close(gradient * x, y)
        assert len(gradient.unique()) == 7


class Picks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        p = self.proj(x).softmax(-1)
        return p.gather(1, torch.multinomial(p, 1)).sum()


class DropsInLstm(nn.Module):
    def __init__(self, p: float) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 6, 2, dropout=p)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0].sum()


@pytest.mark.parametrize("model", [Picks(), DropsInLstm(0.5)])
def test_what_has_no_formula_is_refused_at_its_line(model: nn.Module) -> None:
    with pytest.raises(NnscalerError, match="draws random numbers from torch's generator") as raised:
        trace(model, (torch.randn(4, 6),))
    assert raised.value.where is not None and raised.value.where.file == __file__
    trace(DropsInLstm(0.0), (torch.randn(4, 6),))
