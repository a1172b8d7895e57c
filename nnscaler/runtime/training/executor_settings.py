"""The settings of an executor: how it runs a role module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from nnscaler.manifest import Returns


@dataclass(frozen=True, slots=True)
class ExecutorSettings:
    """How a role module is run.

    precision   replaces every floating dtype of the program; None: as written
    device      of this rank
    dropout     False makes dropout the identity
    seed        dropout draws from (seed, operation, number of the batch)
    first_step  optimizer steps made before, as a checkpoint has them
    first_pass  batches run before; None: one a step
    loss_scale  backward starts from it instead of 1, and it is taken out of the summed gradients, so that small ones
                survive half precision
    shapes      input -> shape of the global batch that the program is for; another one is refused
    tied        all names of each parameter or buffer that has several, for checkpoints
    returns     what the model returns, as the manifest has it, for `predict`
    compiled    compile the forward of each stage with torch.compile; not where tensors are observed
    cut_axes    axes over which batches are cut before they are given: each rank gets the rows of its data part; none:
                each gets the global batch
    """

    precision: str | None = None
    device: torch.device | str = "cpu"
    dropout: bool = True
    seed: int = 0
    first_step: int = 0
    first_pass: int | None = None
    loss_scale: float = 1.0
    shapes: Mapping[str, Sequence[int]] = field(default_factory=dict)
    tied: Sequence[Sequence[str]] = ()
    returns: Returns = field(default_factory=Returns)
    compiled: bool = False
    cut_axes: tuple[str, ...] = ()
