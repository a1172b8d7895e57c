"""Match what the ranks did with what one rank did: data parts, whole parameters, one address space."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from nnscaler.errors import few
from nnscaler.runtime.tensor_bits_and_differences import same_values
from verify.external.observe_rank_run import ObservedStep, RankRecord
from verify.external.parameter_mapping import (
    Addresses,
    Lookup,
    RankPiece,
    StateMap,
    moved_names,
    same_addresses,
    taken,
)
from verify.external.program import ExternalProgram
from verify.external.reference import PlainReference, ReferenceStep
from verify.external.torchrun.elements_of_one_rank import NONE_FILLED, Cuts, FilledIn, space_of
from verify.external.torchrun.feed_data_of_all_ranks import Material
from verify.external.torchrun.replace_data_given_to_model import close
from verify.external.torchrun.run_ranks_and_reference import NotMatched
from verify.external.torchrun.watched_script_record import Events, HeldInScript, ScriptRecord

Value = TypeVar("Value", Tensor, Tensor | None)


class NoParts(Exception):
    """The ranks' data do not show which ranks work on the same rows. `args[0]` says why."""


# Data parts: ranks that take in the same data.


def parts_of(records: Sequence[ScriptRecord]) -> tuple[int, ...]:
    """Return the data part of each rank. Raises NoParts.

    Ranks that take in the same kinds of data are compared by value. Under pipelining the first stages have inputs and
    the last ones targets; both show the same number of parts, and the ranks in between have neither.
    """
    kinds = [frozenset(kind for kind, events in r.events.items() if events) for r in records]
    found: dict[int, int] = {}
    count = 1
    for kind in sorted({k for k in kinds if k}, key=sorted):
        ranks = [rank for rank, own in enumerate(kinds) if own == kind]
        firsts: list[int] = []
        for rank in ranks:
            same = (i for i, first in enumerate(firsts) if same_data(records[first].events, records[rank].events))
            part = next(same, len(firsts))
            if part == len(firsts):
                firsts.append(rank)
            found[rank] = part
        if count > 1 and len(firsts) not in (1, count):
            raise NoParts(f"{count} of the ranks' inputs differ, and {len(firsts)} of their targets")
        count = max(count, len(firsts))
    if len(found) < len(records):
        stages = [[rank for rank, own in enumerate(kinds) if own == kind] for kind in dict.fromkeys(kinds) if kind]
        found = _between(found, stages, count, len(records))
    parts = tuple(found[rank] for rank in range(len(records)))
    sizes = {parts.count(part) for part in range(count)}
    if len(sizes) > 1:
        raise NoParts(f"the ranks work on {count} data parts, and not as many of them on each: {list(parts)}")
    return parts


