"""Code that cannot be traced is reported in a few words, at the user's line; code that is traced wrong is caught."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from nnscaler.errors import NnscalerError
from nnscaler.tracing import trace

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(6, 6)


class WrongShape(Model):
    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x[:, :3]).sum()


class SelectsByValue(Model):
    def forward(self, x: Tensor) -> Tensor:
        h = self.proj(x)
        return h[h > 0].cumsum(0).sum()


class Raises(Model):
    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError("no such thing\n" + "a page of details\n" * 500)


class ReadsNumber(Model):
    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x).sum() * torch.full((2,), self.proj(x).sum().item()).sum()


class Codes(Model):
    """A codebook that follows its codes, written past autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        h = self.proj(x)
        self.codes.data.mul_(0.9).add_(h.mean(0).detach(), alpha=0.1)
        return (h - self.codes).square().sum()


class Penalty(Model):
    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(self.proj(x).tanh().sum(), x, create_graph=True)
        return self.proj(x).sum() + slope.square().sum()


class Packs(Model):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.expand(2, -1, -1)
        packed = nn.utils.rnn.pack_padded_sequence(rows, torch.tensor([2, 2, 1, 1]))
        return self.rnn(packed)[1][0].sum()


@pytest.mark.parametrize(
    ("kind", "message", "line"),
    [
        (Packs, "forward packs sequences (pack_padded_sequence)", "return self.rnn(packed)[1][0].sum()"),
        (Codes, "forward goes past autograd", "self.codes.data.mul_(0.9).add_(h.mean(0).detach(), alpha=0.1)"),
        (
            Penalty,
            "forward goes past autograd",
            "(slope,) = torch.autograd.grad(self.proj(x).tanh().sum(), x, create_graph=True)",
        ),
        (WrongShape, "reduction dim", "return self.proj(x[:, :3]).sum()"),
        (SelectsByValue, "shape depends on data", "return h[h > 0].cumsum(0).sum()"),
        (
            Raises,
            "RuntimeError: no such thing$",
            'raise RuntimeError("no such thing\\n" + "a page of details\\n" * 500)',
        ),
        (ReadsNumber, "", "return self.proj(x).sum() * torch.full((2,), self.proj(x).sum().item()).sum()"),
    ],
)
def test_errors_are_short_and_name_the_line(
    kind: type[nn.Module], message: str, line: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(NnscalerError) as caught:
        trace(kind(), (X,))
    error = caught.value
    assert error.code == "trace_failed"
    assert error.where is not None
    assert (error.where.file, error.where.text) == (__file__, line)
    assert error.help
    assert message.rstrip("$") in error.message
    assert len(str(error)) < 900
    printed = capfd.readouterr()
    assert printed.out == printed.err == ""


class Branches(Model):
    def forward(self, x: Tensor) -> Tensor:
        h = self.proj(x)
        if x.sum() > 1000:
            return h.sum()
        return h.pow(2).sum()


def test_a_branch_on_data_is_refused_at_the_users_line() -> None:
    with pytest.raises(NnscalerError) as caught:
        trace(Branches(), (X,))
    assert caught.value.code == "trace_failed"
    assert caught.value.where is not None and "if x.sum() > 1000" in caught.value.where.text
    assert "--specialise" in (caught.value.help or "")


def test_the_branch_of_the_sample_is_taken_when_asked_for() -> None:
    with pytest.warns(UserWarning, match=r"only the one that the sample batch takes"):
        traced = trace(Branches(), (X,), specialise=True)
    assert any("aten.pow" in op.operator for op in traced.graph.operations)
    assert len(traced.notes) == 1
    assert "test_errors.py" in traced.notes[0]


class BranchesOnParameter(Model):
    def __init__(self, scale: float) -> None:
        super().__init__()
        nn.init.constant_(self.proj.weight, scale)
        nn.init.zeros_(self.proj.bias)

    def forward(self, x: Tensor) -> Tensor:
        h = self.proj(x.abs())
        if h.mean() > 0:
            return h.pow(2).sum()
        return h.sum()


@pytest.mark.parametrize("scale", [1.0, -1.0])
def test_the_branch_that_parameters_decide_is_that_of_their_values(scale: float) -> None:
    with pytest.warns(UserWarning, match=r"only the one that the sample batch takes"):
        traced = trace(BranchesOnParameter(scale), (X,), specialise=True)
    assert any("aten.pow" in op.operator for op in traced.graph.operations) == (scale > 0)


def is_fake(x: Tensor) -> bool:
    """Return what no shim hides: code that asks for this does something else under export."""
    return isinstance(x, FakeTensor)


class LooksWhetherFake(Model):
    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x).sum() * (2 if is_fake(x) else 1)


