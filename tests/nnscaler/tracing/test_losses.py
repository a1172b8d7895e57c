"""Where the loss is in what a model returns: by name, by itself, or the only scalar of a tuple that is trained."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import verify
from nnscaler.errors import NnscalerError
from nnscaler.ir.graph import Graph
from nnscaler.tracing import trace
from nnscaler.tracing.export.loss_module import loss_of
from nnscaler.tracing.passes.needs_grad_and_liveness import remove_dead_code


@dataclass
class Output:
    logits: Tensor
    loss: Tensor


class Named(NamedTuple):
    aux: Tensor
    loss: Tensor


class Net(nn.Module):
    def __init__(self, returned: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.proj, self.returned = nn.Linear(6, 4), returned

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        logits = self.proj(x)
        return self.returned(logits, F.cross_entropy(logits, labels))


def batch(rows: int = 4) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {"x": torch.randn(rows, 6, generator=generator), "labels": torch.arange(rows) % 4}


def model_output(logits: Tensor, loss: Tensor) -> Any:
    outputs = pytest.importorskip("transformers.modeling_outputs")
    return outputs.CausalLMOutput(loss=loss, logits=logits)


FORMS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "itself": lambda logits, loss: loss,
    "of one element": lambda logits, loss: loss.reshape(1, 1),
    "first": lambda logits, loss: (loss, logits),
    "second": lambda logits, loss: (logits, loss),
    "in a list, last": lambda logits, loss: [logits, None, loss],
    "beside what is shown": lambda logits, loss: (loss.detach() * 2, logits.argmax(-1).float().mean(), loss, logits),
    "beside a count": lambda logits, loss: (torch.tensor(3), 0.5, loss),
    "beside one logit": lambda logits, loss: (logits[:1, :1], loss),
    "in a dict": lambda logits, loss: {"aux": logits.mean(), "loss": loss},
    "in a dataclass": Output,
    "in a named tuple": lambda logits, loss: Named(logits.mean(), loss),
    "in a ModelOutput": model_output,
}


def operators(graph: Graph) -> list[str]:
    """Of the loss alone."""
    of_loss = remove_dead_code(graph.replace(outputs=()))
    return [op.operator for op in of_loss.operations if op.operator != "aten.reshape.default"]


@pytest.mark.parametrize("form", FORMS)
def test_the_loss_is_found(form: str) -> None:
    found = trace(Net(FORMS[form]), batch()).graph  # which compares the graph with the model
    assert operators(found) == operators(trace(Net(FORMS["itself"]), batch()).graph)


@pytest.mark.parametrize("form", ["second", "beside what is shown"])
def test_a_program_of_such_a_model(form: str) -> None:
    report = verify.verify_plan(Net(FORMS[form]), batch(12), ranks=3, plan="dp=3")
    assert report.exit_code == 0, report.to_json()


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (
            lambda logits, loss: (loss, logits.square().mean(), logits),
            "a tuple of float32[], float32[], float32[4, 4], and any of the scalars at 0 and 1 may be the loss",
        ),
        (lambda logits, loss: {"logits": logits, "cost": loss}, "a dict of 'logits', 'cost', not a scalar loss"),
        (lambda logits, loss: (), "a tuple of nothing, not a scalar loss"),
        (lambda logits, loss: None, "a NoneType, not a scalar loss"),
    ],
)
def test_what_is_no_loss(returned: Callable[[Tensor, Tensor], Any], message: str) -> None:
    with pytest.raises(NnscalerError) as caught:
        trace(Net(returned), batch())
    assert (caught.value.code, caught.value.message) == ("no_loss", f"the model returns {message}")
    assert "return the loss" in str(caught.value.help) and "--loss-fn" in str(caught.value.help)


@pytest.mark.parametrize(
    ("returned", "names"),
    [
        (lambda logits, loss: (logits, loss.detach()), ["output_0", "output_1"]),
        (lambda logits, loss: (logits, "mean"), ["output_0"]),
        (lambda logits, loss: logits, ["output"]),
    ],
)
def test_without_a_loss_the_program_only_runs_forward(
    returned: Callable[[Tensor, Tensor], Any], names: list[str]
) -> None:
    with pytest.warns(UserWarning, match="only runs forward and gives `output.*--loss-fn"):
        graph = trace(Net(returned), batch()).graph
    assert not graph.loss and [name for name, _ in graph.outputs] == names
    assert not any(tensor.needs_grad for tensor in graph.tensors.values())


def test_without_gradients_the_only_scalar_is_the_loss() -> None:
    """A run that only looks at the loss."""
    with torch.no_grad():
        made = Net(FORMS["second"])(**batch())
        assert loss_of(made) is made[1]


def test_ctc_loss_with_lengths_in_tuples() -> None:
    class Spoken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(6, 10)

        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            scores = self.head(x).log_softmax(-1).transpose(0, 1)
            return F.ctc_loss(scores, labels, (12,) * 4, (3, 2, 4, 4)) + nn.CTCLoss()(scores, labels, [12] * 4, [4] * 4)

    spoken = {"x": torch.randn(4, 12, 6), "labels": torch.randint(1, 9, (4, 4))}
    assert {op.operator for op in trace(Spoken(), spoken).graph.operations} >= {"aten.ctc_loss.Tensor"}
