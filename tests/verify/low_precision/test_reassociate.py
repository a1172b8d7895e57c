"""Sums in parts: the same in exact arithmetic, other bits in low precision."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from nnscaler.tracing.float64_run import exact, run_backward
from verify.programs.low_precision.reassociation_mode import Reassociated

Compute = Callable[[Tensor], Tensor]
LABELS = torch.tensor([1, 0, -100, 3, 2, 5, 4, -100, 6, 1, 2, 3])

CASES: dict[str, Compute] = {
    "mm": lambda x: x.t() @ x,
    "addmm": lambda x: F.linear(x, x[:5], x[0, :5]),
    "bmm": lambda x: torch.bmm(x.view(3, 4, 7), x.view(3, 7, 4)),
    "baddbmm": lambda x: torch.baddbmm(x[:3, :4].reshape(3, 4, 1), x.view(3, 4, 7), x.view(3, 7, 4)),
    "sum": lambda x: x.view(3, 4, 7).sum((0, 2)),
    "sum kept": lambda x: x.sum(0, keepdim=True),
    "sum of all": lambda x: x.sum(),
    "mean": lambda x: x.mean(-1),
    "mean of all": lambda x: x.mean(),
    "norm": torch.linalg.vector_norm,
    "norms of rows": lambda x: torch.linalg.vector_norm(x.view(2, 6, 7), 1, dim=(1, 2), keepdim=True),
    "cross entropy": lambda x: F.cross_entropy(x, LABELS, ignore_index=-100),
    "cross entropy, summed": lambda x: F.cross_entropy(x, LABELS, ignore_index=-100, reduction="sum"),
    "layer norm": lambda x: F.layer_norm(x, (7,), x[0], x[1]),
    "embedding": lambda x: F.embedding(LABELS.clamp(0), x),
    "convolution": lambda x: F.conv1d(x.view(3, 4, 7), x[:8, :3].reshape(2, 4, 3), x[0, :2]),
}


def gradient(compute: Compute, x: Tensor) -> tuple[Tensor, Tensor]:
    """The result, and the gradient under a random cotangent."""
    leaf = x.clone().requires_grad_()
    out = compute(leaf)
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    out.backward(cotangent.to(out.dtype))
    assert leaf.grad is not None
    return out.detach(), leaf.grad


@pytest.mark.parametrize("name", CASES)
def test_only_the_rounding_changes(name: str) -> None:
    x = torch.randn(12, 7, generator=torch.Generator().manual_seed(0))
    right = gradient(CASES[name], x.double())
    # 40 draws: a mean of seven numbers has few orders
    runs = []
    for seed in range(40):
        with Reassociated(torch.Generator().manual_seed(seed), (2, 3)):
            runs.append(gradient(CASES[name], x))
    for out, grad in runs:
        torch.testing.assert_close(out.double(), right[0], rtol=3e-5, atol=3e-5)
        torch.testing.assert_close(grad.double(), right[1], rtol=3e-5, atol=3e-5)
    plain = gradient(CASES[name], x)
    assert any(not torch.equal(a, b) for run in runs for a, b in zip(run, plain, strict=True)), "no sum was cut"


def test_what_stands_for_a_shape_is_left_alone() -> None:
    """DTensor asks what shape a result would have by calling operators on tensors without numbers."""
    with Reassociated(torch.Generator().manual_seed(0), (3,)), FakeTensorMode():
        assert torch.linalg.vector_norm(torch.ones(8)).shape == ()


def test_float64_is_left_alone() -> None:
    x = torch.randn(6, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with Reassociated(torch.Generator().manual_seed(0), (3,)):
        cut = x.t() @ x
    assert torch.equal(cut, x.t() @ x)


def test_dtypes_of_autograd_are_not_replaced() -> None:
    """A sum of bfloat16 and float32 is float32, and its backward goes through a cast that no code asked for."""
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0)).bfloat16().requires_grad_()
    wide = torch.ones(6, dtype=torch.float32)
    with exact(dtype="bfloat16"), Reassociated(torch.Generator().manual_seed(0), (2,)):
        loss = ((x + wide) * 2).to(torch.float32).sum()
        run_backward(loss, torch.ones_like(loss))
    assert x.grad is not None and torch.equal(x.grad, torch.full_like(x, 2.0))


def test_a_seed_gives_the_same_bits() -> None:
    x = torch.randn(12, 7, generator=torch.Generator().manual_seed(0)).bfloat16()
    runs = []
    for _ in range(2):
        with Reassociated(torch.Generator().manual_seed(3), (2, 4)):
            runs.append(x.t() @ x)
    assert torch.equal(*runs)


def test_as_many_parts_as_asked_for() -> None:
    """Each part is rounded to the dtype: 256 + 1 is 256 in bfloat16, and only the order of parts tells them apart."""
    x = torch.tensor([[256.0, 1.0, 1.0]]).bfloat16()
    ones = torch.ones(3, 1).bfloat16()
    found = set()
    for seed in range(30):
        with Reassociated(torch.Generator().manual_seed(seed), (3,)):
            found.add(float(x @ ones))
    assert found == {256.0, 258.0}
    assert float(x @ ones) == 258.0
