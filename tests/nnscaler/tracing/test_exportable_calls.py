"""Calls of torch that its export does not record are trained as the eager model does."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import nnscaler
from nnscaler.runtime.communication.communicator import Communicator
from nnscaler.runtime.communication.simulator import Simulator
from nnscaler.tracing.export.exportable_calls import exportable_calls
from nnscaler.training.engine import Engine
from nnscaler.training.program_on_rank import EngineSettings


class Gaussian(nn.Module):
    """With a variance for each row, and one for all."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.var = nn.Linear(6, 4), nn.Linear(6, 1)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        targets = F.one_hot(labels, 4).to(x.dtype)
        loss = nn.GaussianNLLLoss(full=True)(self.mean(x), targets, F.softplus(self.var(x)))
        return loss + F.gaussian_nll_loss(self.mean(x), targets, 0.5, reduction="sum")


class Counted(nn.Module):
    """Classes weigh less the more there are of them in the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        weight = 1 / (1 + torch.bincount(labels, minlength=4).to(x.dtype))
        shift = labels.bincount(x[:, 0], 4).to(x.dtype)
        return F.cross_entropy(self.head(x) + shift, labels, weight=weight)


class Averaged(nn.Module):
    """Statistics of batch norm are means over all batches so far."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(6, momentum=None), nn.Linear(6, 4)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.norm(x)), labels)


class Correlated(nn.Module):
    """Features of the batch are to have no covariance, with and without weights."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.one = nn.Linear(6, 4), nn.Linear(6, 1)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        h = self.head(x)
        agrees = torch.corrcoef(torch.stack([self.one(x)[:, 0], labels.to(x.dtype)]))[0, 1]
        weighted = torch.cov(h.T, fweights=labels + 1, aweights=x[:, 0].abs() + 1)
        apart = h.T.corrcoef().square().sum() + h.T.cov(correction=0).square().sum() + weighted.square().sum()
        return apart + self.one(x)[:, 0].cov(fweights=labels + 1) - agrees


def batch(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(12, 6, generator=generator, dtype=torch.float64)
    return {"x": x, "labels": torch.randint(0, 3, (12,), generator=generator)}


@pytest.mark.parametrize("kind", [Gaussian, Counted, Averaged, Correlated])
def test_training_is_that_of_the_eager_model(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model = kind()
    program = nnscaler.parallelize(model, batch(0) | {"x": batch(0)["x"].float()}, ranks=2, plan="dp=2,zero=1")
    plain = copy.deepcopy(model).double()
    sgd, expected = torch.optim.SGD(plain.parameters(), lr=0.1), []
    for step in range(3):
        loss = plain(**batch(step))
        loss.backward()
        sgd.step()
        sgd.zero_grad()
        expected.append(float(loss.detach()))

    def work(communicator: Communicator) -> tuple[list[float], dict[str, Tensor]]:
        engine = Engine(program, communicator, EngineSettings(dtype="float64", device="cpu"))
        optimizer, losses = engine.optimizer(torch.optim.SGD, lr=0.1), []
        for step in range(3):
            losses.append(float(engine.step({n: t.chunk(2)[engine.rank] for n, t in batch(step).items()})))
            optimizer.step()
            engine.zero_grad()
        return losses, engine.state_dict()

    for losses, state in Simulator(2).run(work):
        assert losses == pytest.approx(expected, rel=1e-11)
        torch.testing.assert_close(state, dict(plain.state_dict()), rtol=1e-11, atol=1e-12)


def test_a_number_beyond_those_that_are_counted_ends_the_run() -> None:
    """Eager goes on with a longer tensor."""
    engine = Engine(nnscaler.parallelize(Counted(), batch(0) | {"x": batch(0)["x"].float()}, ranks=1, plan="dp=1"))
    with pytest.raises(Exception, match="index"):
        engine.step({"x": batch(0)["x"].float(), "labels": torch.full((12,), 4)})


COUNTS, WEIGHTS = torch.tensor([1, 2, 1, 3, 1]), torch.tensor([0.5, 1.0, 2.0, 1.0, 0.1])


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.float16, torch.complex64])
def test_covariance_is_that_of_torch_in_every_dtype(dtype: torch.dtype) -> None:
    """That of whole numbers is a float."""
    numbers = torch.tensor([[1, 5, 2, 8, 3], [2, 2, 7, 1, 0]]).to(dtype)
    for given in ({}, {"correction": 0}, {"fweights": COUNTS}, {"fweights": COUNTS, "aweights": WEIGHTS}):
        expected = torch.cov(numbers, **given), torch.corrcoef(numbers)
        with exportable_calls():
            found = torch.cov(numbers, **given), torch.corrcoef(numbers)
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("numbers", "given"),
    [
        (torch.ones(2, 5, dtype=torch.bool), {}),
        (torch.ones(2, 5, 1), {}),
        (torch.ones(2, 5), {"fweights": WEIGHTS}),
        (torch.ones(2, 5), {"aweights": COUNTS}),
        (torch.ones(2, 5), {"fweights": COUNTS[:1]}),
    ],
)
def test_covariance_fails_as_that_of_torch(numbers: Tensor, given: dict[str, Tensor]) -> None:
    with pytest.raises(RuntimeError, match=r"cov\(\): ") as expected:
        torch.cov(numbers, **given)
    with exportable_calls(), pytest.raises(RuntimeError, match=r"cov\(\): ") as caught:
        torch.cov(numbers, **given)
    assert str(caught.value) == str(expected.value)
