"""What is right: the untraced eager model on the whole batch.

Nothing of the compiler is used to run it, so a mistake of the tracer cannot be on both sides. Only the sample batch
is taken apart and put together again by shared code.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from nnscaler.errors import NnscalerError
from nnscaler.tracing.locations import location_of_exception
from nnscaler.tracing.loss_module import loss_of, training
from nnscaler.tracing.precision import exact, without_dropout
from nnscaler.tracing.sample_inputs import SampleInputs

UPDATE_SHARE = 0.02  # a step of SGD moves the parameters by about this share of their size


@dataclass(frozen=True)
class Trajectory:
    """A few steps of training.

    `losses` and `gradients` have one entry per step, the loss before the step's update. Tensors are on the CPU, by
    every name that they have in the model (tied parameters have several). A gradient is None for a parameter that the
    loss does not depend on. Dropout is off.
    """

    losses: tuple[Tensor, ...]
    gradients: tuple[Mapping[str, Tensor | None], ...]
    parameters: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    learning_rate: float
    seconds: float


def names_of(module: nn.Module) -> dict[str, tuple[str, ...]]:
    """parameter or buffer name -> all names of the same tensor, the canonical one first."""
    by_object: dict[int, list[str]] = {}
    for name, tensor in _all_tensors(module):
        by_object.setdefault(id(tensor), []).append(name)
    return {name: tuple(names) for names in by_object.values() for name in names}


def run_reference(
    module: nn.Module,
    sample: SampleInputs,
    *,
    steps: int,
    dtype: torch.dtype = torch.float64,
    learning_rate: float | None = None,
) -> Trajectory:
    """Trains a copy of `module` on the sample batch with SGD, in `dtype`.

    In float64 everything is: also what the model's code casts to float32. `learning_rate` None: chosen from the first
    gradient. Raises NnscalerError `model_raised` with the user's own line if the model raises.
    """
    started = time.perf_counter()
    model = copy.deepcopy(module)
    with _running_in(model, dtype), training(model):
        inputs = {name: _cast(t, dtype) for name, t in sample.tensors.items()}
        losses: list[Tensor] = []
        gradients: list[dict[str, Tensor | None]] = []
        for _ in range(steps):
            model.zero_grad(set_to_none=True)
            loss = _loss(model, sample, inputs)
            losses.append(loss.detach().cpu().clone())
            gradients.append(_gradients(model))
            if learning_rate is None:
                learning_rate = choose_learning_rate(model)
            torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=learning_rate).step()
    parameters = {n: p.detach().cpu() for n, p in model.named_parameters(remove_duplicate=False)}
    buffers = {n: b.detach().cpu() for n, b in model.named_buffers(remove_duplicate=False)}
    assert learning_rate is not None, "at least one step"
    seconds = time.perf_counter() - started
    return Trajectory(tuple(losses), tuple(gradients), parameters, buffers, learning_rate, seconds)


def choose_learning_rate(model: nn.Module) -> float:
    """A rate, of two digits, at which a step moves the parameters by a small share of their size: enough for a wrong
    update to show, too little for the model to leave the range in which it is smooth."""
    size = sum(float(p.detach().double().square().sum()) for p in model.parameters() if p.requires_grad)
    slope = sum(float(p.grad.double().square().sum()) for p in model.parameters() if p.grad is not None)
    if not slope > 0 or not size > 0 or not slope < float("inf"):
        return 0.01
    return float(f"{UPDATE_SHARE * (size / slope) ** 0.5:.1e}")


def _loss(model: nn.Module, sample: SampleInputs, inputs: Mapping[str, Tensor]) -> Tensor:
    args, kwargs = sample.rebuild({name: t.clone() for name, t in inputs.items()})
    try:
        loss = loss_of(model(*args, **kwargs))
        if not loss.requires_grad:
            raise NnscalerError("no_gradient", "the loss does not depend on any parameter that is trained")
        loss.backward()
    except NnscalerError:
        raise
    except Exception as error:
        first = (str(error).strip().splitlines() or [""])[0]
        message = f"the model itself raises on the sample batch: {type(error).__name__}: {first[:300]}"
        raise NnscalerError("model_raised", message, location_of_exception(error)) from error
    return loss


def _gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {
        name: None if p.grad is None else p.grad.detach().cpu().clone()
        for name, p in model.named_parameters(remove_duplicate=False)
    }


def _all_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


@contextmanager
def _running_in(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    with ExitStack() as stack:
        if dtype == torch.float64:
            stack.enter_context(exact(model))
        else:
            model.to(dtype)
            stack.enter_context(without_dropout())
        yield
