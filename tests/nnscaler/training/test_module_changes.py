"""A compiled module that is changed later: what the program does not follow is told, once."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

import nnscaler
from nnscaler.errors import NnscalerError
from nnscaler.training.engine import Engine

WEIGHT = 1.0


class Options:
    """Is no module, and is read by one."""

    power = 1.0

    def __init__(self) -> None:
        self.factor = 1.0
        self.sizes = {"of": [1.0]}


class Scale(nn.Module):
    """Is called by a method of its own."""

    rate = 1.0  # of the class

    def __init__(self) -> None:
        super().__init__()
        self.temperature = 1.0
        self.register_buffer("offset", torch.zeros(4))
        self.table, self.bend, self.options = torch.ones(4), torch.tanh, Options()

    def scaled(self, x: Tensor) -> Tensor:
        result: Tensor = (x + self.offset) * self.rate / self.temperature * self.table * self.both
        return self.bend(result) * WEIGHT

    @property
    def both(self) -> float:
        return self.options.factor * self.options.sizes["of"][0]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.drop, self.norm, self.scale = nn.Linear(6, 4), nn.Dropout(0.0), nn.BatchNorm1d(4), Scale()
        self.ends = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.halved(self.ends(self.scale.scaled(self.drop(self.norm(self.up(x)))))).square().mean()

    share = 0.5

    def halved(self, x: Tensor) -> Tensor:
        return x * self.share


def tie(module: Model) -> None:
    module.ends[1].weight = module.ends[0].weight


CHANGES: dict[str, tuple[Callable[[Model], Any], str]] = {
    "a rate of dropout": (lambda m: setattr(m.drop, "p", 0.5), "`drop` has p=0.5, and had p=0.0"),
    "a number": (lambda m: setattr(m, "share", 2.0), "the model has share=2.0, and had share=0.5"),
    "a number that another module's method reads": (
        lambda m: setattr(m.scale, "temperature", 2.0),
        "`scale` has temperature=2.0, and had temperature=1.0",
    ),
    "a number of the class": (lambda m: setattr(m.scale, "rate", 3.0), "`scale` has rate=3.0, and had rate=1.0"),
    "a number of the class alone": (
        lambda m: setattr(type(m.scale), "rate", 3.0),
        "`Scale` has rate=3.0, and had rate",
    ),
    "a global": (lambda m: globals().update(WEIGHT=2.0), f"`{__name__}` has WEIGHT=2.0, and had WEIGHT=1.0"),
    "an object's number": (lambda m: setattr(m.scale.options, "factor", 2.0), "`scale.options` is another one than"),
    "a list's number": (lambda m: m.scale.options.sizes["of"].append(2.0), "`scale.options` is another one than"),
    "an equal list": (lambda m: m.scale.options.sizes.update(of=[1.0]), ""),
    "a function": (lambda m: setattr(m.scale, "bend", torch.sin), "`scale.bend` is another one than when the program"),
    "a method": (lambda m: setattr(m, "halved", lambda x: x), "`halved` is another one than when the program"),
    "a tensor": (lambda m: setattr(m.scale, "table", torch.ones(4)), "`scale.table` is another one than when the"),
    "values of a tensor": (lambda m: m.scale.table.zero_(), "`scale.table` is another one than when the program"),
    "a parameter": (lambda m: setattr(m.up, "weight", nn.Parameter(torch.ones(4, 6))), "`up.weight` is another tensor"),
    "no parameter": (lambda m: setattr(m.up, "bias", None), "`up.bias` is another tensor than when the program"),
    "tied parameters": (tie, "`ends.1.weight` is another tensor than when the program was started: the engine"),
    "memory": (lambda m: setattr(m.up.weight, "data", torch.ones(4, 6)), "`up.weight` has other values than when"),
    "values that leave no trace": (lambda m: m.ends[1].weight.data.clamp_(0, 0.1), "`ends.1.weight` has other values"),
    "a part": (lambda m: setattr(m, "up", nn.Linear(6, 4)), "`up` is another module than when the program was started"),
    "one of a list": (lambda m: m.ends.append(nn.Tanh()), "`ends.2` is another module than when the program was"),
    "parametrized": (lambda m: weight_norm(m.up), "`up` has class="),
    "values": (lambda m: m.load_state_dict(m.state_dict()), "`up.weight` has other values"),
    "a buffer": (lambda m: m.scale.offset.add_(1.0), "`scale.offset` has other values"),
    "another buffer": (lambda m: setattr(m.scale, "offset", torch.ones(4)), "`scale.offset` is another tensor"),
    "a hook": (lambda m: m.up.register_forward_hook(lambda *_: None), "`up` has 1 forward_hooks, and had 0"),
    "a parameter's hook": (lambda m: m.up.weight.register_hook(lambda g: g), "`up.weight` has 1 backward_hooks"),
    "what forward does not read": (lambda m: setattr(m, "seen", 3), ""),
}


@pytest.fixture(autouse=True)
def what_is_shared() -> Iterator[None]:
    """Put back what the changes change outside of their module."""
    with patch.object(Scale, "rate", Scale.rate), patch.dict(globals()):
        yield


def started(module: Model, x: Tensor) -> Engine:
    return Engine(nnscaler.parallelize(module, {"x": x}, ranks=1, self_check=False))


def told(work: Callable[[], Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        work()
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize("change", CHANGES)
def test_a_module_that_is_changed_later_is_told(change: str) -> None:
    module, x = Model(), torch.randn(6, 6)
    act, expected = CHANGES[change]
    engine = started(module, x)
    assert told(lambda: engine.step({"x": x})) == []
    act(module)
    found = [text for _ in range(4) for text in told(lambda: engine.step({"x": x}))]  # of all parameters a sample
    assert len(found) == bool(expected) and all(text.startswith(expected) for text in found)


def test_what_compiling_for_other_sizes_and_a_run_of_the_module_leave_is_no_change() -> None:
    module, x = Collects(), torch.randn(6, 6)
    module.train()
    engine = started(module, x)
    module.seen, module.loader = 3, object()

    def work() -> None:
        for _ in range(2):
            for batch in (x, x[:3]):
                engine.step({"x": batch})
            module.eval()
            engine.evaluate({"x": x[:2]})
            module.train()

    assert [text for text in told(work) if "found: 0 items" not in text] == []


def test_a_change_is_told_beside_one_that_stays_and_a_return_is_none() -> None:
    module, x = Model(), torch.randn(6, 6)
    engine = started(module, x)

    def after(change: Callable[[Model], Any]) -> list[str]:
        change(module)
        return [text.partition(",")[0] for _ in range(2) for text in told(lambda: engine.step({"x": x}))]

    assert after(lambda m: m.eval()) == ["the model has training=False"]
    assert after(lambda m: setattr(m.drop, "p", 0.25)) == ["`drop` has p=0.25"]
    assert after(lambda m: setattr(m.drop, "p", 0.0)) == []
    assert after(lambda m: m.train()) == []
    assert after(lambda m: setattr(m.drop, "p", 0.25)) == []


@pytest.mark.parametrize(("change", "said"), [("a part", "`up` is another module"), ("tied parameters", "`ends.1")])
def test_no_program_for_another_size_is_made_of_other_parameters(change: str, said: str) -> None:
    """It would run with zeros in their place."""
    module, x = Model(), torch.randn(6, 6)
    engine = started(module, x)
    CHANGES[change][0](module)
    for run in (engine.step, engine.evaluate):
        with warnings.catch_warnings(), pytest.raises(NnscalerError, match=f"^{said}") as raised:
            warnings.simplefilter("ignore")
            run({"x": x[:2]})
        assert raised.value.code == "module_differs"


def test_a_program_for_another_size_that_follows_a_change_is_told() -> None:
    module, x = Model(), torch.randn(6, 6)
    engine = started(module, x)
    module.scale.temperature = 2.0
    said = r"temperature=2.0, and had temperature=1.0, and so has the program for x \[2, 6\], for evaluation alone"
    with pytest.warns(UserWarning, match=said):
        engine.evaluate({"x": x[:2]})


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
    with pytest.warns(UserWarning, match="`norm.(running_mean|num_batches_tracked)` has other values"):
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


class Merges(nn.Module):
    """A weight beside a product of low rank, which evaluation mode adds to it, as layers of LoRA do."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6), requires_grad=False)
        self.a, self.b = nn.Parameter(torch.randn(2, 6)), nn.Parameter(torch.randn(6, 2))
        self.how, self.merged = how, False

    def train(self, mode: bool = True) -> Merges:
        if not mode and not self.merged:
            if self.how == "replaces":
                self.weight = nn.Parameter(self.weight + self.b @ self.a)
            elif self.how == "adds to several":
                torch._foreach_add_([self.weight.data], [self.b @ self.a])
            else:
                self.weight.data += self.b @ self.a
            self.merged = True
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight if self.merged else self.weight + self.b @ self.a
        return (x @ weight).square().mean()


