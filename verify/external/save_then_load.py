"""Save the program's state after some steps, and load it elsewhere: what is loaded must be what the ranks held.

What each rank holds before it saves is known element by element (`parameter_mapping.py`), and so is what the same
program on another mesh must hold. So nothing here depends on whether training was right: only saving and loading are
looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nnscaler.runtime.tensor_bits_and_differences import FILL, as_real, difference, family_scale
from verify.external.observe_rank_run import (
    modules_of,
    optimizers_of,
    parallelised,
    rows_of,
    run_step,
    tensors_of_program,
)
from verify.external.parameter_mapping import (
    Addresses,
    Lookup,
    RankPiece,
    StateMap,
    local_value,
    match,
    summed,
    taken,
)
from verify.external.program import ExternalProgram
from verify.external.reference import PlainReference


@dataclass(frozen=True)
class CheckpointForm:
    """One way to save a program, and to load it.

    name        of the check
    can_save    say of what `parallelize` returned whether it can be saved so
    save        write it into a folder; called on every rank
    load_plain  return the tensors of a folder by their names in the plain model, given the program and that model
    load        return the program on this rank as the folder says, given the program on its mesh with other values
    cut_by_hand what a rank cuts from a tensor without DTensor can be saved as well
    lossy       return how far each tensor of the plain model is from itself after the plain model alone was saved and
                loaded, given the model and a folder
    """

    name: str
    can_save: Callable[[Any], bool]
    save: Callable[[ExternalProgram, Any, Path], None]
    load_plain: Callable[[ExternalProgram, nn.Module, StateMap, Path], Mapping[str, Tensor]]
    load: Callable[[ExternalProgram, Any, nn.Module, Path], Any]
    cut_by_hand: bool = False
    lossy: Callable[[nn.Module, Path], Mapping[str, float]] = lambda model, folder: {}


@dataclass(frozen=True)
class SavedShard:
    """A tensor of a rank at the moment when it was saved: its elements' addresses in the plain model, and values."""

    addresses: Addresses
    value: Tensor


@dataclass(frozen=True)
class HeldValues:
    """The values that ranks held when they saved, over all addresses.

    Copies that differ span from `low` to `high`, and any of them may have been saved.
    Infinite, and low above high, where nobody held anything.
    """

    low: Tensor  # [addresses] float64
    high: Tensor  # [addresses] float64

    def distance(self, value: Tensor, addresses: Addresses) -> float:
        """Return how far values are from what was held, where it is known, relative to the largest value held."""
        low, high, value = taken(self.low, addresses), taken(self.high, addresses), value.reshape(-1).double()
        known = low <= high
        right = value[known].clamp(low[known], high[known])
        return difference(value[known], right, family_scale([self.low], FILL)).relative


@dataclass(frozen=True)
class LoadedTensor:
    """One tensor that was loaded, compared with what the ranks held when they saved.

    how       "the plain model", or the mesh it was loaded under
    name      in the plain model
    rank      that loaded it; -1: none of them
    relative  difference; infinite where the checkpoint lacks it, or has another shape
    """

    how: str
    name: str
    rank: int
    relative: float


