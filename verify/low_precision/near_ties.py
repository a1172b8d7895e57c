"""Choices among near-equal values: a router's best experts, the first of a sort, the place of a maximum.

Where two values differ by less than rounding, right programs choose differently, and what follows differs by far more
than rounding. Such a flip is rare by itself: one token among hundreds has two experts so near. A program may meet one
that none of a few runs of the model meets. The mode below makes them frequent: values that a choice compares are moved
by up to a unit in the last place, each relative to itself, and what is chosen keeps its own value. A choice that is
clear stays as it is, and so does one among zeros or infinities.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
LOW = frozenset((torch.bfloat16, torch.float16, torch.float32))
UNITS = 1.0  # in the last place, at most: about what the roundings of the values themselves are


class NearTies(TorchDispatchMode):
    """While open, every choice is made among values that are moved."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._generator = generator

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        dim = _CHOICES.get(func)
        x = args[0] if args else None
        with torch._C.DisableTorchFunction():  # see `Reassociated`
            if dim is None or not isinstance(x, Tensor) or not x.dim() or x.dtype not in LOW or x.device.type == "meta":
                return func(*args, **(kwargs or {}))
            found = func(self._moved(x), *args[1:], **(kwargs or {}))
            return found if isinstance(found, Tensor) else _unmoved(x, found[1], _dim(dim, args, kwargs or {}))

    def _moved(self, x: Tensor) -> Tensor:
        """In float64, where a part of a unit counts."""
        share = torch.rand(x.shape, generator=self._generator, dtype=torch.float64).to(x.device) * 2 - 1
        return x.double() * (1 + UNITS * torch.finfo(x.dtype).eps * share)


def _dim(position: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    return int(args[position] if len(args) > position else kwargs.get("dim", -1))


def _unmoved(x: Tensor, indices: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """The values that `x` itself has at the indices, of which a maximum may have dropped the dim."""
    kept = indices if indices.dim() == x.dim() else indices.unsqueeze(dim)
    return x.gather(dim, kept).view(indices.shape), indices


# operator -> the position of its `dim`, of which the default is the last
_CHOICES: Mapping[Any, int] = MappingProxyType(
    {
        aten.topk.default: 2,
        aten.sort.default: 1,
        aten.sort.stable: 2,
        aten.max.dim: 1,
        aten.min.dim: 1,
        aten.argmax.default: 1,
        aten.argmin.default: 1,
    }
)
