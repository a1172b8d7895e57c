"""The exact run: float64 everywhere, and no dropout."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nnscaler.tracing import trace
from nnscaler.tracing.float64_run import convert_floats, exact, own_dtype, without_dropout


class Islands(nn.Module):
    """Code that asks for other floating dtypes wherever it can."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(6, 6)
        self.plain = torch.tensor([0.1] * 6)
        self.register_buffer("stored", torch.ones(6, dtype=torch.float16))

    def forward(self, x: Tensor) -> list[Tensor]:
        h = self.proj(x)
        with torch.autocast("cpu", torch.bfloat16):
            cast = self.proj(x)
        return [
            h,
            cast,
            h.float(),
            h.half(),
            h.bfloat16(),
            h.to(torch.float32),
            h.to(device="cpu", dtype=torch.float16),
            h.type(torch.float32),
            h.softmax(-1, dtype=torch.float32),
            F.softmax(h, -1, dtype=torch.bfloat16),
            h.sum(dtype=torch.float32),
            torch.zeros(3),
            torch.ones(3, dtype=torch.float16),
            torch.arange(3, dtype=torch.float32),
            torch.linspace(0, 1, 3),
            torch.tensor(0.5),
            torch.tensor([0.5], dtype=torch.float32),
            torch.as_tensor([0.5]),
            h.new_zeros(3, dtype=torch.float32),
            torch.full((2,), 0.1),
            torch.rand(2),
            self.plain,
            self.stored,
        ]


def test_everything_floating_is_float64() -> None:
    module = copy.deepcopy(Islands())
    with exact(module):
        outputs = module(torch.randn(2, 6))
    assert [o.dtype for o in outputs] == [torch.float64] * len(outputs)
    assert torch.get_default_dtype() == torch.float32
    assert all(p.dtype == torch.float64 for p in module.parameters())


def test_numbers_are_rounded_as_a_trace_records_them() -> None:
    single = float(torch.tensor(0.1))
    assert single != 0.1
    with exact():
        assert float(torch.tensor(0.1)) == single
        assert float(torch.full((), 0.1)) == 0.1  # an operator of the trace, with its argument
        assert torch.tensor([1, 2]).dtype == torch.int64
        assert torch.tensor(1j).dtype == torch.complex128
        assert torch.zeros(2, dtype=torch.int32).dtype == torch.int32


class AsksForItsDtype(nn.Module):
    """A trace has, of what follows from a tensor's dtype, the numbers of the model's own."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.proj(x)
        scale = torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5, 0.6], dtype=x.dtype)
        wide = torch.tensor(0.1, dtype=torch.float64)
        return (x * scale + x.new_tensor(0.7) + wide).square().sum() / (1e-3 + torch.finfo(x.dtype).eps)


def test_numbers_are_not_rounded_where_nothing_is_traced() -> None:
    with exact(recorded=False):
        assert float(torch.tensor(0.1)) == 0.1


def test_numbers_that_follow_from_a_dtype_are_those_of_the_trace() -> None:
    module = AsksForItsDtype()
    assert trace(module, (torch.randn(2, 6),)).notes == ()
    with exact(copied := copy.deepcopy(module), told=own_dtype(module)):
        assert copied.proj.weight.dtype == torch.float32 and copied.proj.weight.element_size() == 8
        assert torch.zeros(2, dtype=copied.proj.weight.dtype).element_size() == 8
        assert torch.zeros(2, dtype=torch.complex64).dtype == torch.complex64
        assert torch.arange(2).dtype == torch.int64
    mixed = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).to(torch.bfloat16))
    with exact(mixed, told=own_dtype(mixed)):
        assert mixed[0].weight.dtype == torch.float64  # nobody knows which of the two it would have


TABLE = torch.tensor([0.1, 0.3])  # of the model's file


def test_tensors_that_no_mode_saw_being_made_are_float64_where_they_are_read() -> None:
    legacy, array = torch.FloatTensor, np.array([0.1, 0.3], dtype=np.float32)
    with exact():
        for made in (TABLE, legacy([0.1, 0.3]), torch.from_numpy(array)):
            root = made.sqrt()
            assert torch.equal(root, made.to(torch.float64).sqrt()) and root.dtype == torch.float64
            assert torch.stack([made, made])[0].dtype == torch.float64
        buffer = legacy(2)
        buffer.zero_()
        buffer[0] = 3.0
        buffer[1:].add_(5.0)  # into a view
        torch.add(torch.ones(2), buffer, out=(total := legacy(2)))
    assert buffer.tolist() == [3.0, 5.0] and total.tolist() == [4.0, 6.0]
    assert TABLE.dtype == torch.float32


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, dropout=0.5, batch_first=True)
        self.recurrent = nn.LSTM(6, 6, 2, dropout=0.5, batch_first=True)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.recurrent(self.attention(x, x, x)[0])[0]
        x = (
            self.drop(x)
            + F.dropout(x, 0.5)
            + F.dropout2d(x.unsqueeze(0), 0.5).squeeze(0)
            + F.alpha_dropout(x, 0.5, True)
        )
        x = x + torch.dropout_(x.clone(), 0.5, True) + torch.feature_dropout(x, 0.5, True)
        return x + F.scaled_dot_product_attention(x, x, x, None, 0.5)


@pytest.mark.parametrize("convert", [True, False])
def test_nothing_is_dropped(convert: bool) -> None:
    module, x = Dropping(), torch.randn(2, 3, 6)
    if not convert:
        module.recurrent.dropout = 0.0
    with exact(module) if convert else without_dropout():
        x = x.double() if convert else x
        assert torch.equal(module(x), module(x))
    if convert:
        with exact(module, dropout=True):
            assert not torch.equal(module(x), module(x))


class Rotary(nn.Module):
    """Turns pairs of channels by stored complex factors, as Llama's first code does."""

    def __init__(self) -> None:
        super().__init__()
        angles = torch.linspace(0.1, 1.5, 4)
        self.register_buffer("factors", torch.polar(torch.ones(4), angles))
        self.plain = torch.polar(torch.ones(4), angles)

    def forward(self, x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.float().reshape(-1, 4, 2))
        return torch.view_as_real(pairs * self.factors * self.plain)


def test_complex_buffers_keep_their_imaginary_part() -> None:
    module, x = Rotary(), torch.randn(3, 8)
    expected = module(x)
    for dtype, found in ((torch.float64, torch.complex128), (torch.bfloat16, torch.complex64)):
        mine = copy.deepcopy(module)
        convert_floats(mine, dtype)
        assert mine.factors.dtype == found and torch.equal(mine.factors.imag.float(), module.factors.imag)
    with exact(module):
        assert module.plain.dtype == torch.complex128
        torch.testing.assert_close(module(x.double()), expected.double(), rtol=1e-5, atol=1e-6)


def test_a_buffer_that_two_modules_share_stays_one() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.BatchNorm1d(6))
    model[3].running_mean = model[1].running_mean
    expected = copy.deepcopy(model).double()
    expected[3].running_mean = expected[1].running_mean
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
    expected(x.double())
    with exact(model):
        model(x.double())
    torch.testing.assert_close(model[1].running_mean, expected[1].running_mean)
    assert model[3].running_mean is model[1].running_mean
