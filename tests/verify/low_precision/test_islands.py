"""Models that need a float32 which a run in another dtype takes from them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import verify
from verify.results.verdict import Verdict


class Rotary(nn.Module):
    """Turns pairs of its features as complex numbers, of which there are none of two bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        turned = torch.polar(torch.ones(5, 2), torch.arange(5.0)[:, None] * torch.tensor([1.0, 0.1]))
        pairs = torch.view_as_complex(self.proj(x).float().unflatten(-1, (2, 2)))
        return torch.view_as_real(pairs * turned).flatten(-2).type_as(x).square().mean()


def test_a_model_that_does_not_run_in_a_dtype_keeps_its_other_results() -> None:
    batch = {"x": torch.randn(4, 5, 4)}
    report = verify.verify_plan(Rotary(), batch, ranks=2, plan="dp=2", backend="simulator", level="run", depth="deep")
    checks = {check.name: check.verdict for check in report.checks}
    assert (report.verdict, report.exit_code) == (Verdict.INCONCLUSIVE, 3)
    assert checks["gradients"].passes and checks["reference in bfloat16"] is Verdict.INCONCLUSIVE
    (found,) = report.findings
    assert "in bfloat16, the model itself raises" in found.message and "build_model() keeps it" in str(found.help)
    assert found.where is not None and found.where.file == __file__


class Turned(nn.Module):
    """Half precision has complex numbers, but no program of them: what makes them float32 is left out of the text."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 4)
        self.register_buffer("turns", torch.polar(torch.ones(5, 2), torch.rand(5, 2)))

    def forward(self, x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(self.proj(x).float().unflatten(-1, (2, 2)))
        turned = torch.view_as_real(pairs * self.turns).flatten(-2).type_as(x)  # type: ignore[operator]
        return (turned * self.proj(x)).unflatten(-1, (2, 2)).matmul(self.proj(x).unflatten(-1, (2, 2))).square().mean()


def test_complex_numbers_in_half_precision_refute_nothing() -> None:
    batch = {"x": torch.randn(4, 5, 4)}
    report = verify.verify_plan(
        Turned(), batch, ranks=2, plan="dp=2", backend="simulator", level="run", dtype="float16"
    )
    assert (report.verdict, report.findings[0].code) == (Verdict.INCONCLUSIVE, "nothing_checked"), report.to_json()
    assert "complex" in report.findings[0].message


def test_a_model_in_the_dtype_keeps_its_islands() -> None:
    batch = {"x": torch.randn(4, 5, 4).bfloat16()}
    model = Rotary().bfloat16()
    report = verify.verify_plan(
        model, batch, ranks=2, plan="dp=2", backend="simulator", level="run", dtype="bfloat16", depth="quick"
    )
    assert report.verdict.passes, report.to_json()
