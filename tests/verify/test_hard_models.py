"""Models that are hard to make parallel, or to compare: each is exact, or is refused with a reason."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import verify
from nnscaler.errors import NnscalerError
from nnscaler.transform.plan import Plan, RecomputeStep
from tests.sampling import every, only

X = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
Y = torch.arange(8) % 3


class Noisy(nn.Module):
    """A variational autoencoder with stochastic depth."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 16)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.mean, self.deviation, self.back = nn.Linear(16, 4), nn.Linear(16, 4), nn.Linear(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.inner(x))
        for block in self.blocks:
            keep = h.new_empty(h.shape[0], 1).bernoulli_(0.7).div_(0.7)
            h = h + torch.relu(block(h)) * keep
        z = torch.distributions.Normal(self.mean(h), self.deviation(h).exp()).rsample()
        return F.mse_loss(self.back(z + torch.rand(4) * 0.1), x)


class DropsEverywhere(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv1d(1, 16, 3, padding=1), nn.Linear(16, 3)
        self.drops = nn.Sequential(
            nn.Dropout(0.3), nn.Dropout1d(0.3), nn.AlphaDropout(0.2), nn.FeatureAlphaDropout(0.2), nn.RReLU()
        )

    def forward(self, x: Tensor) -> Tensor:
        h = self.drops(self.conv(x[:, None]))
        return F.cross_entropy(self.head(F.dropout(h, 0.1, training=True).mean(-1)), Y)


class Promoted(nn.Module):
    """Floating numbers made of integers."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        index = torch.arange(x.shape[1])
        return ((self.proj(x) + index * 0.1 + torch.where(index > 3, 0.1, 0.7)) ** 2).mean()


class Grouped(nn.Module):
    """A mixture of experts as products by groups, which torch does not have in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.route = nn.Linear(8, 4)
        self.up, self.down = nn.Parameter(torch.randn(4, 8, 16) * 0.3), nn.Parameter(torch.randn(4, 16, 8) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        weight, expert = self.route(x).softmax(-1).max(-1)
        order = expert.argsort(stable=True)
        ends = F.one_hot(expert, 4).sum(0).cumsum(0).to(torch.int32)
        h = F.grouped_mm(x[order].bfloat16(), self.up.bfloat16(), offs=ends)
        h = F.grouped_mm(F.gelu(h), self.down.bfloat16(), offs=ends).to(x.dtype)
        return (torch.zeros_like(x).index_copy(0, order, h) * weight[:, None]).square().mean()


class SparseGradient(nn.Module):
    """Torch cannot clip a sparse gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.proj = nn.Embedding(8, 8, sparse=True), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(self.words(x.argmax(-1))).square().mean()


class WithoutElements(nn.Module):
    """An empty parameter tells a module its device, and a checkpoint has it."""

    def __init__(self) -> None:
        super().__init__()
        self.proj, self.dummy = nn.Linear(8, 8), nn.Parameter(torch.empty(0))
        self.register_buffer("rows", torch.empty(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x.to(self.dummy.device)).square().mean()


class HidesTeacher(nn.Module):
    """A module in a list is no part: its weights are not trained, and not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.proj, self.teacher = nn.Linear(8, 8), [nn.Linear(8, 8).requires_grad_(False)]

    def forward(self, x: Tensor) -> Tensor:
        return F.mse_loss(self.proj(x), self.teacher[0](x))


KINDS = [Noisy, DropsEverywhere, Promoted, Grouped, SparseGradient, WithoutElements, HidesTeacher]


@pytest.mark.parametrize(("kind", "plan"), only((0, 3, 4, 7, 8, 11, 12), product(KINDS, ["dp=2", "tp=2"])))
def test_exact(kind: type[nn.Module], plan: str) -> None:
    torch.manual_seed(0)
    report = verify.verify_plan(kind(), (X,), ranks=2, plan=plan)
    assert report.exit_code == 0, report.to_json()


class ReadsOneOfTwo(nn.Module):
    """Of a decomposition one result, of a recurrent layer its state, and of a pool its indices."""

    def __init__(self) -> None:
        super().__init__()
        self.proj, self.chain = nn.Linear(8, 8), nn.GRU(8, 8, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.proj(x)[:, None] * torch.eye(8)
        _, state = self.chain(h)
        _, sizes, _ = torch.linalg.svd(h + torch.eye(8))
        _, upper = torch.linalg.qr(h + state.mT @ state)
        _, places = F.max_pool1d(upper, 2, return_indices=True)
        return (sizes[:, None] * upper * (places.sum(-1, keepdim=True) + 1)).square().mean()


@pytest.mark.parametrize("plan", ["dp=2", "pp=2"])
def test_one_result_of_several_is_read(plan: str) -> None:
    torch.manual_seed(0)
    report = verify.verify_plan(ReadsOneOfTwo(), (X,), ranks=2, plan=plan)
    assert report.exit_code == 0, report.to_json()


class Dense(nn.Module):
    """Classes in the second dim, labels in two, one sample of which is ignored whole."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return F.cross_entropy(x.view(-1, 4, 2), labels)


@pytest.mark.long
def test_unequal_means_over_micro_batches() -> None:
    torch.manual_seed(0)
    inputs = {"x": X, "labels": (torch.arange(16) % 4).view(8, 2).masked_fill(torch.arange(8)[:, None] == 3, -100)}
    report = verify.verify_plan(Dense(), inputs, ranks=4, plan="dp=2,pp=2", micro_batches=2)
    assert report.exit_code == 0, report.to_json()


@pytest.mark.long
def test_random_numbers_in_micro_batches() -> None:
    torch.manual_seed(0)
    report = verify.verify_plan(Noisy(), (X,), ranks=4, plan="dp=2,pp=2", micro_batches=2)
    assert report.exit_code == 0, report.to_json()
    assert any("drew the same random numbers" in note for note in report.notes)


class Spectral(nn.Module):
    """As a Fourier neural operator: the weights of frequencies are complex."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.frequencies = nn.Linear(8, 8), nn.Parameter(torch.randn(5, dtype=torch.cfloat))

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.irfft(torch.fft.rfft(self.up(x)) * self.frequencies).sin().mean()


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_complex_parameters_are_trained(optimizer: str) -> None:
    torch.manual_seed(0)
    options = {"depth": "quick", "level": "run", "train": True, "train_steps": 3, "optimizer": optimizer}
    report = verify.verify_plan(Spectral(), (X,), ranks=2, plan="dp=2,zero=3", **options)  # type: ignore[arg-type]
    assert report.exit_code == 0, report.to_json()


class CountsBatches(nn.Module):
    """A cumulative average divides by the number of batches, which is a number of the step."""

    def __init__(self) -> None:
        super().__init__()
        self.proj, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8, momentum=None)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.proj(x)).square().sum()


def test_an_average_over_the_batches_of_all_steps() -> None:
    report = verify.verify_plan(CountsBatches(), (X,), ranks=2, plan="dp=2", train=True, depth="quick", level="run")
    assert report.exit_code == 0, report.to_json()


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.Module) -> Tensor:  # noqa: ARG004
        return layer(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]  # noqa: ARG004
        return gradient, None


