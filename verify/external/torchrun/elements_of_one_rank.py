"""Find the elements that a rank holds among those of the script on one rank: by names, by slices, by values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nnscaler.runtime.tensor_bits_and_differences import same_values
from verify.external.parameter_mapping import Addresses, Lookup, StateMap, addresses_as_tensor, taken
from verify.external.torchrun.watched_script_record import HeldInScript, ScriptRecord


@dataclass(frozen=True)
class FilledIn:
    """The tensors of optimizers whose gradients the ranks fill in, matched with those of the run on one rank.

    places    by rank and name: addresses of its elements; what is behind them is padding
    unplaced  those of which some elements have no place there: what they get is not compared
    replaced  parameters whose gradient no optimizer of the ranks reads, and that is not compared: their copies' is, as
              far as these have places
    unheld    those of the run on one rank of which ranks have not all elements: they are left out
    """

    places: Mapping[tuple[int, str], Addresses] = field(default_factory=dict)
    unplaced: tuple[str, ...] = ()
    replaced: frozenset[str] = frozenset()
    unheld: frozenset[str] = frozenset()

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
    lookup = Lookup.of(space, one.start)
    runs, cut_short = _settled(
        {
            (record.rank, held.name): lookup.runs(record.start[held.name])
            for record in records
            for held in record.held
            if held.filled and record.start[held.name].numel()
        },
        space.size,
    )
    unplaced = dict.fromkeys(name for _, name in cut_short)
    places: dict[tuple[int, str], Addresses] = {}
    for record in records:
        for name, found in _places_of(record, lookup, runs).items():
            if found is None:
                unplaced[name] = None
            else:
                places[record.rank, name] = found
    unheld = _uncovered(places.values(), space) if own else ()
    if own:
        first = sum(torch.Size(held.whole).numel() for held in one.held if not held.filled)
        places = _without(unheld, places, space, first)
        unplaced |= dict.fromkeys(unheld)
    unread = frozenset.intersection(*(record.steps[-1].unread for record in records))
    return FilledIn(places, tuple(unplaced), unread if unplaced or own else frozenset(), frozenset(unheld))


Runs = Mapping[tuple[int, str], range | None]


def _settled(ways: Mapping[tuple[int, str], Sequence[range]], size: int) -> tuple[Runs, tuple[tuple[int, str], ...]]:
    """Choose the run of each tensor, and return which are cut short: zeros behind them are padding, or elements.

    They are elements where another tensor goes on from there, or none is left, and no other has them: the shards of one
    flat tensor. Where a tensor is nowhere, as zeros are, it may be the one that has them.
    """
    held = torch.zeros(size, dtype=torch.bool)
    for runs in ways.values():
        for run in runs[:1]:
            held[run.start : run.stop] = True
    begins = {run.start for runs in ways.values() for run in runs} | {size}
    found: dict[tuple[int, str], range | None] = {}
    cut_short = []
    for key, runs in ways.items():
        fitting = [r for r in runs if r.stop in begins and not bool(held[runs[0].stop : r.stop].any())]
        if len(runs) > 1 and (len(fitting) != 1 or not all(ways.values())):
            fitting = [runs[0]]
            cut_short.append(key)
        found[key] = runs[0] if len(runs) == 1 else next(iter(fitting), None)
    return found, tuple(cut_short)


def _uncovered(places: Iterable[Addresses], space: StateMap) -> tuple[str, ...]:
    """Return the tensors of which nobody has all elements."""
    covered = torch.zeros(space.size, dtype=torch.bool)
    for found in places:
        covered[addresses_as_tensor(found)] = True
    return tuple(name for name in space.names if not bool(taken(covered, space.whole(name)).all()))


def _without(
    unheld: Sequence[str], places: Mapping[tuple[int, str], Addresses], space: StateMap, first: int
) -> dict[tuple[int, str], Addresses]:
    """Return the places of what has no elements of these tensors, where the others lie from address `first` on."""
    moved, found, end = torch.zeros(space.size, dtype=torch.long), dict[tuple[int, str], Addresses](), first
    for name in space.names:
        whole = space.whole(name)
        moved[whole.start : whole.stop] = end - whole.start
        end += 0 if name in unheld else len(whole)
    for key, place in places.items():
        if set(unheld).isdisjoint(space.names_at(place)):
            by = int(moved[place[0]])  # no tensor is left out in the middle of a run
            found[key] = place + moved[place] if isinstance(place, Tensor) else range(place.start + by, place.stop + by)
    return found


def _places_of(record: ScriptRecord, lookup: Lookup, runs: Runs) -> dict[str, Addresses | None]:
    """Return the place of each tensor that a rank fills in, or None. What is the same in several places, as zeros are,
    has one where all tensors have the names of those of one rank, or where its neighbours leave it one."""
    space = lookup.space
    mine, cuts = [held for held in record.held if (record.rank, held.name) in runs], Cuts(record.rank, lookup)
    alike = list(space.names) == [held.name for held in record.held if held.filled]
    places: dict[str, Addresses | None] = {}
    for held in mine:
        start = record.start[held.name]
        found: Addresses | None = runs[record.rank, held.name]
        if found is None and alike:
            whole = space.whole(held.name)
            found = whole if _stands(start, held.name, lookup) else cuts.addresses(held.name, start)
        places[held.name] = found
    return _among_neighbours(places, record.start, lookup)


def _stands(start: Tensor, name: str, lookup: Lookup) -> bool:
    """Return whether these are the values of a whole tensor, or of that tensor laid flat."""
    shape, values = lookup.space.shapes[name], taken(lookup.start, lookup.space.whole(name))
    fits = start.shape == shape or (start.dim() == 1 and start.numel() == shape.numel())
    return fits and same_values(start.reshape(-1).double(), values)


def _among_neighbours(
    found: dict[str, Addresses | None], start: Mapping[str, Tensor], lookup: Lookup
) -> dict[str, Addresses | None]:
    """Place whole tensors whose values stand in several places: a bias of zeros between two weights, in the order of
    the optimizer, is the one tensor there that has these values. Beside shards nothing is placed: zeros may be a part
    of any tensor."""
    wholes = {name: lookup.space.whole(name) for name in lookup.space.names if lookup.space.shapes[name].numel()}
    known = [place for place in found.values() if place is not None]
    if not known or any(isinstance(place, Tensor) or place not in wholes.values() for place in known):
        return found
    while True:
        added: dict[str, Addresses | None] = {}
        for low, high, waiting in _gaps(found, lookup.space.size):
            taken_up = [place for place in found.values() if place is not None]
            free = [name for name, w in wholes.items() if low <= w.start and w.stop <= high and w not in taken_up]
            fits = {name: [w for w in free if _stands(start[name], w, lookup)] for name in waiting}
            for name, ways in fits.items():
                if len(ways) == 1 and sum(ways[0] in other for other in fits.values()) == 1:
                    added[name] = wholes[ways[0]]
        if not added:
            return found
        found = found | added


def _gaps(found: Mapping[str, Addresses | None], size: int) -> Iterator[tuple[int, int, list[str]]]:
    """Yield the tensors without a place that follow each other, and the addresses between their neighbours."""
    low, waiting = 0, list[str]()
    for name, place in (*found.items(), ("", range(size, size))):
        if place is None:
            waiting.append(name)
        elif isinstance(place, range):
            if waiting:
                yield low, place.start, waiting
            low, waiting = place.stop, []


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
    held = [one for one in record.held if not one.filled or (filled.places and one.name not in filled.unheld)]
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
