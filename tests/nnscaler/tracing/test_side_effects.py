"""Side effects that export drops without a word: hooks on gradients, and Python attributes that forward changes."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy
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
    model = Counts(matters=False)
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
    def __init__(self, matters: bool = True) -> None:
        super().__init__()
        self.matters = matters
        self.steps, self.seen, self.name = 0, [7], "model"

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        self.seen.append(self.steps)
        self.name = "mod" + "el"
        return self.proj(x).sum() * (self.steps if self.matters else 1)


def test_attributes_that_forward_changes() -> None:
    model = Counts(matters=False)
    with pytest.warns(UserWarning, match="forward changes attributes that are no buffers"):
        traced = trace(model, (X,))
    assert "steps: 0 -> 1" in traced.notes[0] and "seen: 1 items -> 2 items" in traced.notes[0]
    assert "name" not in traced.notes[0]
    assert (model.steps, model.seen) == (0, [7])  # as if it had not been traced


class Initialises(Model):
    """As an ActNorm does: the first batch decides, a flag that is no buffer says that it has been."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.zeros(6))
        self.ready = False

    def forward(self, x: Tensor) -> Tensor:
        h = self.proj(x)
        if not self.ready:
            self.shift.copy_(-h.mean(0).detach())
            self.ready = True
        return (h + self.shift).square().sum()


class Follows(Model):
    """The next forward reads what one leaves behind."""

    last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        h = self.proj(x)
        mixed = h if self.last is None else h + self.last
        self.last = h.detach()
        return mixed.square().sum()


class Keeps(Model):
    """Keeps a mean of the first batch: on that batch, nothing shows it."""

    def __init__(self, buffer: bool) -> None:
        super().__init__()
        self.buffer, self.mean = buffer, None
        if buffer:
            del self.mean
            self.register_buffer("mean", None)

    def forward(self, x: Tensor) -> Tensor:
        h = self.proj(x)
        if self.mean is None:
            self.mean = h.mean(0).detach()
        return (h - self.mean).square().sum()


class Drops(Model):
    """Leaves its layer out by chance, and with no chance at all."""

    def __init__(self, chance: float, generator: str = "random") -> None:
        super().__init__()
        self.chance, self.generator = chance, generator

    def forward(self, x: Tensor) -> Tensor:
        if (random.random() if self.generator == "random" else numpy.random.rand()) < self.chance:
            return x.sum() + 0 * self.proj(x).sum()
        return self.proj(x).sum()


_STATE = {
    "a counter": (Counts, "with them the loss differs in the next forward.*steps: 0 -> 1", "self.steps += 1"),
    "a flag": (Initialises, "ready: False -> True", "self.ready = True"),
    "a tensor": (Follows, "last: nothing -> a tensor of shape", "self.last = h.detach()"),
    "of the first batch": (lambda: Keeps(False), "mean: None -> a tensor of shape", "self.mean = h.mean"),
    "a buffer of the first batch": (lambda: Keeps(True), "mean: nothing -> a tensor of shape", "self.mean = h.mean"),
    "random": (lambda: Drops(0.5), "draws numbers from `random`, not from torch", "if (random.random()"),
    "numpy": (lambda: Drops(0.5, "numpy"), "from `numpy.random`, not from torch", "if (random.random()"),
}


@pytest.mark.parametrize("case", _STATE)
def test_state_of_python_that_changes_results(case: str) -> None:
    """Every step of a program would compute what the first one does."""
    make, message, line = _STATE[case]
    model = make()
    before = random.getstate()
    with pytest.raises(NnscalerError, match=message) as caught:
        trace(model, (X,))
    assert caught.value.code == "trace_unfaithful"
    assert caught.value.where is not None and caught.value.where.text.startswith(line)
    assert random.getstate() == before
    with pytest.warns(UserWarning, match="the program has the first step's values"):
        trace(make(), (X,), specialise=True)


def test_draws_of_python_that_change_nothing() -> None:
    with pytest.warns(
        UserWarning, match=r"test_side_effects\.py:\d+.*: forward draws numbers from `random`, not from torch"
    ):
        assert len(trace(Drops(0.0), (X,)).notes) == 1


def test_a_tensor_that_forward_leaves_behind() -> None:
    class Remembers(Model):
        def forward(self, x: Tensor) -> Tensor:
            self.last = self.proj(x)
            return self.last.sum()

    model = Remembers()
    with pytest.warns(UserWarning, match=r"last: nothing -> a tensor of shape \(4, 6\)"):
        trace(model, (X,))
    assert not hasattr(model, "last")


def test_a_buffer_that_a_first_forward_makes(recwarn: pytest.WarningsRecorder) -> None:
    """As a table of positions that is made when it is first read: the model is left without."""

    class Table(Model):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", None, persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            if self.table is None:
                self.register_buffer("table", torch.arange(x.shape[1], dtype=x.dtype).sqrt(), persistent=False)
            return (self.proj(x) * self.table).sum()

    model = Table()
    traced = trace(model, (X,))
    assert model.table is None and not recwarn
    assert not traced.graph.with_role("buffer") and set(traced.state) == {"proj.weight", "proj.bias"}


def test_a_cache_in_a_buffer_of_which_an_attribute_says_how_much_is_there() -> None:
    """As rotary embeddings keep what they have computed: the next forward reads what a program computes again."""

    class Cached(Model):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("cache", torch.zeros(32), persistent=False)
            self.filled = 0

        def table(self, size: int) -> Tensor:
            if size <= self.filled:
                return self.cache[:size]
            made = torch.arange(size, dtype=self.proj.weight.dtype).sqrt()
            self.cache[:size] = made
            self.filled = size
            return made

        def forward(self, x: Tensor) -> Tensor:
            return (self.proj(x) * self.table(x.shape[1])).sum()

    model = Cached()
    assert trace(model, (X,)).notes == ()
    assert model.filled == 0


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


class Rebinds(Model):
    """Puts other tensors in the places of its buffers: a mean that moves, and two that change places."""

    def __init__(self, grows: bool = False) -> None:
        super().__init__()
        self.grows = grows
        for name, value in (("mean", torch.zeros(6)), ("one", torch.ones(6)), ("other", torch.arange(6.0))):
            self.register_buffer(name, value)

    def forward(self, x: Tensor) -> Tensor:
        h = self.proj(x) * self.one + self.mean
        self.mean = torch.cat([self.mean, self.one]) if self.grows else 0.9 * self.mean + 0.1 * h.detach().mean(0)
        self.one, self.other = self.other, self.one
        return (h - self.mean[:6]).square().sum()


def test_a_buffer_in_whose_place_forward_puts_another_tensor() -> None:
    model = Rebinds()
    before = dict(model.named_buffers())
    traced = trace(model, (X,))
    assert {traced.graph.tensors[name].fqns[0] for name, _ in traced.graph.updates} == {"mean", "one", "other"}
    assert all(buffer is before[name] for name, buffer in model.named_buffers())
    with pytest.raises(
        NnscalerError, match=r"shape \(12,\), torch.float32, in the place of the buffer `mean`"
    ) as caught:
        trace(Rebinds(grows=True), (X,))
    assert caught.value.where is not None and caught.value.where.text.startswith("self.mean = torch.cat")
