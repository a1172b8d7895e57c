"""The subject of `verify-external`: a parallel program of somebody else, and the plain model that it must equal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from op_registry.source_location import SourceLocation

from nnscaler.errors import NnscalerError

Batch = Any  # a tensor, or a tuple, list, mapping or dataclass (nested) of tensors and other values
Step = Callable[[Any, Batch], Tensor | None]


def default_step(model: Any, batch: Batch) -> Tensor:
    """Call the model on the batch and return its loss: what it returns, its `loss`, or the first of what it returns.

    Raises TypeError for a model that returns no scalar.
    """
    if isinstance(batch, Mapping):
        output = model(**batch)
    elif isinstance(batch, tuple | list):
        output = model(*batch)
    else:
        output = model(batch)
    found = output
    if isinstance(output, Mapping) and "loss" in output:
        found = output["loss"]
    elif getattr(output, "loss", None) is not None:
        found = output.loss
    elif isinstance(output, tuple | list) and output:
        found = output[0]
    if not isinstance(found, Tensor) or found.numel() != 1:
        kind = f"a tensor of shape {list(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
        raise TypeError(f"the model returns no scalar loss, but {kind}: define `step(model, batch)`, which returns one")
    return found


@dataclass(frozen=True)
class PretrainedFunctions:
    """How a program saves itself as its library does.

    save         write the whole model, given what saves itself and a folder; called on every rank
    load         make the program on this rank of a folder that was written in either way
    save_shards  write what each rank holds; None: torch.distributed.checkpoint does it without the library
    """

    save: Callable[[Any, Path], None]
    load: Callable[[Path], Any]
    save_shards: Callable[[Any, Path], None] | None = None


@dataclass(frozen=True)
class ExternalProgram:
    """A parallel program, in the words of its author, and its oracle.

    name            for messages: "check.py"
    model           make the plain eager module: the oracle, and what is handed to `parallelize`
    batch           make the batch of one step, whole: dim 0 of its tensors are the rows
    parallelize     the author's function of (module, DeviceMesh), unmodified. What it returns is what `step` gets: a
                    module, a pipeline schedule, or anything else; None: it changed the module in place
    mesh            (axis, size), outermost first; the product of the sizes is the number of ranks
    data_axes       axes over which the rows of the batch are divided before a rank's `step` sees them
    step            the loss of (model, batch). Where it runs the backward pass by itself (pipelines), it returns a loss
                    without gradient, or None on ranks that have none
    reference_step  the same for the plain model; None: `step`
    optimizer       make the optimizer, or several, of what `parallelize` returned, and of the plain model; None: SGD
    max_norm        clip gradients to this norm by `torch.nn.utils.clip_grad_norm_` before each step; None: do not
    clip            clip the gradients of (model, max_norm) in the program's own way, and return the norm; None: torch's
    added_to_norm   by which gradients are divided that are clipped: torch adds 1e-6
    names           name of a parameter or buffer in the program -> its name in the plain model, where they differ
    reference       "whole": the loss of the whole batch; "parts": the mean over the data parts, each by itself
    where           place of `parallelize`
    batch_where     place of `batch`
    pretrained      how it saves itself and loads, where its model has `save_pretrained`; None: the weights are gathered
                    by torch and written by the first rank, and loaded whole on each, before `parallelize`
    elsewhere       make the same program on another mesh, which loads what this one saved; it makes None where there is
                    no such mesh. None: this `parallelize` is given other sizes
    """

    name: str
    model: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    parallelize: Callable[[nn.Module, torch.distributed.device_mesh.DeviceMesh], Any]
    mesh: tuple[tuple[str, int], ...]
    data_axes: tuple[str, ...] = ()
    step: Step = default_step
    reference_step: Step | None = None
    optimizer: Callable[[Any], torch.optim.Optimizer | Sequence[torch.optim.Optimizer]] | None = None
    max_norm: float | None = None
    clip: Callable[[Any, float], Any] | None = None
    added_to_norm: float = 1e-6
    names: Mapping[str, str] = field(default_factory=dict)
    reference: str = "whole"
    where: SourceLocation | None = None
    batch_where: SourceLocation | None = None
    pretrained: PretrainedFunctions | None = None
    elsewhere: Callable[[], ExternalProgram | None] | None = None

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return prod(size for _, size in self.mesh)

    def optimizers(self, model: Any) -> tuple[torch.optim.Optimizer, ...] | None:
        """Return the optimizers that the author's function makes of a model; None where there is no such function.

        Raises NnscalerError `bad_check_file` for what does not say which tensors it updates.
        """
        if self.optimizer is None:
            return None
        made: Any = self.optimizer(model)
        found = tuple(
            made.values() if isinstance(made, Mapping) else made if isinstance(made, list | tuple) else (made,)
        )
        for one in found:
            if missing := [name for name in _OF_OPTIMIZERS if not hasattr(one, name)]:
                kind = "None" if one is None else f"a {type(one).__name__}"
                message = f"`optimizer` of {self.name} returns {kind}, which has no `{missing[0]}`"
                raise NnscalerError("bad_check_file", message, self.where, _OPTIMIZER_HELP)
        return found


_OF_OPTIMIZERS = ("param_groups", "step", "zero_grad")
_OPTIMIZER_HELP = (
    "return a `torch.optim.Optimizer`, or a list of them; one of your own class can be held in one: `class "
    "Held(torch.optim.Optimizer)` calls `super().__init__(the parameters that it updates, {})`, and its `step(self, "
    "closure=None)` calls yours"
)
