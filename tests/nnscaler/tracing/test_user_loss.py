"""A loss outside of the model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import nnscaler
from nnscaler.errors import NnscalerError
from nnscaler.tracing import trace
from nnscaler.tracing.models_with_added_loss import check_loss_function, with_loss
from verify import verify_plan

X = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))
Y = torch.tensor([0, 3, 1, 2, 2, 4])


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 10), nn.Linear(10, 5)

    def forward(self, x: Tensor, labels: Tensor | None = None, scale: float = 1.0, **rest: Any) -> dict[str, Tensor]:
        assert labels is None and not rest, "a loss of its own"
        return {"logits": self.head(self.body(x).relu()) * scale}


class Positional(Net):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return self.head(self.body(x).relu())


def loss(outputs: dict[str, Tensor], batch: dict[str, Any]) -> Tensor:
    return F.cross_entropy(outputs["logits"], batch["labels"]) + batch["weight"].mean()


BATCH = {"x": X, "labels": Y, "weight": torch.ones(6), "scale": 0.5}


def test_what_the_model_and_the_function_are_given() -> None:
    model = Net()
    together = with_loss(model, loss)
    right = F.cross_entropy(model(X, scale=0.5)["logits"], Y) + 1
    assert torch.equal(together(**BATCH).loss, right)
    assert together(**BATCH).outputs.keys() == {"logits"}
    assert isinstance(together, Net) and type(together).__name__ == "Net"
    assert dict(together.named_parameters()).keys() == dict(model.named_parameters()).keys()
    assert all(a is b for a, b in zip(together.parameters(), model.parameters(), strict=True))
    together.eval()
    assert not model.training  # one module, twice
    assert torch.equal(copy.deepcopy(together)(**BATCH).loss, right)


def test_names_are_those_of_the_model() -> None:
    traced = trace(Net(), BATCH, loss_fn=loss)
    assert list(traced.state) == ["body.weight", "body.bias", "head.weight", "head.bias"]
    assert list(traced.inputs) == ["x", "labels", "weight"]
    modules = {op.module for op in traced.graph.operations}
    assert modules == {"body", "head", ""}


def test_a_tuple_whose_rest_is_for_the_loss() -> None:
    model = Positional()
    traced = trace(model, (X, Y), loss_fn=lambda outputs, batch: F.cross_entropy(outputs, batch[1]))
    assert list(traced.inputs) == ["x", "input_1"]


@pytest.mark.long
def test_a_program_of_model_and_loss() -> None:
    report = verify_plan(Net, BATCH, ranks=4, plan="dp=2,tp=2", depth="quick", loss_fn=loss)
    assert report.verdict.passes, report
    program = nnscaler.parallelize(Net(), BATCH, ranks=2, plan="tp=2", loss_fn=loss)
    assert "body.weight" in program.state


def test_a_wrong_loss_is_seen() -> None:
    """The reference takes the loss function too: planted here is one that is not the same twice."""
    calls = []

    def drifting(outputs: dict[str, Tensor], batch: dict[str, Any]) -> Tensor:
        calls.append(1)
        return F.cross_entropy(outputs["logits"], batch["labels"]) * len(calls)

    with pytest.raises(NnscalerError, match="the traced graph is not the model"):
        trace(Net(), BATCH, loss_fn=drifting)


def test_a_model_without_a_loss_is_told_of_it() -> None:
    with pytest.warns(UserWarning, match="--loss-fn"):
        trace(Positional(), (X,))
    with pytest.raises(NnscalerError, match="a tensor of shape"):
        trace(Net(), BATCH, loss_fn=lambda outputs, batch: outputs["logits"])


@pytest.mark.parametrize("wrong", [lambda outputs: outputs, lambda: 0.0, lambda a, b, c: a])
def test_a_function_that_takes_other_arguments(wrong: Any) -> None:
    with pytest.raises(NnscalerError, match="is no loss function") as caught:
        check_loss_function(wrong, "file.py::loss")
    assert caught.value.code == "usage" and "outputs, batch" in (caught.value.help or "")