class HidesParameters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return Scaled.apply(x, self.proj).sum()


class NothingToTrain(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sum()


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (HidesParameters, "Scaled is given a module"),
        (NothingToTrain, "does not depend on any parameter"),
    ],
)
def test_refused(kind: type[nn.Module], message: str) -> None:
    with pytest.raises(NnscalerError, match=message) as raised:
        verify.verify_plan(kind(), (X,), ranks=2, plan="dp=2")
    where = raised.value.where
    assert where is None or where.file == __file__


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        for reentrant in (True, False):
            x = checkpoint(self.second, torch.tanh(self.first(x)), use_reentrant=reentrant)
        return x.square().sum()


@pytest.mark.long
def test_checkpointing_by_torch() -> None:
    assert verify.verify_plan(Checkpointed(), (X,), ranks=2, plan="tp=2").exit_code == 0


def test_nccl_without_gpus_is_no_verdict() -> None:
    with pytest.raises(NnscalerError, match="needs a GPU for each rank"):
        verify.verify_plan(Promoted(), (X,), ranks=512, plan="dp=512", backend="nccl")


class Counting(nn.Module):
    """Its buffer counts steps, and the loss reads it: micro-batches must all see the value before the step."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 8), nn.Linear(8, 3)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.steps.add_(1.0)  # type: ignore[operator]
        return F.cross_entropy(self.outer(torch.relu(self.inner(x))), y) * (1 + 0.1 * self.steps)


@pytest.mark.parametrize("micro_batches", every(2, [1, 2, 4]))
def test_a_buffer_changes_once_per_step(micro_batches: int) -> None:
    report = verify.verify_plan(Counting, {"x": X, "y": Y}, ranks=2, plan="dp=2", micro_batches=micro_batches)
    assert report.verdict.passes, report.to_json()
    assert any(check.name.startswith("buffers") for check in report.checks)


class WeightNormed(nn.Module):
    """The weight is an attribute with a history, of which torch makes no copy."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.utils.weight_norm(nn.Linear(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x).square().mean()


