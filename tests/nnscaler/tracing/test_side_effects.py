"""Side effects that export drops without a word: hooks on gradients, and Python attributes that forward changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nnscaler.errors import NnscalerError
from nnscaler.tracing import trace

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(6, 6)


class Hooked(Model):
    def __init__(self, hook: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.hook = hook

    def forward(self, x: Tensor) -> Tensor:
        h = self.proj(x)
        h.register_hook(self.hook)
        return h.sum()


@pytest.mark.parametrize(
    "hook",
    [lambda g: g * 3, lambda g: g.clamp(-100, 100)],
    ids=["scales", "clamps, which shows on no such batch"],
)
def test_a_hook_that_changes_a_gradient(hook: Callable[[Tensor], Any]) -> None:
    with pytest.raises(NnscalerError, match="a hook on a tensor changes a gradient") as caught:
        trace(Hooked(hook), (X,))
    assert caught.value.code == "trace_unfaithful"
    assert caught.value.where is not None and caught.value.where.text == "h.register_hook(self.hook)"


def test_a_hook_that_looks_on() -> None:
    with pytest.warns(UserWarning, match=r"test_side_effects\.py:\d+.* the hook on a gradient is not in the program"):
        traced = trace(Hooked(lambda g: None), (X,))
    assert len(traced.notes) == 1


def test_a_hook_that_nothing_can_try() -> None:
    """Without data, what it returns is not known."""
    with torch.device("meta"):
        model = Hooked(lambda g: None)
    with pytest.raises(NnscalerError, match="may change a gradient"):
        trace(model, (X,))


def test_hooks_that_are_there_before() -> None:
    model = Counts()
    handle = model.proj.weight.register_hook(lambda g: g * 2)
    with pytest.raises(NnscalerError, match=r"the parameter proj\.weight has a hook"):
        trace(model, (X,))
    handle.remove()
    handle = model.proj.register_full_backward_hook(lambda *_: None)
    with pytest.raises(NnscalerError, match=r"the module proj has a hook"):
        trace(model, (X,))
    handle.remove()
    with pytest.warns(UserWarning, match="attributes"):
        trace(model, (X,))


class Counts(Model):
    def __init__(self) -> None:
        super().__init__()
        self.steps, self.seen, self.name = 0, [7], "model"

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        self.seen.append(self.steps)
        self.name = "mod" + "el"
        return self.proj(x).sum() * self.steps


def test_attributes_that_forward_changes() -> None:
    model = Counts()
    with pytest.warns(UserWarning, match="forward changes attributes that are no buffers"):
        traced = trace(model, (X,))
    assert "steps: 0 -> 1" in traced.notes[0] and "seen: 1 items -> 2 items" in traced.notes[0]
    assert "name" not in traced.notes[0]
    assert (model.steps, model.seen) == (0, [7])  # as if it had not been traced


def test_a_tensor_that_forward_leaves_behind() -> None:
    class Remembers(Model):
        def forward(self, x: Tensor) -> Tensor:
            self.last = self.proj(x)
            return self.last.sum()

    model = Remembers()
    with pytest.warns(UserWarning, match=r"last: nothing -> a tensor of shape \(4, 6\)"):
        trace(model, (X,))
    assert not hasattr(model, "last")


def test_an_attribute_of_a_part_that_is_new() -> None:
    class Part(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            self.calls = getattr(self, "calls", 0) + 1
            return x

    class Whole(Model):
        def __init__(self) -> None:
            super().__init__()
            self.part = Part()

        def forward(self, x: Tensor) -> Tensor:
            return self.part(self.proj(x)).sum()

    model = Whole()
    with pytest.warns(UserWarning, match=r"part\.calls: nothing -> 1"):
        trace(model, (X,))
    assert not hasattr(model.part, "calls")


def test_an_attribute_that_is_the_same_after_each_forward() -> None:
    """Set from the shapes, say: as good as a constant."""

    class Settles(Model):
        size = 0

        def forward(self, x: Tensor) -> Tensor:
            self.size = x.shape[0]
            return self.proj(x).sum() * self.size

    assert trace(Settles(), (X,)).notes == ()
