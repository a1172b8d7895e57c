"""A compiled module that is changed later: what the program does not follow is told, once."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nnscaler
from nnscaler.training.engine import Engine


class Scale(nn.Module):
    """Is called by a method of its own."""

    rate = 1.0  # of the class

    def __init__(self) -> None:
        super().__init__()
        self.temperature = 1.0
        self.register_buffer("offset", torch.zeros(4))

    def scaled(self, x: Tensor) -> Tensor:
        result: Tensor = (x + self.offset) * self.rate / self.temperature
        return result


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.drop, self.norm, self.scale = nn.Linear(6, 4), nn.Dropout(0.0), nn.BatchNorm1d(4), Scale()

    def forward(self, x: Tensor) -> Tensor:
        return self.halved(self.scale.scaled(self.drop(self.norm(self.up(x))))).square().mean()

    share = 0.5

    def halved(self, x: Tensor) -> Tensor:
        return x * self.share


CHANGES: dict[str, tuple[Callable[[Model], Any], str]] = {
    "a rate of dropout": (lambda m: setattr(m.drop, "p", 0.5), "`drop` has p=0.5, and had p=0.0"),
    "a number": (lambda m: setattr(m, "share", 2.0), "the model has share=2.0, and had share=0.5"),
    "a number that another module's method reads": (
        lambda m: setattr(m.scale, "temperature", 2.0),
        "`scale` has temperature=2.0, and had temperature=1.0",
    ),
    "a number of the class": (lambda m: setattr(m.scale, "rate", 3.0), "`scale` has rate=3.0, and had rate=1.0"),
    "values": (lambda m: m.load_state_dict(m.state_dict()), "`up.weight` has other values"),
    "a buffer": (lambda m: m.scale.offset.add_(1.0), "`scale.offset` has other values"),
    "another buffer": (lambda m: setattr(m.scale, "offset", torch.ones(4)), "`scale.offset` has other values"),
    "a hook": (lambda m: m.up.register_forward_hook(lambda *_: None), "`up` has 1 forward_hooks, and had 0"),
    "a parameter's hook": (lambda m: m.up.weight.register_hook(lambda g: g), "`up.weight` has 1 backward_hooks"),
    "what forward does not read": (lambda m: setattr(m, "seen", 3), ""),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_module_that_is_changed_later_is_told(change: str) -> None:
    module, x = Model(), torch.randn(6, 6)
    act, expected = CHANGES[change]
    engine = Engine(nnscaler.parallelize(module, {"x": x}, ranks=1))

    def told() -> Iterator[str]:
        for step in range(3):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                for batch in (x, x[:3]):  # of another size the module is traced once more
                    engine.step({"x": batch})
                engine.evaluate({"x": x})
            yield from (str(warning.message) for warning in caught)
            act(module) if step == 0 else None

    found = list(told())
    assert len(found) == bool(expected) and all(text.startswith(expected) for text in found)


def test_a_module_that_was_given_what_the_engine_has_is_watched_anew() -> None:
    module, x = Model(), torch.randn(6, 6)
    engine = Engine(nnscaler.parallelize(module, {"x": x}, ranks=1))
    engine.step({"x": x})
    module.load_state_dict(engine.state_dict())
    engine.watch_module()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.step({"x": x})
    module.norm.reset_running_stats()
    with pytest.warns(UserWarning, match="`norm.running_mean` has other values"):
        engine.step({"x": x})


class Collects(Model):
    """Keeps its losses in evaluation mode, as validation steps of Lightning do."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        loss = super().forward(x)
        if not self.training:
            self.found.append(loss.detach())
        return loss


def test_what_forward_changes_in_evaluation_mode_alone_is_told() -> None:
    module, x = Collects(), torch.randn(6, 6)
    engine = Engine(nnscaler.parallelize(module, {"x": x}, ranks=1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.step({"x": x})
    with pytest.warns(UserWarning, match="forward changes attributes .* values: found: 0 items -> 1 items"):
        engine.evaluate({"x": x})
