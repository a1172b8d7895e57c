"""In-place operators become values. Each module is traced with the self-check, which compares it with eager."""

from __future__ import annotations

import random
import warnings

import pytest
import torch
from torch import Tensor, nn

from nnscaler.errors import NnscalerError
from nnscaler.ir.graph import Graph
from nnscaler.tracing import trace
from tests.graph_invariants import check_graph
from tests.sampling import every


class Model(nn.Module):
    """A parameter, a buffer and a counter for the modules of these tests."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(6, 8)
        self.register_buffer("average", torch.zeros(4, 8))
        self.register_buffer("count", torch.tensor(0))


def traced(model: nn.Module, rows: int = 4) -> Graph:
    torch.manual_seed(0)
    graph = trace(model, (torch.randn(rows, 6),)).graph
    check_graph(graph)
    return graph


class ShiftRight(Model):
    """T5's way: a write into a slice looks dead to whoever does not know views."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.proj(x)
        shifted = h.new_zeros(h.shape)
        shifted[..., 1:] = h[..., :-1].clone()
        shifted[..., 0] = 2.0
        return shifted.pow(2).sum()


class ThroughTwoViews(Model):
    def forward(self, x: Tensor) -> Tensor:
        y = self.proj(x) * 1
        y[1:3][:, 2:4].mul_(3)
        return y.tanh().sum()


class SeenThroughAliases(Model):
    """A view taken before the write shows it; so does one of another shape."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.proj(x).clone()
        view, turned = h.view(2, 2, 8), h.t()
        first = view[0]
        first.add_(1)
        turned[2].mul_(2)
        return (view * view.tanh()).sum() + first.sum() * h[1].sum()


class Permuted(Model):
    def forward(self, x: Tensor) -> Tensor:
        h = (self.proj(x) * 1).view(4, 2, 4)
        h.permute(2, 0, 1)[1].add_(x.sum())
        h.diagonal(0, 0, 2).mul_(3)
        h.unsqueeze(0).squeeze(0).flatten(1)[:, 1::3].neg_()
        h.narrow(1, 0, 1).sin_()
        return (h * h).sum()


class OtherNames(Model):
    """Names of torch for the same views: what is known of one is known of all."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.proj(x) * 1
        h.swapdims(0, 1)[2].mul_(3)
        h.swapaxes(0, 1)[1].mul_(2)
        h.broadcast_to(4, 8).add_(1)
        return (h * h).sum()


class Pieces(Model):
    def forward(self, x: Tensor) -> Tensor:
        h = torch.empty(4, 8)
        for index, row in enumerate(self.proj(x).unbind(0)):
            h[index] = row * index
        return h.pow(2).sum()


class ManyOperators(Model):
    def forward(self, x: Tensor) -> Tensor:
        h = self.proj(x).clone()
        h[torch.tensor([0, 2])] = x[:2, :1].expand(2, 8)
        h[h > 0.3] = 0.25
        h.scatter_(1, torch.zeros(4, 1, dtype=torch.long), 1.5)
        h.masked_fill_(h < -1, 0.0).clamp_(-0.9, 2.0)
        h.add_(1).div_(2).transpose_(0, 1)
        h = torch.dropout_(h.relu_().clone().pow_(2).clone(), 0.5, True)
        h.unsqueeze_(0)
        h[:, 0].fill_(3.0)
        h[:, 1].zero_()
        return h.mean()


class Integers(Model):
    def forward(self, x: Tensor) -> Tensor:
        mask = x > 0
        mask &= x < 1
        mask[0] |= True
        scale = torch.ones(4, 1, dtype=torch.long)
        scale += 2
        scale //= 2
        return (self.proj(x * mask) * scale).sum()


