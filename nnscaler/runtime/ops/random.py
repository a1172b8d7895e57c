"""Random operators, whose numbers are a function of (seed, operation, step, logical coordinates) and of nothing else.

So ranks that hold the same elements draw the same numbers, ranks that hold different elements differ, a draw does not
depend on the mesh, and recomputing gives the same draw. torch's own generator is one per process, and cannot.

So the eager model can be given the same numbers, and random operations are compared like all others. Where that cannot
be (`dropout=False`), nothing is dropped, and other draws are a function of the logical coordinates alone.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from math import prod
from typing import cast

import torch
from torch import Tensor

from nnscaler.layout import Prefix, Sharded, State, parse_state
from nnscaler.runtime.shards import logical_coordinates
from nnscaler.runtime.stage_base_class import Stage, numbered_stages

_WRAP = 1 << 64
_SELU_LIMIT = -1.7580993408473766
COLUMNS = 64  # elements that share the mixing of their row, at least
_ODD = 0x846CA68B - (1 << 32)  # the last factor of lowbias32 (Wellons, Hash Prospector, 2018), as an int32


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
    # two products take half the time of torch.where, forward and backward, and what is dropped of infinity is NaN, as
    # torch's is
    return x * (1.0 / (1.0 - p)) * _drawn(x, p, stage, name, states, logical_shape, dims)


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
    kept = _drawn(x, p, stage, name, states, logical_shape, dims)
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
    if torch.compiler.is_dynamo_compiling() and stage is not None:
        noise = torch.ops.nnscaler.noise(_at(stage), name, _spelled(states), list(shape), list(size), where)
    else:
        noise = _noise(stage, name, states, shape, where)
    return (noise + 2.0**-54).to(dtype)


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


def _drawn(
    x: Tensor,
    p: float,
    stage: Stage,
    name: str,
    states: Mapping[str, State] | None,
    logical_shape: Sequence[int],
    dims: int | None,
) -> Tensor:
    """Draw what is kept of `x`, here or in the graph that torch.compile makes."""
    if not torch.compiler.is_dynamo_compiling():
        return _kept(p, stage, name, states, logical_shape, x.device, dims)
    shape = list(logical_shape)
    return cast(Tensor, torch.ops.nnscaler.kept(p, _at(stage), name, _spelled(states), shape, dims, x.device))


def _noise(
    stage: Stage | None,
    name: str,
    states: Mapping[str, State] | None,
    logical_shape: Sequence[int],
    device: torch.device | str,
) -> Tensor:
    """Draw float64 numbers in [0, 1) for this rank's elements."""
    coordinates = _coordinates(stage, states, logical_shape, device)
    if stage is None or not stage.context.dropout:
        return uniform(0, "", 0, coordinates, logical_shape)
    return uniform(stage.context.seed, name, stage.context.passes, coordinates, logical_shape)


def _kept(
    p: float,
    stage: Stage,
    name: str,
    states: Mapping[str, State] | None,
    logical_shape: Sequence[int],
    device: torch.device | str,
    dims: int | None = None,
) -> Tensor:
    """Draw whether this rank's elements are kept. `dims`: as many leading dims differ, the others share."""
    coordinates = _coordinates(stage, states, logical_shape, device, dims)
    return kept(p, stage.context.seed, name, stage.context.passes, coordinates, logical_shape)


# Draws as operators of torch, which torch.compile takes into its graphs: a graph that ended before each of them would
# be one for every dropout. What they draw by, the batch and the place in it, they find in the stage when they run; but
# for the piece of a region, which is a number of the graph. `at`: the number of the stage, and those of the pieces.


@torch.library.custom_op("nnscaler::kept", mutates_args=())
def _kept_in_graph(
    p: float, at: list[int], name: str, states: str, logical_shape: list[int], dims: int | None, device: torch.device
) -> Tensor:
    with _stage_at(at) as stage:
        return _kept(p, stage, name, _read(states), logical_shape, device, dims)


@_kept_in_graph.register_fake
def _(
    _: float, at: list[int], __: str, states: str, shape: list[int], dims: int | None, device: torch.device
) -> Tensor:
    with _stage_at(at) as stage:
        coordinates = _coordinates(stage, _read(states), shape, device, dims)
    return torch.empty([len(along) for along in coordinates], dtype=torch.bool, device=device)


@torch.library.custom_op("nnscaler::noise", mutates_args=())
def _noise_in_graph(
    at: list[int], name: str, states: str, logical_shape: list[int], _size: list[int], device: torch.device
) -> Tensor:
    with _stage_at(at) as stage:
        return _noise(stage, name, _read(states), logical_shape, device)


@_noise_in_graph.register_fake
def _(_: list[int], __: str, ___: str, ____: list[int], size: list[int], device: torch.device) -> Tensor:
    return torch.empty(size, dtype=torch.float64, device=device)


