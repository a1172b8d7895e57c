"""Random numbers that are a function of (seed, operation, step, logical coordinates) and of nothing else.

So ranks that hold the same elements draw the same numbers, ranks that hold different elements differ, a draw does not
depend on the mesh, and recomputing gives the same draw. torch's own generator is one per process, and cannot.

So the eager model can be given the same numbers, and random operations are compared like all others. Where that cannot
be (`dropout=False`), nothing is dropped, and other draws are a function of the logical coordinates alone.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from nnscaler.layout import State
from nnscaler.runtime.shards import logical_coordinates
from nnscaler.runtime.stage_base_class import Stage
from nnscaler.runtime.torch_compile import apart

_WRAP = 1 << 64
_SELU_LIMIT = -1.7580993408473766


def dropout(
    x: Tensor,
    p: float,
    stage: Stage | None = None,
    name: str = "",
    states: Mapping[str, State] | None = None,
    logical_shape: Sequence[int] = (),
    dims: int | None = None,
) -> Tensor:
    """Return `x` with each element zeroed with probability `p` and the others divided by 1 - p.

    `name` is the operation's, `states` the layout of `x` ("micro" included) and `logical_shape` the shape of the whole
    tensor; `dims`: how many leading dims have draws of their own (None: all). Without a stage, or when the executor was
    told so, dropout is the identity.
    """
    if stage is None or not stage.context.dropout or p == 0.0:
        return x.view_as(x)
    if p >= 1.0:
        return x * 0.0
    kept = apart(_noise, stage, name, states, logical_shape, x.device, dims) >= p
    return torch.where(kept, x / (1.0 - p), 0.0)


def feature_dropout(
    x: Tensor,
    p: float,
    stage: Stage | None = None,
    name: str = "",
    states: Mapping[str, State] | None = None,
    logical_shape: Sequence[int] = (),
) -> Tensor:
    """Drop whole channels as `dropout` drops elements: one draw for each index of the first two dims."""
    return dropout(x, p, stage, name, states, logical_shape, dims=2)


def alpha_dropout(
    x: Tensor,
    p: float,
    stage: Stage | None = None,
    name: str = "",
    states: Mapping[str, State] | None = None,
    logical_shape: Sequence[int] = (),
    dims: int | None = None,
) -> Tensor:
    """Set dropped elements to SELU's negative limit, keeping mean and variance; other arguments as `dropout`."""
    if stage is None or not stage.context.dropout or p == 0.0:
        return x.view_as(x)
    if p >= 1.0:
        return x * 0.0
    kept = apart(_noise, stage, name, states, logical_shape, x.device, dims) >= p
    scale = ((1.0 - p) * (1.0 + p * _SELU_LIMIT**2)) ** -0.5
    return torch.where(kept, x, _SELU_LIMIT) * scale - scale * p * _SELU_LIMIT


def feature_alpha_dropout(
    x: Tensor,
    p: float,
    stage: Stage | None = None,
    name: str = "",
    states: Mapping[str, State] | None = None,
    logical_shape: Sequence[int] = (),
) -> Tensor:
    """Drop whole channels as `alpha_dropout` drops elements: one draw for each index of the first two dims."""
    return alpha_dropout(x, p, stage, name, states, logical_shape, dims=2)


def random_uniform(
    size: Sequence[int],
    dtype: torch.dtype,
    stage: Stage | None = None,
    name: str = "",
    states: Mapping[str, State] | None = None,
    logical_shape: Sequence[int] | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """Draw numbers in (0, 1), this rank's `size` of the `logical_shape`; other arguments as `dropout`.

    Without a stage, or when the executor was told so, they depend on their place alone.
    """
    shape = tuple(size if logical_shape is None else logical_shape)
    where: torch.device | str = device or (stage.device if stage is not None else "cpu")
    return (apart(_noise, stage, name, states, shape, where) + 2.0**-54).to(dtype)


def random_normal(
    size: Sequence[int],
    dtype: torch.dtype,
    stage: Stage | None = None,
    name: str = "",
    states: Mapping[str, State] | None = None,
    logical_shape: Sequence[int] | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """Draw as `random_uniform`, with mean 0 and variance 1."""
    return normal_of(random_uniform(size, torch.float64, stage, name, states, logical_shape, device)).to(dtype)


def normal_of(draw: Tensor) -> Tensor:
    """Turn uniform numbers in (0, 1) into normal ones, by the inverse of the distribution function."""
    return torch.erfinv(2.0 * draw - 1.0) * 2.0**0.5


def _noise(
    stage: Stage | None,
    name: str,
    states: Mapping[str, State] | None,
    logical_shape: Sequence[int],
    device: torch.device | str,
    dims: int | None = None,
) -> Tensor:
    """Draw float64 numbers in [0, 1) for this rank's elements.

    `dims`: as many leading dims differ, the others share.
    """
    shape = tuple(logical_shape)
    sizes, place = (stage.sizes(), stage.coordinates()) if stage is not None else ({}, {})
    coordinates = logical_coordinates(shape, states or {}, sizes, place, device)
    if dims is not None:
        coordinates = [c if i < dims else c[:1] * 0 for i, c in enumerate(coordinates)]
    if stage is None or not stage.context.dropout:
        return uniform(0, "", 0, coordinates, shape)
    return uniform(stage.context.seed, name, stage.context.passes, coordinates, shape)


def uniform(seed: int, name: str, step: int, coordinates: Sequence[Tensor], logical_shape: Sequence[int]) -> Tensor:
    """Compute float64 numbers in [0, 1), one for each combination of the `coordinates` given per dim."""
    position = torch.zeros((), dtype=torch.int64, device=coordinates[0].device if coordinates else None)
    for along, size in zip(coordinates, logical_shape, strict=True):
        position = position.unsqueeze(-1) * size + along
    bits = _mix(position + _signed(_key(seed, name, step)))
    return ((bits >> 11) & ((1 << 53) - 1)).to(torch.float64) * 2.0**-53


def logical_uniform(
    seed: int,
    name: str,
    step: int,
    logical_shape: Sequence[int],
    dims: int | None = None,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Draw the numbers in [0, 1) that all ranks together draw for one operation.

    They are of `logical_shape`, or with `dims` of that many leading dims, the others of size 1.
    """
    sizes = [size if dims is None or dim < dims else 1 for dim, size in enumerate(logical_shape)]
    return uniform(seed, name, step, [torch.arange(size, device=device) for size in sizes], logical_shape)


def _key(seed: int, name: str, step: int) -> int:
    key = 0
    for part in (seed, zlib.crc32(name.encode()), step):
        key = _mix_integer((key + part + 0x9E3779B97F4A7C15) % _WRAP)
    return key


def _mix_integer(z: int) -> int:
    """Mix the bits of a number of 64 bits: the finaliser of splitmix64 (Steele et al. 2014)."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % _WRAP
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % _WRAP
    return z ^ (z >> 31)


def _mix(z: Tensor) -> Tensor:
    """Mix as `_mix_integer`, on int64 tensors, whose products wrap and whose shifts have to be made logical."""
    z = z * _signed(0x9E3779B97F4A7C15)
    z = (z ^ _shift(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shift(z, 27)) * _signed(0x94D049BB133111EB)
    return z ^ _shift(z, 31)


def _shift(z: Tensor, by: int) -> Tensor:
    return (z >> by) & ((1 << (64 - by)) - 1)


def _signed(value: int) -> int:
    return value - _WRAP if value >= _WRAP >> 1 else value