class ForgetsParameter(Model):
    def forward(self, x: Tensor) -> Tensor:
        bias = self.proj.bias.detach() if is_fake(x) else self.proj.bias
        return (x @ self.proj.weight + bias).sum()


class ForgetsBuffer(Model):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if not is_fake(x):
            self.count += 1
        return self.proj(x).sum()


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        (LooksWhetherFake, r"the loss: differs by 1\.0e\+00"),
        (ForgetsParameter, r"the gradient of proj\.bias: the traced graph gives none"),
        (ForgetsBuffer, r"the buffer count after the step: differs by 1"),
    ],
)
def test_an_unfaithful_trace_is_refused(kind: type[nn.Module], what: str) -> None:
    with pytest.raises(NnscalerError, match=what) as caught:
        trace(kind(), (X,))
    assert caught.value.code == "trace_unfaithful"
    trace(kind(), (X,), self_check=False)


class OnlyOnExport(Model):
    def forward(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_exporting():
            raise RuntimeError("eager does not get here")
        return self.proj(x).sum()


class FSDPModule(Model):
    """As torch's mixin of this name, which needs a process group."""

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x).sum()


def test_what_is_divided_already_or_has_no_shape_yet_is_refused_by_name() -> None:
    class Whole(Model):
        def forward(self, x: Tensor) -> Tensor:
            return self.proj(x).sum()

    class Outer(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)

    lazy = Whole()
    lazy.proj = nn.LazyLinear(6)
    for model, said in ((Outer(FSDPModule()), "`inner` is under FSDPModule"), (lazy, "`proj.weight` is lazy")):
        with pytest.raises(NnscalerError, match=said) as caught:
            trace(model, (X,))
        assert caught.value.code == "trace_failed"
    lazy(X)
    trace(lazy, (X,))


def test_a_model_that_raises_by_itself() -> None:
    with pytest.raises(NnscalerError, match="the model itself raises") as caught:
        trace(OnlyOnExport(), (X,))
    assert caught.value.code == "model_raised"
    assert caught.value.where is not None
    assert caught.value.where.text == 'raise RuntimeError("eager does not get here")'


class SinglePrecision(Model):
    """Something that refuses float64: compared in its own dtype."""

    def forward(self, x: Tensor) -> Tensor:
        if x.element_size() == 8:
            raise RuntimeError("not implemented for Double")
        return self.proj(x).sum()


class NotCopyable(Model):
    def __deepcopy__(self, memo: object) -> nn.Module:
        raise TypeError("cannot be copied")

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x).sum()


@pytest.mark.parametrize(
    ("kind", "note"), [(SinglePrecision, "in the model's own dtype"), (NotCopyable, "the trace is not checked")]
)
def test_weaker_checks_are_noted(kind: type[nn.Module], note: str) -> None:
    with pytest.warns(UserWarning, match=note):
        traced = trace(kind(), (X,))
    assert note in traced.notes[0]


def test_tracing_leaves_the_module_and_the_random_numbers_alone() -> None:
    class Random(Model):
        def forward(self, x: Tensor) -> Tensor:
            return (self.proj(x) * torch.rand(4, 6)).sum()

    model = Random()
    model.proj.eval()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    state = torch.random.get_rng_state()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trace(model, (X,))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert model.training and not model.proj.training
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert torch.get_default_dtype() == torch.float32


def test_inputs_that_forward_does_not_take() -> None:
    with pytest.raises(NnscalerError, match="missing a required argument: 'x'") as caught:
        trace(WrongShape(), {"y": X})
    assert caught.value.code == "inputs_differ"
    assert caught.value.where is not None and caught.value.where.file == __file__


class Sparse(Model):
    """A sparse buffer, as Whisper keeps the heads that align its text: nothing that trains reads it."""

    def __init__(self, persistent: bool, read: bool) -> None:
        super().__init__()
        self.register_buffer("heads", torch.eye(6).to_sparse(), persistent=persistent)
        self.read = read

    def forward(self, x: Tensor) -> Tensor:
        y = self.proj(x)
        return (torch.sparse.mm(self.heads, y.t()) if self.read else y).sum()


def test_a_sparse_buffer_that_nothing_reads_is_left_out() -> None:
    traced = trace(Sparse(persistent=False, read=False), {"x": X})
    assert {tensor.name for tensor in traced.graph.tensors.values() if tensor.role == "buffer"} == set()
    assert "heads" not in traced.state


@pytest.mark.parametrize(("persistent", "read"), [(False, True), (True, False)])
def test_a_sparse_buffer_that_a_program_would_hold_is_refused(persistent: bool, read: bool) -> None:
    with pytest.raises(NnscalerError, match="'heads' is a tensor of layout") as raised:
        trace(Sparse(persistent, read), {"x": X})
    assert "to_dense" in raised.value.help