def _between(known: Mapping[int, int], stages: Sequence[Sequence[int]], count: int, ranks: int) -> dict[int, int]:
    """Return the part of every rank, also of those that take in nothing: parts are runs of ranks, or every n-th rank.

    `stages`: ranks that take in the same kinds of data. Where parts are every n-th rank, they follow each other; where
    parts are runs, they lie as far apart as these. Raises NoParts where both fit what is known, or neither.
    """
    length = ranks // count
    ways = []
    if all(stage[-1] - stage[0] == len(stage) - 1 for stage in stages):
        ways.append({rank: rank % count for rank in range(ranks)})
    if all(len({rank % length for rank in stage}) * count == len(stage) for stage in stages):
        ways.append({rank: rank // length for rank in range(ranks)})
    fitting = [way for way in ways if all(way[rank] == part for rank, part in known.items())]
    if not fitting or any(way != fitting[0] for way in fitting):
        nothing = [rank for rank in range(ranks) if rank not in known]
        raise NoParts(f"ranks {nothing} take in no data, and it is not clear which of {count} data parts they work on")
    return fitting[0]


def same_data(one: Events, other: Events) -> bool:
    """Return whether two ranks took in the same data."""
    if {k for k, v in one.items() if v} != {k for k, v in other.items() if v}:
        return False
    return all(len(one[kind]) == len(other[kind]) and _same_events(one, other, kind) for kind in one)


def _same_events(one: Events, other: Events, kind: str) -> bool:
    return all(
        len(here) == len(there) and all(close(a, b) for a, b in zip(here, there, strict=True))
        for here, there in zip(one[kind], other[kind], strict=True)
    )


def material_of(records: Sequence[ScriptRecord], parts: Sequence[int]) -> Material:
    """Return what a run on one rank is fed with."""
    count = max(parts) + 1
    events: list[dict[str, tuple[tuple[Tensor, ...], ...]]] = [{} for _ in range(count)]
    taken: list[dict[str, int]] = [{} for _ in range(min(len(record.steps) for record in records))]
    for record, part in zip(records, parts, strict=True):
        for kind, own in record.events.items():
            events[part].setdefault(kind, own)
        for step, seen in zip(taken, record.steps, strict=False):
            for kind, number in seen.taken.items():
                step[kind] = max(step.get(kind, 0), number)
    settings = tuple(step.settings for step in records[0].steps[: len(taken)])
    draws = tuple(next(r.draws for r, own in zip(records, parts, strict=True) if own == part) for part in range(count))
    same = all(len(own) == len(draws[0]) and all(map(close, own, draws[0])) for own in draws)
    return Material(tuple(events), tuple(taken), whole_start(records), settings, () if same else draws)


def whole_start(records: Sequence[ScriptRecord]) -> Mapping[str, Tensor]:
    """Put together the parameters at the start of every rank, as far as their layouts say how."""
    unequal = frozenset(unequal_starts(records))
    whole: dict[str, Tensor] = {}
    missing: dict[str, Tensor] = {}
    for record in records:
        for held in record.held:
            local = record.start[held.name]
            shape = torch.Size(held.whole)
            into = whole.setdefault(held.name, torch.zeros(shape, dtype=local.dtype))
            left = missing.setdefault(held.name, torch.ones(shape, dtype=torch.bool))
            if into.shape != shape or held.name in unequal or (held.places is None and held.layout != "plain"):
                continue
            places = range(into.numel()) if held.places is None else held.places
            where = slice(places.start, places.stop) if isinstance(places, range) else places
            open_, flat = left.view(-1)[where], into.view(-1)
            flat[where] = torch.where(open_, local.reshape(-1), flat[where])  # the first rank that has it
            left.view(-1)[where] = False
    return {name: value for name, value in whole.items() if not bool(missing[name].any())}


# One address space for both.


@dataclass(frozen=True)
class Layout:
    """The ranks as a mesh: data parts, and within each the ranks that share its work."""

    parts: tuple[int, ...]

    @property
    def count(self) -> int:
        """Return the number of data parts."""
        return max(self.parts) + 1

    def mesh(self) -> tuple[tuple[str, int], ...]:
        """Return the axes; one of size 1 is left out."""
        rest = len(self.parts) // self.count
        axes = (("data", self.count), ("model", rest))
        return tuple(axis for axis in axes if axis[1] > 1) or (("data", 1),)

    def events(self, records: Sequence[ScriptRecord]) -> list[Events]:
        """Return what each data part takes in."""
        return [records[self.parts.index(part)].events for part in range(self.count)]

    def coordinate(self, rank: int) -> dict[str, int]:
        """Return the coordinate of a rank."""
        part = self.parts[rank]
        within = [r for r, other in enumerate(self.parts) if other == part].index(rank)
        return {axis: {"data": part, "model": within}[axis] for axis, _ in self.mesh()}


def program_of(name: str, layout: Layout) -> ExternalProgram:
    """Return the record of the script as a parallel program, for comparisons: nothing in it is run."""

    def unused(*_: object) -> None:
        raise AssertionError("a script is run by itself")

    axes = tuple(axis for axis, _ in layout.mesh() if axis == "data" and layout.count > 1)
    return ExternalProgram(name, unused, unused, unused, layout.mesh(), axes)  # type: ignore[arg-type]


def reference_of(records: Sequence[ScriptRecord], steps: int, filled: FilledIn = NONE_FILLED) -> PlainReference:
    """Return the run on one rank, or those of all data parts, as an oracle."""
    first, space = records[0], space_of(records[0], filled)
    rows = []
    for number in range(steps):
        seen = [record.steps[number] for record in records]
        losses = [torch.stack(s.losses).sum() if s.losses else torch.tensor(torch.nan).double() for s in seen]
        mean = torch.stack(losses).mean()
        parts = tuple(losses) if len(losses) > 1 else ()
        states = [space.flat(s.state) for s in seen]
        statistics = tuple((state,) for state in states) if len(states) > 1 else ()
        gradients = space.flat(_without(seen[0].gradients, filled.replaced & seen[0].unread))
        norm = seen[0].norm
        unit = max(s.loss_unit for s in seen)
        rows.append(ReferenceStep(mean, parts, gradients, states[0], norm, statistics, unit))
    return PlainReference(space, dict(first.start), tuple(rows), 0.0, first.dtype, None)


def _without(gradients: Mapping[str, Tensor | None], names: frozenset[str]) -> Mapping[str, Tensor | None]:
    return {name: value for name, value in gradients.items() if name not in names}


def own_gradients(records: Sequence[ScriptRecord], filled: FilledIn = NONE_FILLED) -> Callable[[int, int], Tensor]:
    """Return the gradients of each data part by itself, over all addresses."""
    space = space_of(records[0], filled)
    return lambda step, part: space.flat(records[part].steps[step].own)


def unequal_starts(records: Sequence[ScriptRecord]) -> tuple[str, ...]:
    """Return the plain parameters that have one name and shape on several ranks, and other values at the start."""
    first: dict[str, Tensor] = {}
    found: dict[str, None] = {}
    for record in records:
        for held in record.held:
            start = record.start[held.name]
            other = first.setdefault(held.name, start)
            if held.layout == "plain" and other.shape == start.shape and not same_values(other, start):
                found[held.name] = None
    return tuple(found)


def _changing(records: Iterable[ScriptRecord]) -> frozenset[str]:
    """Return the buffers that a step changes in some run. Others are seen in what is computed of them."""
    return frozenset(
        held.name
        for record in records
        for held in record.held
        if held.kind == "buffer"
        and any(
            not same_values(step.state.get(held.name, record.start[held.name]), record.start[held.name])
            for step in record.steps
        )
    )


def rank_records(
    records: Sequence[ScriptRecord],
    layout: Layout,
    reference: PlainReference,
    made: Sequence[ScriptRecord] = (),
    filled: FilledIn = NONE_FILLED,
) -> tuple[RankRecord, ...]:
    """Return what each rank did, by the addresses of the run on one rank, or of those `made` on each data part."""
    lookup, unequal = reference.lookup(), frozenset(unequal_starts(records))
    changing = _changing((*records, *made))
    count = len(reference.steps)
    last = [record.steps[count - 1] for record in records]
    read = frozenset(name for seen in last for name in seen.gradients if name not in seen.unread or filled.any)
    found = []
    for record in records:
        steps = tuple(
            ObservedStep(
                torch.stack(seen.losses).sum() if seen.losses else None,
                _cut(_without(seen.gradients, filled.replaced), record.rank, filled),
                # what another rank updates arrives after the step, and the script may have been stopped before
                _cut(
                    {n: v for n, v in seen.state.items() if number < count - 1 or n not in seen.unread & read},
                    record.rank,
                    filled,
                ),
                seen.norm,
                _cut(seen.late, record.rank, filled),
                seen.unread,
                filled.replaced,
            )
            for number, seen in enumerate(record.steps[:count])
        )
        compared = [h for h in record.held if (h.kind == "parameter" and not h.filled) or h.name in changing]
        pieces = _pieces(compared, record, lookup, unequal)
        pieces += [
            _filled_piece(held, record.start[held.name], filled.places[record.rank, held.name], reference.space)
            for held in record.held
            if (record.rank, held.name) in filled.places
        ]
        found.append(RankRecord(record.rank, layout.coordinate(record.rank), tuple(pieces), steps))
    return tuple(found)


def _cut(values: Mapping[str, Value], rank: int, filled: FilledIn) -> dict[str, Value]:
    """Return values without the padding of what is filled in."""
    found = dict(values)
    for name, value in values.items():
        places = filled.places.get((rank, name))
        if value is not None and places is not None:
            found[name] = value.reshape(-1)[: len(places)]
    return found


def _filled_piece(held: HeldInScript, start: Tensor, places: Addresses, space: StateMap) -> RankPiece:
    began, names = float(start.double().sum()), space.names_at(places)
    return RankPiece(held.name, "parameter", (len(places),), names, places, "value", held.layout, False, began)


def unmatched(ranks: Sequence[RankRecord], records: Sequence[ScriptRecord]) -> NotMatched | None:
    """Name the trained parameters of ranks that are no part of one of the run on one rank, and say which of them are
    others on every rank; return None where there are none."""
    pieces = [piece for rank in ranks for piece in rank.pieces]
    strange = dict.fromkeys(p.local for p in pieces if p.addresses is None and p.trained and 0 not in p.shape)
    if not strange:
        return None
    unequal = [name for name in unequal_starts(records) if name in strange]
    start = f"ranks start from different values of {few(unequal, 4)}, and " if unequal else ""
    text = f"{start}{few(tuple(strange), 4)} on the ranks cannot be found in the parameters on one rank"
    return NotMatched(text, "unequal_starts" if unequal else "other")


def _pieces(
    held: Sequence[HeldInScript], record: ScriptRecord, lookup: Lookup, unequal: frozenset[str]
) -> list[RankPiece]:
    """Find the elements of tensors: by name, or by values, and where a module has another name on one rank, as the
    first layer of a later stage has, what lies in it by that name, if it has these values."""
    cuts = Cuts(record.rank, lookup)
    pieces = [_piece(one, record.start[one.name], cuts, one.name in unequal) for one in held]
    moved = moved_names(pieces, lookup.space)
    for number, one in enumerate(held):
        name, start = moved.get(one.name), record.start[one.name]
        places = None if name is None else _placed(one, name, lookup.space)
        if places is not None and _stands(start, places, lookup):
            names = lookup.space.names_at(places)
            pieces[number] = replace(pieces[number], names=names, addresses=places, found="value")
    return pieces


def _placed(held: HeldInScript, name: str, space: StateMap) -> Addresses | None:
    """Return the addresses of a tensor in the whole one of this name, as its layout says; None where it does not fit
    there."""
    if name not in space.starts or torch.Size(held.whole) != space.shapes[name]:
        return None
    first, places = space.starts[name], held.places
    if held.layout == "plain":
        return space.whole(name)
    return range(places.start + first, places.stop + first) if isinstance(places, range) else _add(places, first)


def _add(places: Tensor | None, first: int) -> Tensor | None:
    return None if places is None else places + first


def _stands(start: Tensor, places: Addresses, lookup: Lookup) -> bool:
    return same_values(start.reshape(-1).double(), taken(lookup.start, places))


def _piece(held: HeldInScript, start: Tensor, cuts: Cuts, unequal: bool) -> RankPiece:
    lookup, space = cuts.lookup, cuts.lookup.space
    addresses, found = _placed(held, held.name, space), "layout"
    if held.layout != "plain":
        if addresses is None or not _stands(start, addresses, lookup):
            elsewhere, share = lookup.by_value(start)
            addresses, found = (elsewhere, "value") if share == 1.0 else (addresses, found)
    elif (addresses is None or unequal) and start.numel():
        looked_up = cuts.addresses if held.kind == "parameter" else cuts.slice_of  # a copy has a parameter's values
        addresses, found = looked_up(held.name, start), "value"
    names = () if addresses is None else space.names_at(addresses)
    alone = found == "value" and addresses is not None and len(names) == 1
    moved = alone and same_addresses(_placed(held, names[0], space), addresses)
    began = float(start.double().sum())
    return RankPiece(held.name, held.kind, held.shape, names, addresses, found, held.layout, held.trained, began, moved)
