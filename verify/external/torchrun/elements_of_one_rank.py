"""Find the elements that a rank holds among those of the script on one rank: by names, by slices, by values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nnscaler.runtime.tensor_bits import same_values
from verify.external.parameter_mapping import Addresses, Lookup, StateMap, run_of
from verify.external.torchrun.watched_script_record import HeldInScript, ScriptRecord


@dataclass(frozen=True)
class FilledIn:
    """The tensors of optimizers whose gradients the ranks fill in, matched with those of the run on one rank.

    places    by rank and name: addresses of its elements; what is behind them is padding
    unplaced  those that have no place there; if there are any, none is compared
    unread    parameters whose gradient no optimizer of the ranks reads, and that is not compared: what is filled in is
    """

    places: Mapping[tuple[int, str], Addresses] = field(default_factory=dict)
    unplaced: tuple[str, ...] = ()
    unread: frozenset[str] = frozenset()

    @property
    def any(self) -> bool:
        """Return whether there are any."""
        return bool(self.places or self.unplaced)


NONE_FILLED = FilledIn()


def filled_in(records: Sequence[ScriptRecord], one: ScriptRecord) -> FilledIn:
    """Find the elements that ranks fill in, by their values at the start: among those that a run on one rank fills in,
    or among the parameters, where that fills in none."""
    if not any(held.filled for record in records for held in record.held):
        return NONE_FILLED
    own = [held for held in one.held if held.filled]
    space = _space(own or [held for held in one.held if held.kind == "parameter"])
    first = sum(torch.Size(held.whole).numel() for held in one.held if not held.filled) if own else 0
    places: dict[tuple[int, str], Addresses] = {}
    unplaced: dict[str, None] = {}
    covered = torch.zeros(space.size, dtype=torch.bool)
    for record in records:
        for name, found in _places_of(record, one, space):
            if found is None:
                unplaced[name] = None
            else:
                covered[torch.as_tensor(found)] = True
                moved = found + first if isinstance(found, Tensor) else range(found.start + first, found.stop + first)
                places[record.rank, name] = moved
    if own and not bool(covered.all()):
        unplaced |= dict.fromkeys(space.names)
    unread = frozenset.intersection(*(record.steps[-1].unread for record in records))
    return FilledIn({} if unplaced else places, tuple(unplaced), unread if unplaced or own else frozenset())


def _places_of(record: ScriptRecord, one: ScriptRecord, space: StateMap) -> Iterator[tuple[str, Addresses | None]]:
    """Yield the place of each tensor that a rank fills in, or None. What is the same in several places, as zeros are,
    has one where all tensors have the names of those of one rank."""
    lookup = Lookup.of(space, one.start)
    mine, cuts = [held for held in record.held if held.filled], Cuts(record.rank, lookup)
    alike = list(space.names) == [held.name for held in mine]
    for held in mine:
        start = record.start[held.name]
        found: Addresses | None = run_of(start, lookup.start)
        if found is None and alike:
            same = start.shape == space.shapes[held.name] and same_values(start, one.start[held.name])
            found = space.whole(held.name) if same else cuts.addresses(held.name, start)
        yield held.name, found


def _space(every: Sequence[HeldInScript]) -> StateMap:
    starts: dict[str, int] = {}
    shapes: dict[str, torch.Size] = {}
    size = 0
    for held in every:
        for name in (held.name, *held.tied):
            starts[name], shapes[name] = size, torch.Size(held.whole)
        size += torch.Size(held.whole).numel()
    names = tuple(held.name for held in every)
    kinds = {name: held.kind for held in every for name in (held.name, *held.tied)}
    return StateMap(starts, shapes, kinds, size, names)


def space_of(record: ScriptRecord, filled: FilledIn = NONE_FILLED) -> StateMap:
    """Lay out the parameters and buffers of a run on one rank: buffers behind the parameters, and at last copies of
    these whose gradients are filled in, if they are compared."""
    held = [one for one in record.held if filled.places or not one.filled]
    return _space(sorted(held, key=lambda one: (one.filled, one.kind == "buffer")))


class Cuts:
    """Finds the addresses of tensors that one rank has cut out of whole ones by hand.

    A slice of the tensor of the same name is tried first: where several slices have the same values (zeros), it is the
    one of the number that this rank has in other tensors. Else each value is looked up, and must stand in one place.
    """

    def __init__(self, rank: int, lookup: Lookup) -> None:
        self.lookup = lookup
        self._rank = rank
        self._numbers: dict[int, int] = {}  # slices of a tensor -> number of this rank's

    def addresses(self, name: str, start: Tensor) -> Addresses | None:
        """Return the addresses of a tensor; None where they are not known."""
        found = self.slice_of(name, start)
        if found is not None:
            return found
        looked_up, share = self.lookup.by_value(start)
        return looked_up if share == 1.0 and len(torch.unique(looked_up)) == start.numel() else None

    def slice_of(self, name: str, start: Tensor) -> Tensor | None:
        """Return the addresses of a slice of the tensor of this name; None where it is none."""
        space = self.lookup.space
        if name not in space.starts or len(space.shapes[name]) != start.dim():
            return None
        shape, places = space.shapes[name], space.whole(name)
        dims = [dim for dim in range(start.dim()) if shape[dim] != start.shape[dim]]
        if len(dims) != 1 or shape[dims[0]] % start.shape[dims[0]]:
            return None
        numbers = (
            torch.arange(places.start, places.stop).view(shape).chunk(shape[dims[0]] // start.shape[dims[0]], dims[0])
        )
        right = [i for i, part in enumerate(numbers) if torch.equal(self.lookup.start[part].to(start.dtype), start)]
        if not right:
            return None
        count = len(numbers)
        if len(right) == 1:
            self._numbers.setdefault(count, right[0])
        wanted = self._numbers.get(count, self._rank % count)
        return numbers[wanted if wanted in right else right[0]].reshape(-1)
