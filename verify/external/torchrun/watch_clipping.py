"""Watch by which norms and limits torch's functions clip gradients, which nothing shows where gradients are small."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel

from verify.external.observe_rank_run import whole_scalar
from verify.external.parameter_mapping import local_value
from verify.external.torchrun.watched_script_record import Clipped


class ClippingWatch:
    """Watches one process: `clipping` while such a function runs. `own`: its own gradients, from before an average."""

    def __init__(self, own: Callable[[], Iterable[Tensor | None]] = tuple) -> None:
        self._own = own
        self._depth = 0
        self._norms: list[Tensor] = []
        self._clipped: list[Clipped] = []

    @property
    def clipping(self) -> bool:
        """Return whether torch clips gradients at this moment."""
        return self._depth > 0

    def taken(self) -> tuple[Tensor | None, tuple[Clipped, ...]]:
        """Return the norm of all gradients that were clipped since the last time, and each call."""
        norm = torch.stack(self._norms).norm() if self._norms else None
        clipped, self._norms, self._clipped = tuple(self._clipped), [], []
        return norm, clipped

    def changes(self) -> list[tuple[Any, str, Any]]:
        """Return what stands for torch's functions."""
        by_norm, by_value = nn.utils.clip_grads_with_norm_, nn.utils.clip_grad_value_
        sharded = FullyShardedDataParallel.clip_grad_norm_
        owners, by_itself = (nn.utils, nn.utils.clip_grad), self._noting(nn.utils.clip_grad_norm_, _returned)
        return [
            *((owner, "clip_grad_norm_", by_itself) for owner in owners),
            *((owner, "clip_grads_with_norm_", self._noting(by_norm, _given)) for owner in owners),
            *((owner, "clip_grad_value_", self._noting_largest(by_value)) for owner in owners),
            (FullyShardedDataParallel, "clip_grad_norm_", self._noting(sharded, _returned)),
        ]

    def _noting(self, function: Callable[..., Any], norm_of: Callable[..., Any]) -> Callable[..., Any]:
        def clipped(*args: Any, **named: Any) -> Any:
            before = len(self._norms)
            with self._inside():
                made = function(*args, **named)
            norm = norm_of(made, *args, **named)
            if len(self._norms) == before and isinstance(norm, Tensor) and norm.numel() == 1:
                self._norms.append(whole_scalar(norm).double())  # else a function that it calls has noted it
                self._note("norm", self._norms[-1], args[1] if len(args) > 1 else named.get("max_norm"))
            return made

        return clipped

    def _noting_largest(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def clipped(parameters: Any, clip_value: Any, *args: Any, **named: Any) -> Any:
            parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
            with self._inside():
                self._note("value", _largest(parameters), clip_value)
                return function(parameters, clip_value, *args, **named)

        return clipped

    @contextmanager
    def _inside(self) -> Iterator[None]:
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def _note(self, kind: str, size: Tensor, limit: Any) -> None:
        own = [gradient.double().norm() for gradient in self._own() if gradient is not None]
        norm = float(torch.stack(own).norm()) if own else None
        self._clipped.append(Clipped(kind, float(size), float(limit), norm))


def _returned(made: Any, *_: Any, **__: Any) -> Any:
    return made


def _given(*args: Any, total_norm: Any = None, **_: Any) -> Any:
    return args[3] if total_norm is None else total_norm  # after what is returned, parameters and the limit


def _largest(parameters: Iterable[Tensor]) -> Tensor:
    values = [local_value(p.grad).abs().max().double() for p in parameters if p.grad is not None and p.grad.numel()]
    return torch.stack(values).max() if values else torch.zeros(())
