"""Dropout whose mask is a function of (seed, operation, step, logical coordinates) and of nothing else.

So ranks that hold the same elements drop the same ones, ranks that hold different elements differ, a mask does not
depend on the mesh, and recomputing gives the same mask. torch's own CPU generator is one per process, and cannot.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from nnscaler.runtime.layout import State
from nnscaler.runtime.role import Stage
from nnscaler.runtime.shards import logical_coordinates

_WRAP = 1 << 64


def dropout(
    x: Tensor,
    p: float,
    stage: Stage | None = None,
    name: str = "",
    states: Mapping[str, State] | None = None,
    logical_shape: Sequence[int] = (),
) -> Tensor:
    """`x` with each element zeroed with probability `p` and the others divided by 1 - p.

    `name` is the operation's, `states` the layout of `x` ("micro" included) and `logical_shape` the shape of the whole
    tensor. Without a stage, or when the executor was told so, dropout is the identity.
    """
    if stage is None or not stage.context.dropout or p == 0.0:
        return x.view_as(x)
    if p >= 1.0:
        return x * 0.0
    coordinates = logical_coordinates(tuple(logical_shape), states or {}, stage.sizes(), stage.coordinates(), x.device)
    noise = uniform(stage.context.seed, name, stage.context.step, coordinates, tuple(logical_shape))
    return torch.where(noise >= p, x / (1.0 - p), 0.0)


def uniform(seed: int, name: str, step: int, coordinates: Sequence[Tensor], logical_shape: Sequence[int]) -> Tensor:
    """Float64 numbers in [0, 1), one for each combination of the `coordinates` given per dim."""
    position = torch.zeros((), dtype=torch.int64, device=coordinates[0].device if coordinates else None)
    for along, size in zip(coordinates, logical_shape, strict=True):
        position = position.unsqueeze(-1) * size + along
    bits = _mix(position + _signed(_key(seed, name, step)))
    return ((bits >> 11) & ((1 << 53) - 1)).to(torch.float64) * 2.0**-53


def _key(seed: int, name: str, step: int) -> int:
    key = 0
    for part in (seed, zlib.crc32(name.encode()), step):
        key = _mix_integer((key + part + 0x9E3779B97F4A7C15) % _WRAP)
    return key


def _mix_integer(z: int) -> int:
    """The finaliser of splitmix64."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % _WRAP
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % _WRAP
    return z ^ (z >> 31)


def _mix(z: Tensor) -> Tensor:
    """`_mix_integer` on int64 tensors, whose products wrap and whose shifts have to be made logical."""
    z = z * _signed(0x9E3779B97F4A7C15)
    z = (z ^ _shift(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shift(z, 27)) * _signed(0x94D049BB133111EB)
    return z ^ _shift(z, 31)


def _shift(z: Tensor, by: int) -> Tensor:
    return (z >> by) & ((1 << (64 - by)) - 1)


def _signed(value: int) -> int:
    return value - _WRAP if value >= _WRAP >> 1 else value