def other_mesh(program: ExternalProgram) -> ExternalProgram | None:
    """Return the program on another mesh: what it says itself, or sizes in the other order, or half as many ranks.

    None where it has no other mesh.
    """
    if program.elsewhere is not None:
        return program.elsewhere()
    axes, sizes = zip(*program.mesh, strict=True)
    turned = tuple(zip(axes, reversed(sizes), strict=True))
    if turned != program.mesh:
        return replace(program, mesh=turned)
    half = max(1, sizes[0] // 2)
    return replace(program, mesh=((axes[0], half), *program.mesh[1:]))


def save_after_steps(
    form: CheckpointForm,
    program: ExternalProgram,
    model: nn.Module,
    reference: PlainReference,
    lookup: Lookup,
    rank: int,
    folder: Path,
) -> tuple[SavedShard, ...] | None:
    """Train on this rank, save, and return what it held; None, and nothing is saved, where it cannot be saved so."""
    with parallelised(program, model, reference.dtype) as made:
        if not form.can_save(made):
            return None
        pieces = match(list(tensors_of_program(made, program)), lookup, program.names)
        optimizers = optimizers_of(program, made, reference.learning_rate)
        for number in range(len(reference.steps)):
            for optimizer in optimizers:
                optimizer.zero_grad()
            run_step(program, made, rows_of(program, reference, rank, number), number)
            for optimizer in optimizers:
                optimizer.step()
        values = {name: local_value(summed(tensor)).clone() for name, tensor, _ in tensors_of_program(made, program)}
        form.save(program, made, folder)
    return tuple(
        SavedShard(piece.addresses, values[piece.local])
        for piece in pieces
        if piece.addresses is not None and piece.local in values and piece.shape == tuple(values[piece.local].shape)
    )


def held_values(space: StateMap, ranks: Sequence[Sequence[SavedShard]]) -> HeldValues:
    """Return what the ranks held, over all addresses."""
    low, high = torch.full((2, space.size), torch.inf, dtype=torch.float64)
    for shard in (shard for shards in ranks for shard in shards):
        where = shard.addresses
        at = slice(where.start, where.stop) if isinstance(where, range) else where
        value = shard.value.reshape(-1).to(low.dtype)
        low[at] = torch.minimum(low[at], value)
        high[at] = torch.minimum(high[at], -value)
    return HeldValues(low, -high)


def load_on_rank(
    form: CheckpointForm,
    program: ExternalProgram,
    model: nn.Module,
    reference: PlainReference,
    lookup: Lookup,
    held: HeldValues,
    folder: Path,
) -> tuple[LoadedTensor, ...]:
    """Load the checkpoint into the program on this mesh, and compare what this rank then holds, tensor by tensor.

    Where each element belongs is known from the program made of the plain model. Its values are moved before it loads,
    so that what is not loaded is seen.
    """
    rank = torch.distributed.get_rank()
    how = "the mesh " + " ".join(f"{axis}={size}" for axis, size in program.mesh)
    with parallelised(program, model, reference.dtype) as made:
        pieces = match(list(tensors_of_program(made, program)), lookup, program.names)
        with torch.no_grad():
            for _, tensor, _ in tensors_of_program(made, program):
                if tensor.is_floating_point():
                    local_value(tensor).add_(1)
        loaded = form.load(program, made, model, folder)
        values = {name: local_value(summed(tensor)) for name, tensor, _ in tensors_of_program(loaded, program)}
        stored = _stored(loaded, values)
    compared = [p for p in pieces if p.local in stored and _is_comparable(p, reference.space, form.cut_by_hand)]
    return tuple(LoadedTensor(how, p.name, rank, _distance(p, values.get(p.local), held)) for p in compared)


def _stored(made: Any, names: Mapping[str, Tensor]) -> set[str]:
    """Return the names of parameters and buffers that a program stores: other buffers are made anew."""
    modules = modules_of(made)
    if len(modules) > 1:  # the names of several modules have numbers, and only their parameters are surely stored
        return {
            f"{name} of module {number}" for number, m in enumerate(modules) for name, _ in m.named_parameters()
        } & set(names)
    return set(modules[0].state_dict()) & set(names)


def _is_comparable(piece: RankPiece, space: StateMap, cut_by_hand: bool) -> bool:
    if piece.addresses is None or not piece.names:
        return False
    is_whole = len(piece.names) == 1 and piece.addresses == space.whole(piece.names[0])
    return cut_by_hand or piece.layout != "plain" or (isinstance(piece.addresses, range) and is_whole)


def _distance(piece: RankPiece, value: Tensor | None, held: HeldValues) -> float:
    if value is None or tuple(value.shape) != piece.shape:
        return float("inf")
    assert piece.addresses is not None
    return held.distance(value, piece.addresses)


def compare_plain(
    form: CheckpointForm, program: ExternalProgram, model: nn.Module, space: StateMap, held: HeldValues, folder: Path
) -> tuple[LoadedTensor, ...]:
    """Load the checkpoint as the plain model, in this process alone, and compare it by each name."""
    return tuple(_compared(space, held, form.load_plain(program, model, space, folder)))


def _compared(space: StateMap, held: HeldValues, found: Mapping[str, Tensor]) -> Iterator[LoadedTensor]:
    for name in space.names:
        if space.kinds[name] == "parameter" and not set(space.tied.get(name, (name,))) & set(found):
            yield LoadedTensor("the plain model", name, -1, float("inf"))
    for name, value in sorted(found.items()):
        if name not in space.shapes:
            continue
        whole, real = space.whole(name), as_real(value)
        is_shaped = real.shape == space.shapes[name]
        gap = held.distance(real, whole) if is_shaped else float("inf")
        yield LoadedTensor("the plain model", name, -1, gap)
