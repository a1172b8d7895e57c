"""What a LightningModule, its optimizer and its data must be for a compiled step, checked."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.optim import Optimizer

from nnscaler.errors import NnscalerError
from nnscaler.integrations.lightning_steps import StepModule
from nnscaler.training.engine import Engine
from nnscaler.training.optimizers import check_update
from nnscaler.training.replicas import checksum


def check_module(module: LightningModule, trainer: Trainer, precision: Any) -> None:
    """Raise NnscalerError for what a compiled step would leave out in silence."""
    name = type(module).__name__
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    refused: list[tuple[bool, str, str]] = [
        (
            not module.automatic_optimization,
            f"{name} optimizes by hand",
            "automatic_optimization = True, or nnscaler's own engine in a loop of yours",
        ),
        (
            is_overridden("backward", module),
            f"{name} has a `backward` of its own",
            "the compiled step runs backward: change gradients in on_after_backward",
        ),
        (
            isinstance(precision, MixedPrecision) and precision.scaler is not None,
            f"precision {trainer.precision} scales the loss",
            'precision="bf16-mixed"',
        ),
        (
            any(isinstance(callback, StochasticWeightAveraging) for callback in callbacks),
            "StochasticWeightAveraging averages the module's weights, which the engine has during fit",
            "leave it out, and average checkpoints",
        ),
    ]
    for holds, message, help in refused:
        if holds:
            raise NnscalerError("bad_settings", message, help=help)


def with_tensors_of(optimizer: Optimizer, steps: StepModule, engine: Engine) -> Optimizer:
    """Give an optimizer of the module's parameters those of this rank in their places; return it.

    Raises NnscalerError as `check_update`, and for one that has a state already.
    """
    if optimizer.state:
        message = f"{type(optimizer).__name__} makes its state before the first step, for whole parameters"
        raise NnscalerError("bad_settings", message, help="an optimizer that makes it in step()")
    names = {id(parameter): name for name, parameter in steps.named_parameters()}
    here, held = engine.parameters, {entry.fqn: entry for entry in engine.stored() if entry.kind == "parameter"}
    trainable = {entry.fqns[0] for entry in engine.manifest.parameters if entry.trainable}
    taken = inspect.signature(type(optimizer)).parameters.keys() & optimizer.defaults.keys()
    for group in optimizer.param_groups:
        unknown = next((p for p in group["params"] if id(p) not in names), None)
        if unknown is not None:
            message = f"the optimizer has a parameter of shape {list(unknown.shape)} that is none of the module's"
            raise NnscalerError("no_such_parameter", message)
        wanted = [name for p in group["params"] if (name := names[id(p)]) in here]
        settings = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        check_update(
            type(optimizer),
            {key: value for key, value in settings.items() if key in taken},
            [held[name] for name in wanted],
            complete=here.keys() >= trainable,
        )
        group["params"] = [here[name] for name in wanted]
        if "param_names" in group:
            group["param_names"] = wanted
    return optimizer


def check_same_rows(batch: Mapping[str, Tensor], engine: Engine) -> None:
    """Check that the ranks of a data part loaded the same. Raises NnscalerError("batch_differs") on every rank."""
    sums = [checksum(tensor) for tensor in batch.values()]
    own = torch.cat([torch.tensor([engine.data_part.index]), *sums]).to(engine.device)
    found = engine.communicator.all_gather(own, tuple(range(engine.world_size)))
    first: dict[int, int] = {}
    for rank, told in enumerate(found):
        other = first.setdefault(int(told[0]), rank)
        if not torch.equal(told, found[other]):
            name = list(batch)[int((told != found[other])[1:].nonzero()[0]) // 2]
            message = f"ranks {other} and {rank} have one data part between them, and loaded other values of {name!r}"
            help = "let both load alike: seed_everything(...) without workers=True, and a sampler by `Trainer`"
            raise NnscalerError("batch_differs", message, help=help)
