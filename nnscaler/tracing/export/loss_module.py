"""Wrap a model as the module that is exported: it takes the sample's tensors one by one and returns the loss and the
other results."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nnscaler.errors import NnscalerError
from nnscaler.runtime.output_structure import Returned, describe
from nnscaler.tracing.sample_inputs import SampleInputs

PREFIX = "model"  # the name of the user's module inside `LossModule`

_TEMPLATE = """return the loss from forward, as the output itself, as its `.loss`, or as the only scalar in a tuple:

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


@dataclass(frozen=True)
class WithOutputs:
    """A loss that is computed outside of a model, and what the model itself returned."""

    loss: Tensor
    outputs: Any


@dataclass(frozen=True)
class Results:
    """The results of a model's forward.

    loss   scalar; None for a model without one
    rest   the other tensors, and how they are returned
    """

    loss: Tensor | None
    rest: Returned

    @property
    def tensors(self) -> dict[str, Tensor]:
        """By name, the loss first."""
        return {**({} if self.loss is None else {"loss": self.loss}), **self.rest.tensors}


class LastResults:
    """The results of the last forward, for what reads the exported graph."""

    def __init__(self) -> None:
        self.found: Results | None = None


class LossModule(nn.Module):
    """Calls `model` on the sample's structure around `tensors`, and returns its results, the loss first.

    `around` is opened around each call: what makes an export follow the path of eager. `last`: what the last call
    returned.
    """

    def __init__(self, model: nn.Module, sample: SampleInputs) -> None:
        super().__init__()
        self.model = model
        self.around: Callable[[], AbstractContextManager[None]] = nullcontext
        self.sample = sample
        self.last = LastResults()

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        args, kwargs = self.sample.rebuild(dict(zip(self.sample.tensors, tensors, strict=True)))
        with self.around():
            self.last.found = results_of(self.model(*args, **kwargs))
        return tuple(self.last.found.tensors.values())


def results_of(output: Any) -> Results:
    """Return the loss in a module's output, and what else it returns. A model without a loss returns other tensors, and
    no scalar with a gradient.

    Raises NnscalerError "no_loss" where it returns no tensor, or scalars that are not named as the loss.
    """
    try:
        found = _found(output)
    except NnscalerError:
        rest = describe(output)
        scalars = [t for t in rest.tensors.values() if _is_scalar(t) and t.requires_grad]
        if scalars or not rest.tensors:
            raise
        return Results(None, rest)
    rest = describe(output.outputs if isinstance(output, WithOutputs) else output, found)
    return Results(found.reshape(()) if found.ndim else found, rest)


def loss_of(output: Any) -> Tensor:
    """Return the scalar loss in a module's output: itself, its `loss`, or in a tuple the only scalar with a gradient.

    Raises NnscalerError "no_loss" where there is none, or more than one that it may be.
    """
    found = _found(output)
    return found.reshape(()) if found.ndim else found


def _found(output: Any) -> Tensor:
    """Return the tensor of an output that is the loss, of one element."""
    found = output
    if isinstance(output, Mapping):
        found = output.get("loss", output)
    elif isinstance(getattr(output, "loss", None), Tensor):
        found = output.loss
    elif isinstance(output, tuple | list):
        found = _only_scalar(output)
    if _is_scalar(found):
        assert isinstance(found, Tensor)
        return found
    raise NnscalerError("no_loss", f"the model returns {_describe(found)}, not a scalar loss", help=_TEMPLATE)


def _is_scalar(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() == 1 and value.is_floating_point()


def _only_scalar(output: tuple[Any, ...] | list[Any]) -> Any:
    """Return the element that is the loss; the whole where none can be."""
    scalars = [(place, value) for place, value in enumerate(output) if _is_scalar(value)]
    trained = [(place, value) for place, value in scalars if value.requires_grad]
    if not torch.is_grad_enabled():  # nothing has a gradient there
        trained = trained or scalars
    elif scalars and not trained:
        message = f"the model returns {_describe(output)}, and no scalar in it has a gradient"
        raise NnscalerError("no_loss", message, help=_TEMPLATE)
    plain = [(place, value) for place, value in trained if value.ndim == 0] or trained
    if len(plain) > 1:
        places = " and ".join(str(place) for place, _ in plain)
        message = f"the model returns {_describe(output)}, and any of the scalars at {places} may be the loss"
        help_text = "return the loss by name, in a dict or a dataclass with `loss`, or detach what is only shown"
        raise NnscalerError("no_loss", message, help=f"{help_text}; or {_TEMPLATE}")
    return plain[0][1] if plain else output


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)} and dtype {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, Mapping):
        return f"a {type(value).__name__} of {', '.join(map(repr, value)) or 'nothing'}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {', '.join(map(_brief, value)) or 'nothing'}"
    return f"a {type(value).__name__}"


def _brief(value: Any) -> str:
    """`float32[4, 4]`, or a type's name."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return type(value).__name__


def result_notes(results: Results | None) -> tuple[str, ...]:
    """Return what the user should know of the results: that there is no loss, and what a program does not give."""
    if results is None:
        return ()
    notes = []
    if results.loss is None:
        listed = ", ".join(f"`{name}`" for name in results.tensors)
        notes.append(
            f"the model returns no scalar loss with a gradient, so its program only runs forward and gives {listed}; "
            "to train it return a loss, or give a function of the outputs and the batch: --loss-fn file.py::loss"
        )
    if results.rest.left_out:
        listed = ", ".join(f"`{path}` ({kind})" for path, kind in results.rest.left_out)
        notes.append(f"the model also returns {listed}; a program returns tensors, and None in this place")
    return tuple(notes)


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
    """Return whether some parameter or buffer has no data."""
    tensors: list[Tensor] = [*module.parameters(), *module.buffers()]
    return any(t.device == torch.device("meta") for t in tensors)