def _at(stage: Stage) -> list[int]:
    assert stage.graph_number is not None, "a stage that is compiled has one"
    return [stage.graph_number, *(getattr(stage, axis).index for axis in stage.time_axes)]


@contextmanager
def _stage_at(at: list[int]) -> Iterator[Stage]:
    """Open a stage at its pieces."""
    number, *pieces = at
    stage = numbered_stages[number]
    with ExitStack() as stack:
        for axis, index in zip(stage.time_axes, pieces, strict=True):
            stack.enter_context(stage.at_piece(axis, index))
        yield stage


def _spelled(states: Mapping[str, State] | None) -> str:
    """Return what cuts a tensor, as an operator in a graph can be given it: `dp Sharded(0); tp Sharded(1)`."""
    pairs = [] if states is None else states.items()
    return "; ".join([axis + " " + repr(state) for axis, state in pairs if isinstance(state, (Sharded, Prefix))])


@lru_cache(maxsize=4096)
def _read(spelled: str) -> Mapping[str, State]:
    pairs = [pair.split(" ", 1) for pair in spelled.split("; ") if pair]
    return {axis: parse_state(state) for axis, state in pairs}


def _coordinates(
    stage: Stage | None,
    states: Mapping[str, State] | None,
    logical_shape: Sequence[int],
    device: torch.device | str,
    dims: int | None = None,
) -> list[Tensor]:
    """Return, for each dim, the logical indices that this rank holds: from `dims` on the first one for all."""
    sizes, place = (stage.sizes(), stage.coordinates()) if stage is not None else ({}, {})
    held = logical_coordinates(tuple(logical_shape), states or {}, sizes, place, device)
    return [c if dims is None or i < dims else c[:1] * 0 for i, c in enumerate(held)]


def uniform(seed: int, name: str, step: int, coordinates: Sequence[Tensor], logical_shape: Sequence[int]) -> Tensor:
    """Compute float64 numbers in [0, 1), one for each combination of the `coordinates` given per dim."""
    bits = _mix(_positions(coordinates, logical_shape) + _signed(_key(seed, name, step)))
    return ((bits >> 11) & ((1 << 53) - 1)).to(torch.float64) * 2.0**-53


def logical_uniform(
    seed: int, name: str, step: int, logical_shape: Sequence[int], device: torch.device | str = "cpu"
) -> Tensor:
    """Draw the numbers in [0, 1) that all ranks together draw for one operation, of `logical_shape`."""
    where = [torch.arange(size, device=device) for size in logical_shape]
    return uniform(seed, name, step, where, logical_shape)


def kept(
    p: float, seed: int, name: str, step: int, coordinates: Sequence[Tensor], logical_shape: Sequence[int]
) -> Tensor:
    """Compute which elements are kept, each with probability 1 - p to 2 ** -32: one bool for each combination of the
    `coordinates` given per dim.

    Activations are large, and 64 bits of an element cost more than what is done with it. So splitmix64 mixes rows, and
    columns (the last dims, of `COLUMNS` together or more); an element's 32 bits are those of its row and its column,
    multiplied by a number of its row, mixed (a multiply-xorshift, as in the finaliser of MurmurHash3) and combined with
    its row's once more, so that the bits of four elements of two rows and two columns do not follow from each other.
    """
    cut = len(logical_shape)
    while cut and prod(logical_shape[cut:]) < COLUMNS:
        cut -= 1
    rows = _mix(_positions(coordinates[:cut], logical_shape[:cut]) + _signed(_key(seed, name, step)))
    columns = _mix(_positions(coordinates[cut:], logical_shape[cut:]))
    rows = rows.reshape(rows.shape + (1,) * columns.dim()).to(columns.device)
    added, factor = rows.to(torch.int32), (rows >> 32).to(torch.int32) | 1  # [rows..., 1...]
    bits = (columns.to(torch.int32) + added).mul_(factor)  # [rows..., columns...]
    bits.bitwise_xor_((bits >> 15).bitwise_and_((1 << 17) - 1)).mul_(_ODD).bitwise_xor_(added)
    return bits >= min(round(p * (1 << 32)), (1 << 32) - 1) - (1 << 31)


def logical_kept(
    p: float,
    seed: int,
    name: str,
    step: int,
    logical_shape: Sequence[int],
    dims: int | None = None,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Draw what all ranks together keep in one operation: of `logical_shape`, or with `dims` of that many leading
    dims, the others of size 1."""
    sizes = [size if dims is None or dim < dims else 1 for dim, size in enumerate(logical_shape)]
    return kept(p, seed, name, step, [torch.arange(size, device=device) for size in sizes], logical_shape)


def _positions(coordinates: Sequence[Tensor], logical_shape: Sequence[int]) -> Tensor:
    """Return the row-major int64 positions of all combinations of the coordinates."""
    position = torch.zeros((), dtype=torch.int64, device=coordinates[0].device if coordinates else None)
    for along, size in zip(coordinates, logical_shape, strict=True):
        position = position.unsqueeze(-1) * size + along
    return position


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
