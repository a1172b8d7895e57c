"""Builds the zoo's models and batches: `build("llama")`."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from tests.zoo.architectures import ARCHITECTURES, Architecture
from tests.zoo.inputs import KINDS
from tests.zoo.shrink import tiny


class MeanSquares(nn.Module):
    """A model without a loss of its own: the sum of the mean squares of what it returns."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch: Any) -> Tensor:
        found = [v for v in _tensors(self.model(**batch)) if v.requires_grad and v.is_floating_point()]
        return torch.stack([v.square().mean() for v in found]).sum()


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for inside in value.values():
            yield from _tensors(inside)
    elif isinstance(value, list | tuple):
        for inside in value:
            yield from _tensors(inside)


def build(name: str, batch: int = 6, seed: int = 0) -> tuple[nn.Module, dict[str, Any]]:
    """A model in train mode that returns a loss, with random parameters, and one global batch. Float32."""
    architecture = next(a for a in ARCHITECTURES if a.name == name)
    with quiet(), torch.random.fork_rng():
        torch.manual_seed(seed)
        config = tiny(architecture.model_type, architecture.changes)
        model = getattr(transformers, architecture.model_class)(config).train()
        sample = KINDS[architecture.kind](config, batch)
        for parameter in model.parameters():
            # zero biases and unit norms hide terms
            parameter.data.add_(torch.randn_like(parameter), alpha=0.02)
    return (MeanSquares(model) if architecture.mean_squares else model), sample


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Swallows what `transformers` says of slow paths and token ids."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def tags(architecture: Architecture) -> str:
    return f"{architecture.family}/{architecture.name}"
