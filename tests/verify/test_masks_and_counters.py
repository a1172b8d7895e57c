"""Fills of masks are no scale of other tensors, and whole numbers do not round: no error hides behind either."""

from __future__ import annotations

from math import inf
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import nnscaler
import verify
from nnscaler.errors import NnscalerError
from nnscaler.runtime.tensor_bits_and_differences import FILL, FLOAT64_BOUND, difference, family_scale
from nnscaler.tracing import trace
from nnscaler.tracing.compare_with_module import check_trace
from nnscaler.tracing.sample_inputs import flatten_inputs
from verify import Report, Verdict

FILLS = (-1e9, torch.finfo(torch.float32).min, -inf)
SEEN = 5_000_000_000
INPUTS = {"x": torch.randn(8, 6, generator=torch.Generator().manual_seed(1))}
MISTAKES = {
    "`output_1`": ("aten.where.self(lt, self.mask, batch_norm)", "aten.where.self(lt, self.mask, batch_norm * 1.5)"),
    "`norm.running_mean`": (
        "running_mean, batch_norm_batch_mean_v1, 0.1)",
        "running_mean, batch_norm_batch_mean_v1, 0.11)",
    ),
    "`seen`": ("aten.add.Tensor(self.seen, 1)", "aten.add.Tensor(self.seen, 2)"),
}


class Masked(nn.Module):
    """A mask, running statistics and a counter are its buffers; it returns what is masked."""

    mask: Tensor
    seen: Tensor

    def __init__(self, fill: float = -inf) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.register_buffer("mask", torch.tensor([0.0] * 5 + [fill]))
        self.register_buffer("seen", torch.tensor(SEEN))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.seen += 1
        normed = self.norm(x)
        return normed.square().square().mean(), torch.where(self.mask < 0, self.mask, normed)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program of the model on two ranks."""
    return nnscaler.parallelize(Masked(), INPUTS, ranks=2, plan="dp=2").save(
        tmp_path_factory.mktemp("masked") / "program"
    )


def _verified(program: Path, train: bool = False) -> Report:
    return verify.verify_plan(
        Masked(), INPUTS, program=program, level="run", depth="quick", train=train, train_steps=2, optimizer="sgd"
    )


@pytest.mark.parametrize("wrong", MISTAKES)
def test_a_mistake_beside_a_mask_is_refuted(wrong: str, text: Path) -> None:
    role = text / "role_0.py"
    right = role.read_text()
    assert MISTAKES[wrong][0] in right
    role.write_text(right.replace(*MISTAKES[wrong]))
    try:
        report = _verified(text, train="output" not in wrong)
    finally:
        role.write_text(right)
    told = [f.message for f in report.findings if f.code in ("result_differs", "buffer_differs")]
    assert report.verdict is Verdict.REFUTED
    assert told, [(f.code, f.message) for f in report.findings]
    assert all(wrong in message for message in told)
    assert any(message.startswith("training: ") for message in told) == ("output" not in wrong)


def test_the_right_program_passes(text: Path) -> None:
    report = _verified(text)
    assert report.verdict is Verdict.TESTED_EXACT, report.findings


class Scaled(nn.Module):
    """Its result has a factor that its loss has not."""

    def __init__(self, fill: float) -> None:
        super().__init__()
        self.weight, self.factor = nn.Parameter(torch.ones(6)), nn.Parameter(torch.ones(6), requires_grad=False)
        self.fill = fill

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return (x * self.weight).square().mean(), (x * self.factor).masked_fill(torch.arange(6) > 4, self.fill)


@pytest.mark.parametrize("fill", FILLS)
def test_a_trace_is_not_the_model_whose_result_differs_beside_a_mask(fill: float) -> None:
    model = Scaled(fill)
    sample, traced = flatten_inputs(model, INPUTS), trace(model, INPUTS)
    assert check_trace(model, traced.graph, traced.state, sample) == ()
    with pytest.raises(NnscalerError, match="the result `output_1`: differs"):
        check_trace(model, traced.graph, {**traced.state, "factor": torch.full((6,), 1.001)}, sample)


@pytest.mark.parametrize("fill", FILLS)
def test_what_fills_a_mask_is_no_scale_of_its_family(fill: float) -> None:
    mask, others = torch.tensor([0.0, fill]), torch.tensor([1.0, -3.0])
    assert family_scale([mask, others, None], FILL) == 3.0
    assert family_scale([torch.tensor([SEEN, 1]), others]) == 3.0


@pytest.mark.parametrize("first", [SEEN, 2**53])
def test_whole_numbers_are_equal_or_not(first: int) -> None:
    right, wrong = torch.tensor([first, 3]), torch.tensor([first + 1, 3])
    assert difference(right, right.double(), 1e30).relative == 0
    found = difference(wrong, right, 1e30)
    assert found.relative > FLOAT64_BOUND and found.mismatched == 1
    assert difference(torch.tensor([SEEN + 1]), torch.tensor([SEEN]).double()).relative > FLOAT64_BOUND
