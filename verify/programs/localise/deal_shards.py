"""The pieces that ranks should hold of a logical tensor, where its layout leaves a choice drawn at random.

A partial sum may lie in any way whose sum is right. One rank with all of it and zeros elsewhere would hide what the
other ranks do wrong, so every rank gets a random part.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Mapping
from hashlib import sha256
from itertools import product
from math import prod

import torch
from torch import Tensor

from nnscaler.layout import Partial, State
from nnscaler.runtime.shards import Coordinates, ravel, shard
from verify.evidence.inputs.draw_values import random_terms


class Dealer:
    """Deals the pieces of a tensor once, for all ranks and micro-batches; the same ones whoever asks first."""

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed
        self._lock = threading.Lock()
        self._dealt: dict[Hashable, dict[int, Tensor]] = {}

    def piece(
        self,
        key: Hashable,
        tensor: Tensor,
        states: Mapping[str, State],
        sizes: Mapping[str, int],
        coordinates: Coordinates,
    ) -> Tensor:
        """Return the piece at `coordinates`, its own memory. Raises ValueError when a size does not divide."""
        with self._lock:
            if key not in self._dealt:
                self._dealt[key] = deal(tensor, states, sizes, self._generator(key))
            return self._dealt[key][ravel(coordinates, sizes)].clone()

    def random_like(self, key: Hashable, tensor: Tensor) -> Tensor:
        """Return a normal tensor of the same shape."""
        return torch.randn(tensor.shape, dtype=torch.float64, generator=self._generator(key))

    def _generator(self, key: Hashable) -> torch.Generator:
        digest = sha256(repr((self._seed, key)).encode()).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


def deal(
    tensor: Tensor, states: Mapping[str, State], sizes: Mapping[str, int], generator: torch.Generator
) -> dict[int, Tensor]:
    """Cut a tensor into pieces: position on `sizes` -> piece."""
    combined = [axis for axis in sizes if isinstance(states.get(axis), Partial)]
    reductions = {state.reduction for axis in combined if isinstance(state := states[axis], Partial)}
    points = list(product(*(range(sizes[axis]) for axis in combined)))
    parts = _parts(tensor, len(points), "max" if "max" in reductions else "sum", generator)
    whole = {axis: state for axis, state in states.items() if axis not in combined}
    found: dict[int, Tensor] = {}
    for point in product(*(range(size) for size in sizes.values())):
        at = dict(zip(sizes, point, strict=True))
        part = parts[points.index(tuple(at[axis] for axis in combined))]
        found[ravel(at, sizes)] = shard(part, whole, sizes, at)
    assert len(found) == prod(sizes.values())
    return found


def _parts(tensor: Tensor, count: int, reduction: str, generator: torch.Generator) -> list[Tensor]:
    """Return `count` tensors whose sum, or maximum, is `tensor`."""
    if count == 1 or tensor.dtype == torch.bool:
        return [tensor] * count
    if reduction == "max":
        owner = torch.randint(count, tensor.shape, generator=generator)
        below = [torch.rand(tensor.shape, dtype=torch.float64, generator=generator) + 0.5 for _ in range(count)]
        return [torch.where(owner == i, tensor, (tensor - below[i]).to(tensor.dtype)) for i in range(count)]
    finite = tensor[torch.isfinite(tensor)] if tensor.numel() else tensor
    scale = float(finite.abs().double().mean()) + 1e-3 * float(finite.abs().max()) if finite.numel() else 1.0
    return random_terms(tensor, count, generator, real=True, scale=scale or 1.0)
