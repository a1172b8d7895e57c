"""Tell which settings a checkpoint overrides.

torch's optimizers and schedules load their hyper-parameters with their state, so that a setting which was changed has
no effect. The user is told.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from nnscaler.errors import NnscalerError

_MOVED = frozenset({"lr", "momentum", "betas"})  # of a group: what schedules change
_COUNTED = frozenset(
    {"base_lrs", "last_epoch", "best", "cooldown_counter", "num_bad_epochs", "T_cur", "T_i", "lr_lambdas", "verbose"}
)  # of a schedule: where it is, and what the optimizer's groups say


class LoadedSchedule:
    """A schedule that keeps the state which it is given. Raises NnscalerError("other_schedule") for that of another
    kind."""

    def __init__(self, schedule: Any) -> None:
        self._schedule = schedule
        self._made: dict[str, Any] = schedule.state_dict()

    def state_dict(self) -> dict[str, Any]:
        return self._schedule.state_dict()  # type: ignore[no-any-return]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        saved, made = _public(state), _public(self._made)
        if saved.keys() != made.keys():
            mine = type(self._schedule).__name__
            message = f"the checkpoint has the state of another schedule than {mine}, with {', '.join(sorted(saved))}"
            help = "the schedule of the run that saved it; or `weights` from the checkpoint, and another folder"
            raise NnscalerError("other_schedule", message, help=help)
        self._schedule.load_state_dict(state)

    @property
    def overridden(self) -> list[str]:
        """Say which settings the checkpoint has otherwise."""
        found = _public(self._schedule.state_dict())
        return [
            f"{name} stays {found[name]!r}, as in the checkpoint, where [schedule] makes it {value!r}"
            for name, value in _public(self._made).items()
            if found[name] != value
        ]


def _public(state: Mapping[str, Any]) -> dict[str, Any]:
    plain = (bool, int, float, str, type(None))
    kept = {k: v for k, v in state.items() if not k.startswith("_") and k not in _COUNTED}
    return {k: v if isinstance(v, plain) else None for k, v in kept.items()}


@dataclass(frozen=True)
class MadeGroups:
    """The hyper-parameters of an optimizer as settings make them."""

    groups: Sequence[Mapping[str, Any]]

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer) -> MadeGroups:
        """Remember them before a checkpoint is loaded."""
        return cls([{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups])

    def overridden(self, optimizer: torch.optim.Optimizer, scheduled: bool) -> list[str]:
        """Describe what the checkpoint has instead. `scheduled`: a schedule moves the rate."""
        told: dict[str, None] = {}
        for made, group in zip(self.groups, optimizer.param_groups, strict=True):
            for key, value in made.items():
                if not (scheduled and key in _MOVED) and group.get(key, value) != value:
                    name = "lr" if key == "initial_lr" else key
                    told[f"{name} stays {group[key]!r}, as in the checkpoint, where [optimizer] says {value!r}"] = None
        return list(told)
