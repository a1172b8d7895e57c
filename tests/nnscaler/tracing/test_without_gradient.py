"""Parameters that are used, but that no gradient reaches: eager leaves their gradient out, and so does the program."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from nnscaler.errors import NnscalerError
from nnscaler.tracing import trace
from verify import verify_plan


class Uses(nn.Module):
    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.used = nn.Parameter(torch.randn(6, 6))
        self.aside = nn.Parameter(torch.randn(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x @ self.used, self.aside).square().mean()


SAMPLE = {"x": torch.randn(6, 6)}
CASES = {
    "detached": lambda y, p: y * p.exp().detach(),
    "compared": lambda y, p: y * (p.exp() > 1),
    "counted": lambda y, p: y + p.cumsum(1).argmax(0),
}


@pytest.mark.parametrize("function", CASES.values(), ids=CASES)
def test_no_gradient(function: Callable[[Tensor, Tensor], Tensor]) -> None:
    model = Uses(function)
    tensors = trace(model, SAMPLE).graph.tensors
    assert tensors["used"].needs_grad and not tensors["aside"].needs_grad
    report = verify_plan(model, SAMPLE, ranks=2, plan="dp=2", depth="quick")
    assert report.verdict.passes, report.findings


def test_what_torch_connects_gets_one() -> None:
    """The next number after another has its gradient, from torch 2.13 on. (That of `heaviside` torch does not know, and
    says so.)"""
    model = Uses(lambda y, p: y + torch.nextafter(p, torch.ones_like(p)))
    if torch.__version__ < "2.13":
        with pytest.raises(NnscalerError, match=r"derivative for 'nextafter' is not implemented"):
            trace(model, SAMPLE)
    else:
        assert trace(model, SAMPLE).graph.tensors["aside"].needs_grad


def test_a_second_use_gives_one() -> None:
    tensors = trace(Uses(lambda y, p: y * p.exp().detach() + p), SAMPLE).graph.tensors
    assert tensors["aside"].needs_grad and not tensors["exp"].needs_grad