class MakesBuffers(nn.Module):
    """Buffers that forward makes: no program has them, and each step makes them again."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(8, 4)
        self.register_buffer("second", None, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.register_buffer("first", torch.arange(8).sqrt(), persistent=False)
        if self.second is None:
            self.register_buffer("second", torch.arange(4).cos(), persistent=False)
        return (self.proj(x * self.first) * self.second).square().mean()


@pytest.mark.filterwarnings("ignore:.*weight_norm")
@pytest.mark.parametrize("made", [False, True])
@pytest.mark.parametrize("kind", [WeightNormed, MakesBuffers])
def test_what_torch_does_not_copy_and_what_forward_makes(kind: type[nn.Module], made: bool) -> None:
    report = verify.verify_plan(kind() if made else kind, (X,), ranks=2, plan="tp=2")
    assert report.verdict.passes, report.to_json()
    assert any(check.name == "gradients" for check in report.checks)


class WithoutLoss(nn.Module):
    """A batch norm in training mode: its one forward changes buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.proj, self.norm = nn.Linear(8, 4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.proj(x))


def test_buffers_of_a_program_without_a_loss() -> None:
    report = verify.verify_plan(WithoutLoss(), (X,), ranks=2, plan="dp=2", backend="simulator", level="run")
    assert report.verdict.passes, report.to_json()
    assert any(check.name.startswith("buffers") and check.count for check in report.checks)


class Shifting(nn.Module):
    """Its buffer grows by steps, and is read beside what tensor parallelism cuts: it is cut too, and joined again."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 6), nn.Linear(6, 3)
        self.register_buffer("shift", torch.zeros(6))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.shift.add_(0.1)  # type: ignore[operator]
        return F.cross_entropy(self.outer(self.inner(x) + self.shift), y)  # type: ignore[operator]


@pytest.mark.parametrize(("ranks", "plan"), [(2, "tp=2"), (3, "tp=3"), (4, "tp=2,pp=2")])
def test_a_buffer_that_is_cut_in_a_step_is_joined_once(ranks: int, plan: str) -> None:
    report = verify.verify_plan(Shifting, {"x": X, "y": Y}, ranks=ranks, plan=plan, micro_batches=2)
    assert report.verdict.passes, report.to_json()


class Averaging(nn.Module):
    """Its buffer is changed by the forward pass that reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 8), nn.Linear(8, 3)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = (self.inner(x) - self.mean) ** 2  # type: ignore[operator]
        with torch.no_grad():
            self.mean.mul_(0.5).add_(0.5 * x.mean(0))  # type: ignore[operator]
        return F.cross_entropy(self.outer(h), y)


@pytest.mark.long
def test_what_is_recomputed_reads_the_old_buffer() -> None:
    names = ("linear", "sub", "pow_1", "linear_1")
    plan = Plan((("dp", 2),), (RecomputeStep(names),))
    report = verify.verify_plan(Averaging, {"x": X, "y": Y}, ranks=2, plan=plan)
    assert report.verdict.passes, report.to_json()
