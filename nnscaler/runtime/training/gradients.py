"""The gradients of one step on one rank: accumulated over micro-batches, then summed over ranks."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from nnscaler.runtime.communication.communicator import Communicator
from nnscaler.runtime.role import Stage
from nnscaler.runtime.training.reducer import Holding, holding, reduce_gradients

_HALF = (torch.float16, torch.bfloat16)


class Gradients:
    """Holds what `.grad` had before the step apart, so that only this step's gradients are summed over ranks.

    A used parameter that got no gradient here contributes zeros; an unused one keeps `.grad` as it was.
    """

    def __init__(self, stages: Mapping[int, Stage], communicator: Communicator) -> None:
        self._communicator = communicator
        self._holdings: dict[torch.nn.Parameter, Holding] = {}
        self._used: dict[torch.nn.Parameter, bool] = {}
        for stage in stages.values():
            for name, description in stage.parameters.items():
                parameter = getattr(stage, name)
                self._holdings[parameter] = holding(stage, description)
                self._used[parameter] = self._used.get(parameter, False) or description.used
        self._before: dict[torch.nn.Parameter, Tensor] = {}
        self._wide: dict[torch.nn.Parameter, Tensor] = {}

    def begin(self) -> None:
        self._before = {p: p.grad for p in self._holdings if p.grad is not None}
        self._wide = {}
        for parameter in self._holdings:
            parameter.grad = None

    def collect(self) -> None:
        """Move gradients of half precision into float32, after each backward."""
        for parameter in self._holdings:
            if parameter.dtype in _HALF and parameter.grad is not None:
                wide = parameter.grad.float()
                self._wide[parameter] = self._wide[parameter] + wide if parameter in self._wide else wide
                parameter.grad = None

    def finish(self, loss_scale: float = 1.0) -> None:
        """Sums over ranks, takes the scale of the loss out, and leaves the result, plus what was there before the
        step, in `.grad`."""
        used = [p for p in self._holdings if self._used[p]]
        summed = reduce_gradients([(self._holdings[p], self._local(p)) for p in used], self._communicator)
        for parameter, scaled in zip(used, summed, strict=True):
            gradient = scaled if loss_scale == 1.0 else scaled / loss_scale
            before = self._before.get(parameter)
            total = gradient if before is None else before.to(gradient.dtype) + gradient
            parameter.grad = total.to(parameter.dtype)
        for parameter in self._holdings:
            if not self._used[parameter]:
                parameter.grad = self._before.get(parameter)
        self._before, self._wide = {}, {}

    def _local(self, parameter: torch.nn.Parameter) -> Tensor:
        if parameter.dtype in _HALF:
            wide = self._wide.get(parameter)
            return torch.zeros_like(parameter, dtype=torch.float32) if wide is None else wide
        return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