@pytest.mark.parametrize("how", ["adds", "adds to several", "replaces"])
def test_evaluation_mode_that_changes_parameters_is_refused(how: str) -> None:
    """It would change the model's own, and not those that are trained."""
    module, x = Merges(how), torch.randn(6, 6)
    weight = module.weight.detach().clone()
    engine = Engine(nnscaler.parallelize(module, {"x": x}, ranks=1))
    engine.step({"x": x})
    with pytest.raises(NnscalerError, match=r"`eval\(\)` of the model changes 'weight'") as raised:
        engine.evaluate({"x": x})
    assert "merge_weights=False" in raised.value.help
    if how != "replaces":  # refused before it is written
        assert raised.value.where is not None and "self.weight.data" in raised.value.where.text
        assert torch.equal(module.weight, weight) and module.training and not module.merged
        engine.step({"x": x[:3]})


def test_a_part_takes_other_sizes_until_it_is_another() -> None:
    """Gradients of its inputs are those of another parameter for each size."""
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    part = nnscaler.parallelize_part(module, {"input": torch.randn(6, 4)}, settings={"device": "cpu"})
    for rows in (6, 5, 3):
        part(torch.randn(rows, 4)).sum().backward()
    module[0] = nn.Linear(4, 4)
    with pytest.raises(NnscalerError, match="`0` is another module than when the program was started"):
        part(torch.randn(2, 4))
