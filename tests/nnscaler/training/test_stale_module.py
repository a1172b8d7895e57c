"""The module that was compiled, used between steps: that it has older weights is told, once."""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import _global_forward_pre_hooks as _global

import nnscaler
from nnscaler.training.engine import Engine


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.head, self.frozen = nn.Linear(6, 4), nn.Linear(4, 3), nn.Linear(6, 6).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.up(self.frozen(x))).square().mean()


Use = Callable[[Model, Engine, Tensor], Any]


def average(module: Model, _engine: Engine, _x: Tensor) -> None:
    for mean, parameter in zip(Model().parameters(), module.parameters(), strict=True):
        mean.data.lerp_(parameter.data, 0.1)


def give(module: Model, engine: Engine, x: Tensor) -> None:
    module.load_state_dict(engine.state_dict())
    engine.watch_module()
    module(x)


STALE: dict[str, tuple[Use, str]] = {
    "run": (lambda m, e, x: m(x), "`forward` of the model is called between steps"),
    "run in part": (lambda m, e, x: m.head(m.frozen(x)[:, :4]), "`forward` of `head` is called between steps"),
    "saved": (lambda m, e, x: m.state_dict(), "`state_dict` of the model is called between steps"),
    "averaged": (average, "`parameters` of the model is called between steps"),
    "gradients forgotten": (lambda m, e, x: m.zero_grad(), "`zero_grad` of the model is called between steps"),
}
RIGHT: dict[str, Use] = {
    "given the weights": give,
    "what is not trained": lambda m, e, x: m.frozen(x),
    "compiled for another size": lambda m, e, x: e.step({"x": x[:3]}),
    "evaluated by the engine": lambda m, e, x: (m.eval(), e.evaluate({"x": x}), m.train()),
    "copied": lambda m, e, x: copy.deepcopy(m)(x),
}


def told_of(use: Use) -> list[warnings.WarningMessage]:
    module, x = Model(), torch.randn(6, 6)
    engine = Engine(nnscaler.parallelize(module, {"x": x}, ranks=1, self_check=False))
    optimizer = engine.optimizer(torch.optim.SGD, lr=0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            module(x)
            module.state_dict()  # as they are, before the first step
            for _ in range(2):
                engine.step({"x": x})
                optimizer.step()
                use(module, engine, x)
            give(module, engine, x)
    return caught


@pytest.mark.parametrize("use", STALE)
def test_a_use_of_older_weights_is_told_at_its_line(use: str) -> None:
    act, said = STALE[use]
    first, *others = told_of(act)
    assert str(first.message).startswith(said) and "engine.state_dict()" in str(first.message)
    assert first.filename == __file__
    assert [str(other.message) for other in others] in ([], [str(first.message)])  # once more after the module had all


@pytest.mark.parametrize("use", RIGHT)
def test_a_right_use_of_the_module_is_not(use: str) -> None:
    assert [str(warning.message) for warning in told_of(RIGHT[use])] == []


def test_a_module_is_as_the_engine_until_the_first_update() -> None:
    module, x = Model(), torch.randn(6, 6)
    engine = Engine(nnscaler.parallelize(module, {"x": x}, ranks=1, self_check=False))
    optimizer = engine.optimizer(torch.optim.SGD, lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(engine.step({"x": x}).float(), module(x).detach())
        optimizer.step()
    with pytest.warns(UserWarning, match="`forward` of the model is called between steps"):
        module(x)


def test_calls_of_the_module_are_looked_at_between_steps_alone() -> None:
    """And of no other one: torch.compile reads others, which global hooks would keep it from."""
    module, x = Model(), torch.randn(6, 6)
    program = nnscaler.parallelize(module, {"x": x}, ranks=1, self_check=False)
    gc.collect()  # engines of other tests

    def hooks() -> list[int]:
        return [len(held) for held in (*(part._forward_pre_hooks for part in module.modules()), _global)]

    assert hooks() == [0, 0, 0, 0, 0]
    first, second = Engine(program), Engine(program)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for engine in (first, second, first):
            engine.step({"x": x})
        assert hooks() == [1, 1, 1, 0, 0]  # of the model, `up` and `head`
        first.watch_module()
        for engine in (first, second, first):
            engine.step({"x": x})
        del engine, first, second
        gc.collect()
        module(x)
        Engine(program).step({"x": x})
        assert hooks() == [1, 1, 1, 0, 0]