class KeepsDtype(nn.Module):
    """`+=` keeps the dtype of what it adds to."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(6, 8).bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        h = self.proj(x.bfloat16()) * 1
        h += x.sum(1, keepdim=True)
        h[:, :2] = x[:, :2]
        return h.float().sum()


class ComplexParts(Model):
    """As a Fourier layer keeps the lowest frequencies: torch has no backward of a complex slice_scatter."""

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(self.proj(x))
        kept = torch.zeros_like(spectrum)
        kept[:, 1:3] = spectrum[:, :2] * 1j
        kept[:, -1] = spectrum[:, 0]
        return torch.fft.irfft(kept, n=8).tanh().sum()


class FillsDiagonal(Model):
    """As losses over a batch do, so that no row is compared with itself."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.proj(x)
        products = h @ h.t()
        wide = h.clone().fill_diagonal_(0.5)
        return products.fill_diagonal_(-1e9).logsumexp(1).sum() + (wide * wide).sum()


class IntoOut(Model):
    """As `normalize(..., out=...)` of spectral norm does."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.proj(x)
        with torch.no_grad():
            scale = torch.empty(4, 8)
            torch.div(h, 2.0 + h.abs(), out=scale)
            torch.add(scale, 1, out=scale)
        return (h * scale).sum()


@pytest.mark.parametrize(
    "kind",
    [
        ComplexParts,
        FillsDiagonal,
        IntoOut,
        ShiftRight,
        ThroughTwoViews,
        SeenThroughAliases,
        Permuted,
        OtherNames,
        Pieces,
        ManyOperators,
        Integers,
        KeepsDtype,
    ],
)
def test_values_equal_eager(kind: type[nn.Module]) -> None:
    assert not traced(kind()).updates


class Statistics(Model):
    def forward(self, x: Tensor) -> Tensor:
        h = self.proj(x)
        self.count.add_(1)
        self.average.mul_(0.9).add_(h.detach(), alpha=0.1)
        self.average[0].copy_(h.detach()[0])
        with torch.no_grad():
            self.count += 1
        return (h * self.average).sum() + self.count


class Assigns(Model):
    """Buffers that are assigned to are written all the same."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.proj(x)
        before = (h * self.average).sum()
        with torch.no_grad():
            self.average = 0.9 * self.average + 0.1 * h
        self.count = self.count + 1
        return before + (h * self.average).sum()


@pytest.mark.parametrize("kind", [Statistics, Assigns])
def test_written_buffers_are_updates(kind: type[nn.Module]) -> None:
    graph = traced(kind())
    assert [buffer for buffer, _ in graph.updates] == ["average", "count"]


def test_a_buffers_old_value_is_read_after_it_was_assigned_to() -> None:
    class Keeps(Model):
        def forward(self, x: Tensor) -> Tensor:
            old = self.average
            self.average = self.proj(x).detach()
            return (self.proj(x) - old).square().sum()

    assert [buffer for buffer, _ in traced(Keeps()).updates] == ["average"]


class Constant(Model):
    def forward(self, x: Tensor) -> Tensor:
        factors = torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8])
        factors[0] = 3
        return (self.proj(x) * factors).sum()


class Normed(Model):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.utils.parametrizations.spectral_norm(self.proj)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x).tanh().sum()


def test_spectral_norm_goes_on_in_training() -> None:
    assert {name.rsplit("_", 1)[-1] for name, _ in traced(Normed()).updates} == {"u", "v"}


def test_a_constant_is_copied_before_it_is_written() -> None:
    graph = traced(Constant())
    assert [t.fqns[0] for t in graph.with_role("constant")] == ["_constants.0", "_constants.1"]
    assert not graph.updates


class WritesParameter(Model):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.proj.weight.clamp_(-1, 1)
        return self.proj(x).sum()


