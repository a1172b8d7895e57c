"""The module that is exported: it takes the sample's tensors one by one and returns the scalar loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from nnscaler.errors import NnscalerError
from nnscaler.tracing.sample_inputs import SampleInputs

PREFIX = "model"  # the name of the user's module inside `LossModule`

_TEMPLATE = """return the loss from forward, as the output itself, as its `.loss`, or first in a tuple:

    class WithLoss(torch.nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model = model

        def forward(self, ids, labels):
            logits = self.model(ids)
            return torch.nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten())

or give a function of the model's outputs and the batch, as --loss-fn file.py::loss or loss_fn=loss:

    def loss(outputs, batch):
        return torch.nn.functional.cross_entropy(outputs.flatten(0, -2), batch["labels"].flatten())
"""


class LossModule(nn.Module):
    """Calls `model` on the sample's structure around `tensors`, and returns its loss.

    `around` is opened around each call: what makes an export follow the path of eager.
    """

    def __init__(self, model: nn.Module, sample: SampleInputs) -> None:
        super().__init__()
        self.model = model
        self.around: Callable[[], AbstractContextManager[None]] = nullcontext
        self.sample = sample

    def forward(self, *tensors: Tensor) -> Tensor:
        args, kwargs = self.sample.rebuild(dict(zip(self.sample.tensors, tensors, strict=True)))
        with self.around():
            return loss_of(self.model(*args, **kwargs))


def loss_of(output: Any) -> Tensor:
    """The scalar loss in a module's output. Raises NnscalerError "no_loss" when there is none."""
    found = output
    if not isinstance(output, Tensor):
        if isinstance(output, Mapping) and "loss" in output:
            found = output["loss"]
        elif isinstance(getattr(output, "loss", None), Tensor):
            found = output.loss
        elif isinstance(output, tuple | list) and output:
            found = output[0]
    if isinstance(found, Tensor) and found.numel() == 1 and found.is_floating_point():
        return found if found.ndim == 0 else found.reshape(())
    raise NnscalerError("no_loss", f"the model returns {_describe(found)}, not a scalar loss", help=_TEMPLATE)


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)} and dtype {str(value.dtype).removeprefix('torch.')}"
    return f"a {type(value).__name__}"


def mode_note(module: nn.Module) -> str | None:
    """Return what the user should know of a model whose root is in evaluation mode; None for one that trains."""
    if module.training:
        return None
    training = [name for name, part in module.named_modules() if part.training]
    outermost = [name for name in training if not any(name.startswith(f"{other}.") for other in training)]
    text = "the model is in evaluation mode (`.eval()`), and so is its program: dropout is off"
    text += ", and batch norm uses its running statistics"
    if outermost:
        listed = ", ".join(f"`{name}`" for name in outermost[:3]) + (", ..." if len(outermost) > 3 else "")
        text += f"; only {listed} {'are' if len(outermost) > 1 else 'is'} in train mode"
    return f"{text}. For a program that trains, call `.train()` on the model in build_model()"


def is_meta(module: nn.Module) -> bool:
    """Whether some parameter or buffer has no data."""
    tensors: list[Tensor] = [*module.parameters(), *module.buffers()]
    return any(t.device == torch.device("meta") for t in tensors)
