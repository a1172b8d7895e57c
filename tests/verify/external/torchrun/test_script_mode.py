"""The functions of torch that a script calls are followed, on tensors that are none of its models'."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from verify.external.torchrun.replace_data_given_to_model import ScriptMode


def watched() -> ScriptMode:
    """Return what watches a script."""
    return ScriptMode(lambda note: None, lambda: True, lambda: True, lambda kind, given: given, lambda t: t, False)


class Wrapper(Tensor):
    """A tensor that wraps another one, and lies nowhere itself: a state of an optimizer in eight bits."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapper:
        made: Wrapper = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined]
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return cls(func(args[0].inner, *args[1:], **(kwargs or {})))


def test_a_tensor_that_lies_nowhere_is_followed() -> None:
    weight = nn.Parameter(torch.ones(3))
    with watched():
        weight.sum().backward()
        assert weight.grad is not None
        state = Wrapper(2 * weight.grad).mul(3)
    assert state.inner.tolist() == [6.0, 6.0, 6.0]


@pytest.mark.parametrize(("how", "told"), [("lerp_", True), ("add_", True), ("_foreach_lerp_", True), ("anew", False)])
def test_averages_beside_the_modules_are_told(how: str, told: bool) -> None:
    """Anew: a tensor of this step, to send say, is none that is kept."""
    weight = nn.Parameter(torch.ones(3))
    with watched() as mode, torch.no_grad():
        average = weight.detach().clone()
        mode.forget_gradients()  # as a step of the optimizer does
        weight.data.add_(1.0)
        weight.data.add_(weight.detach())
        if how == "anew":
            average = torch.zeros_like(weight)
            average.add_(weight)
        elif how == "lerp_":
            average.lerp_(weight, 0.1)
        elif how == "add_":
            average.mul_(0.9).add_(weight.detach(), alpha=0.1)
        else:
            torch._foreach_lerp_([average], [weight], 0.1)
    note = mode.note_of_kept([weight])
    assert (note is not None and "(test_script_mode.py:" in note) == told