class WritesAttribute(Model):
    """The second step would start from what the first one left."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = torch.zeros(8)

    def forward(self, x: Tensor) -> Tensor:
        self.seen.mul_(0.5).add_(x.mean())
        return (self.proj(x) - self.seen).square().sum()


class WritesStridedView(Model):
    def forward(self, x: Tensor) -> Tensor:
        h = self.proj(x) * 1
        h.as_strided((4,), (9,)).zero_()
        return h.sum()


@pytest.mark.parametrize(
    ("kind", "message", "line"),
    [
        (WritesParameter, "the parameter proj.weight is changed", "self.proj.weight.clamp_(-1, 1)"),
        (
            WritesAttribute,
            "a tensor that is no buffer is changed in forward",
            "self.seen.mul_(0.5).add_(x.mean())",
        ),
        (
            WritesStridedView,
            "reads memory in a way that depends on how the tensor lies",
            "h.as_strided((4,), (9,)).zero_()",
        ),
    ],
)
def test_what_cannot_be_written_is_refused(kind: type[nn.Module], message: str, line: str) -> None:
    with pytest.raises(NnscalerError, match=message) as caught:
        traced(kind())
    assert caught.value.code == "trace_failed"
    assert caught.value.where is not None
    assert caught.value.where.file == __file__
    assert caught.value.where.text == line


class MadeHere(Model):
    """As caches of transformers begin; on the meta device export detaches what is made, and copies nothing before."""

    def forward(self, x: Tensor) -> Tensor:
        made = torch.tensor([1.0, 2.0], device=x.device)
        return (torch.cat([made, self.proj(x)[0]]) * 2).sum()


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_tensor_that_forward_makes_is_detached(device: str) -> None:
    with torch.device(device):
        model = MadeHere()
    found = trace(model, (torch.randn(4, 6),)).graph
    check_graph(found)
    assert [op.operator for op in found.operations if "detach" in op.operator] == []
    assert "aten.cat.default" in {op.operator for op in found.operations}


class UnderNoGrad(Model):
    """Eager lets the gradient pass the write as if it were not there; values cannot say that."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.proj(x) * 1
        with torch.no_grad():
            h.mul_(2)
        return h.sum()


def test_a_write_past_autograd_is_caught_by_the_self_check() -> None:
    with pytest.raises(NnscalerError, match=r"the gradient of proj\.weight"):
        traced(UnderNoGrad())


class RandomProgram(Model):
    """Views and writes in random order, on one piece of memory."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed

    def forward(self, x: Tensor) -> Tensor:
        choose = random.Random(self.seed)
        alive = [self.proj(x) * 1]
        for _ in range(choose.randint(4, 12)):
            tensor = choose.choice(alive)
            view = choose.choice(
                [
                    lambda t: t[choose.randrange(t.shape[0])] if t.ndim > 1 else t[:1],
                    lambda t: t[..., :: choose.choice([1, 2])],
                    lambda t: t.transpose(0, -1),
                    lambda t: t.unsqueeze(choose.randint(0, t.ndim)),
                    lambda t: t.narrow(-1, t.shape[-1] // 2, t.shape[-1] - t.shape[-1] // 2),
                    lambda t: t.unflatten(-1, (2, -1)) if t.shape[-1] % 2 == 0 else t,
                    lambda t: t.permute(*reversed(range(t.ndim))),
                ]
            )
            write = choose.choice(
                [
                    lambda t: t.mul_(1.5),
                    lambda t: t.add_(x.mean()),
                    lambda t: t.copy_(t.detach().flip(0) * 0.5),
                    lambda t: t.fill_(0.75),
                    lambda t: t.masked_fill_(t > 0.5, 0.125),
                    lambda t: t.neg_(),
                ]
            )
            if choose.random() < 0.5:
                alive.append(view(tensor))
            else:
                write(tensor)
        return sum((t * t.cos()).sum() * (i + 1) for i, t in enumerate(alive))  # type: ignore[return-value]


@pytest.mark.parametrize("seed", every(2, range(40)))
def test_random_programs(seed: int) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="the gradient of .* is zero in eager")  # all was overwritten
        traced(RandomProgram(seed))
