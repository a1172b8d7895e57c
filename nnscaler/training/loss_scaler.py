"""Scale the loss for float16: dynamically, by the rule of torch.amp.GradScaler, and with one decision for all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from nnscaler.errors import NnscalerError
from nnscaler.training.engine import Engine


class LossScaler:
    """Scales the loss of an engine's steps up, and skips the optimizer's step where a gradient overflows.

        scaler = nnscaler.LossScaler(engine)
        loss = engine.step(batch)          # backward starts from the scale; gradients come without it
        engine.clip_grad_norm_(1.0)
        scaler.step(optimizer)             # skipped on every rank where a gradient of any rank is not finite
        scaler.update()

    The rule is torch.amp.GradScaler's: the scale is multiplied by `backoff_factor` after a step with such a gradient,
    and by `growth_factor` after `growth_interval` steps in a row without. The sum over ranks is made before the scale
    is taken out, so that what overflows on one rank is seen by all of them; the largest over all ranks decides.
    """

    def __init__(
        self,
        engine: Engine,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
    ) -> None:
        if not (init_scale > 0 and growth_factor > 1 and 0 < backoff_factor < 1 and growth_interval >= 1):
            given = f"{init_scale}, {growth_factor}, {backoff_factor}, {growth_interval}"
            message = f"a loss scale of (initial, growth, backoff, interval) = ({given})"
            raise NnscalerError("plan_illegal", message, help="as torch.amp.GradScaler takes them: 2**16, 2, 0.5, 2000")
        self._engine = engine
        self.growth_factor, self.backoff_factor, self.growth_interval = growth_factor, backoff_factor, growth_interval
        self._growth = 0
        self._found: bool | None = None
        self.scale = init_scale

    @property
    def scale(self) -> float:
        """The scale of the next step."""
        return self._engine.loss_scale

    @scale.setter
    def scale(self, value: float) -> None:
        self._engine.loss_scale = value

    def found_inf(self) -> bool:
        """Return whether a gradient of any rank is not finite. Every rank calls it, after `engine.step`."""
        if self._found is None:
            (self._found,) = on_any_rank(self._engine, has_nonfinite(self._engine))
        return self._found

    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Make the optimizer's step, unless a gradient of any rank is not finite; return whether it was made."""
        if self.found_inf():
            return False
        optimizer.step()
        return True

    def update(self) -> None:
        """Change the scale after the step, by what was found. Once per step, after the last optimizer."""
        if self.found_inf():
            self.scale, self._growth = self.scale * self.backoff_factor, 0
            self._engine.skip()
        else:
            self._growth += 1
            if self._growth == self.growth_interval:
                grown = self.scale * self.growth_factor
                self.scale, self._growth = grown if grown < float("inf") else self.scale, 0
        self._found = None

    def state_dict(self) -> dict[str, Any]:
        """Return the scale, and the steps since it changed."""
        return {"scale": self.scale, "growth": self._growth}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with a saved scale."""
        self.scale, self._growth = float(state["scale"]), int(state["growth"])


def has_nonfinite(engine: Engine) -> bool:
    """Return whether a gradient on this rank is not finite. A sum shows it, and is many times as fast as a look at each
    element; only one that overflows needs that."""
    found = (p.grad for p in engine.parameters.values() if p.grad is not None)
    gradients = [torch.view_as_real(gradient) if gradient.is_complex() else gradient for gradient in found]
    if not gradients or bool(torch.stack([gradient.sum().float() for gradient in gradients]).isfinite().all()):
        return False
    return any(not bool(torch.isfinite(gradient).all()) for gradient in gradients)


def on_any_rank(engine: Engine, *here: bool) -> tuple[bool, ...]:
    """Return of each statement whether it is true on any rank. Every rank calls it."""
    told = torch.tensor([float(one) for one in here], device=engine.device)
    found = engine.communicator.all_reduce(told, tuple(range(engine.world_size)), "max")
    return tuple(bool(one) for one in found.tolist())
