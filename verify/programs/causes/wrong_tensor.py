"""A tensor that is not the reference's, with all that a cause may be tested by, and the cause that is found."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from math import isfinite, prod

import torch
from torch import Tensor

from nnscaler.errors import few
from nnscaler.layout import IN_STEP, MICRO, SLICE, Partial, Prefix, State
from nnscaler.runtime.shards import Coordinates, shard, unravel
from nnscaler.runtime.tensor_bits_and_differences import FAMILY_SHARE, largest, real_numbers

CLOSE = 1e-6  # relative; far above rounding in float64 and far below any cause
STAGES = "stages"  # an axis of the stages that share a tensor
VAGUE = ("differs", "partly_wrong", "some_ranks")  # kinds of cause beside which another one is looked for
Place = tuple[int, int]  # rank, and micro-batch where there are several


@dataclass(frozen=True)
class Cause:
    """A reason for a wrong value.

    kind    a name in the table of causes, or a caller's own
    text    a sentence for people; empty where nothing is known
    axis    of the mesh; several joined by a comma; empty where none is known
    factor  that the value is too large by; 0 where it is none
    """

    kind: str
    text: str
    axis: str = ""
    factor: float = 0.0

    @property
    def told(self) -> str | None:
        """The sentence, where it says more than that something differs."""
        return None if self.kind in VAGUE else self.text


Make = Callable[[Place], Tensor | None]
Part = tuple[str, int, int]  # stage, rank, micro-batch


@dataclass(frozen=True)
class WrongTensor:
    """A tensor that is not the reference's. All tensors are float64.

    noun      "gradient", "loss", "value", ...
    pieces    what is held where; some places may be unknown
    expected  the right tensor
    at        coordinate of each place
    cut       make the piece at a place from such a tensor as `expected`
    sizes     axis -> size, where a factor may come from one
    judged    places to be explained; None: all that are wrong, and the sentence says which if others are right
    states    how the pieces lie, without sums that are taken
    terms     axis of a sum that the layout has -> whether its ranks all hold the same
    reduce    axes over which the program says that it is summed
    before    the right tensor of the step before
    others    name -> right tensor of the same kind
    operands  name -> tensor that may have been added too often
    own       make the right value of the rank's own rows
    elements  the right elements, in any order
    parts     make the contributions that add up to the right tensor
    """

    noun: str
    pieces: Mapping[Place, Tensor]
    expected: Tensor
    at: Mapping[Place, Coordinates]
    cut: Callable[[Tensor, Place], Tensor] = lambda tensor, _: tensor
    sizes: Mapping[str, int] = field(default_factory=dict)
    judged: tuple[Place, ...] | None = None
    states: Mapping[str, State] | None = None
    terms: Mapping[str, bool] = field(default_factory=dict)
    reduce: tuple[str, ...] | None = None
    before: Tensor | None = None
    others: Mapping[str, Tensor] | None = None
    operands: Mapping[str, Tensor] | None = None
    own: Callable[[], Tensor] | None = None
    elements: Tensor | None = None
    parts: Callable[[], Mapping[Part, Tensor]] | None = None
    scale: float = 0.0
    close: float = CLOSE

    @cached_property
    def rights(self) -> Mapping[Place, Tensor]:
        """The right piece at each place."""
        return {place: self.cut(self.expected, place) for place in self.at}

    @cached_property
    def wrong(self) -> tuple[Place, ...]:
        """The places that are to be explained."""
        places = self.pieces if self.judged is None else self.judged
        return tuple(p for p in places if not self.near(self.pieces[p], self.rights[p]))

    def near(self, value: Tensor, other: Tensor) -> bool:
        """Return whether two pieces are one, up to rounding."""
        if value.shape != other.shape or not value.numel():
            return value.shape == other.shape
        allowed = self.close * max(largest(other), FAMILY_SHARE * max(self.scale, largest(self.expected)))
        return isfinite(allowed) and bool(((value - other).abs() <= allowed).all())

    def is_made(self, make: Make) -> bool:
        """Return whether each wrong piece is what is made for its place."""
        return all((made := make(p)) is not None and self.near(self.pieces[p], made) for p in self.wrong)

    def factor(self, make: Make) -> float | None:
        """Return the number by which every wrong piece is a multiple of what is made; None where none is."""
        pairs = [(self.pieces[p], make(p)) for p in self.wrong]
        products: list[tuple[Tensor, Tensor]] = [
            (value, made) for value, made in pairs if made is not None and made.shape == value.shape
        ]
        square = sum(float((made * made).sum()) for _, made in products)
        if len(products) < len(pairs) or not square > 0:
            return None
        factor = sum(float((value * made).sum()) for value, made in products) / square
        if not factor or not isfinite(1 / factor):  # of what is next to nothing, no multiple is told
            return None
        return factor if all(self.near(value, factor * made) for value, made in products) else None

    def lines(self, axes: Sequence[str]) -> list[list[Place]]:
        """Return the places that differ on these axes alone, for each that is wrong; none where one is unknown."""
        found = [line for line in grouped(self.at, axes) if any(place in self.wrong for place in line)]
        known = all(len(line) > 1 and all(place in self.pieces for place in line) for line in found)
        return found if known else []

    @property
    def where(self) -> str:
        """On which ranks, or in which micro-batches, it is wrong, where it is not wrong everywhere."""
        if self.judged is not None or self.terms:
            return ""
        for what, of in (("rank", lambda p: p[0]), ("micro-batch", lambda p: self.at[p].get(MICRO, 0))):
            wrong = sorted({of(place) for place in self.wrong})
            if any(of(place) not in wrong for place in self.pieces):
                return f"{'on' if what == 'rank' else 'in'} {what} {', '.join(map(str, wrong))} alone"
        return ""

    def name(self, place: Place) -> str:
        """Return how a place is called."""
        here = self.at[place]
        times = ((MICRO, "micro-batch"), (SLICE, "slice"))
        told = (f" in {word} {here[axis]}" for axis, word in times if axis in here and self.sizes.get(axis, 1) > 1)
        return f"rank {place[0]}" + "".join(told)


def laid_out(
    noun: str,
    pieces: Mapping[Place, tuple[Coordinates, Tensor]],
    expected: Tensor,
    states: Mapping[str, State],
    sizes: Mapping[str, int],
) -> WrongTensor | None:
    """Return a tensor of which every place holds a piece, as a layout says; None where too little is known.

    Terms of a sum are added up first, so that what is left has one right value at each place.
    """
    states = {axis: state for axis, state in states.items() if axis in sizes}
    sums = {axis: state for axis, state in states.items() if isinstance(state, Partial)}
    if len(pieces) != prod(sizes.values()) or any(isinstance(s, Prefix) and s.terms for s in states.values()):
        return None
    at = {place: {axis: here[axis] for axis in sizes} for place, (here, _) in pieces.items()}
    values = {place: real_numbers(piece) for place, (_, piece) in pieces.items()}
    groups = grouped(at, tuple(sums))
    if any(len({values[place].shape for place in group}) > 1 for group in groups):
        return None
    join = torch.maximum if any(state.reduction == "max" for state in sums.values()) else torch.add
    joined = {group[0]: reduce(join, (values[place] for place in group)) for group in groups}
    held = {axis: state for axis, state in states.items() if axis not in sums}
    rest = {axis: size for axis, size in sizes.items() if axis not in sums}
    places = {place: {axis: at[place][axis] for axis in rest} for place in joined}
    right = real_numbers(expected)
    wrong = WrongTensor(
        noun,
        joined,
        right,
        places,
        lambda tensor, place: shard(tensor, held, rest, places[place]),
        sizes,
        states=held,
        elements=right.flatten(),
    )
    terms = {
        axis: all(wrong.near(values[p], values[line[0]]) for line in grouped(at, (axis,)) for p in line)
        for axis, size in sizes.items()
        if axis in sums and axis not in IN_STEP and size > 1
    }
    return replace(wrong, terms=terms)


def on_ranks(
    noun: str,
    mesh: tuple[Sequence[int], Mapping[str, int]],
    pieces: Mapping[int, Tensor],
    expected: Tensor,
    states: Mapping[str, State],
) -> WrongTensor | None:
    """Return a tensor of which each rank holds a piece; None where one is missing. `mesh`: ranks, and sizes of axes."""
    ranks, sizes = mesh
    held = {(r, 0): (unravel(i, sizes), pieces[r]) for i, r in enumerate(ranks) if r in pieces}
    return laid_out(noun, held, expected, states, sizes)


def grouped(at: Mapping[Place, Coordinates], axes: Sequence[str]) -> list[list[Place]]:
    """Return the places that differ on these axes alone, together."""
    groups: dict[tuple[int, ...], list[Place]] = {}
    for place, here in at.items():
        groups.setdefault(tuple(index for axis, index in here.items() if axis not in axes), []).append(place)
    return list(groups.values())


# A gradient as a combination of the parts that add up to it: which are missing, or counted several times.


def weighed(wrong: WrongTensor) -> str | None:
    """Return what is wrong with the weights with which the parts make the piece that is wrong.

    None where they do not make it, too little is known, or all of them are counted alike.
    """
    assert wrong.parts is not None
    place, columns = wrong.wrong[0], wrong.parts()
    piece = wrong.pieces[place]
    if not columns or piece.numel() < len(columns) + 2:
        return None
    matrix = torch.stack([column.double().reshape(-1) for column in columns.values()], 1)
    weights = torch.linalg.lstsq(matrix, piece.reshape(-1, 1), driver="gelsd").solution[:, 0]
    if not wrong.near((matrix @ weights).reshape(piece.shape), piece):
        return None
    found = {key: round(float(w), 6) for key, w in zip(columns, weights, strict=True)}
    return None if len(set(found.values())) == 1 else _words(found, place[0])


def _words(weights: Mapping[Part, float], rank: int) -> str:
    """Return which parts are missing, or counted otherwise than once."""
    used = {key for key, weight in weights.items() if weight}
    missing = [key for key in weights if key not in used]
    if not missing:
        odd = {key: weight for key, weight in weights.items() if weight != 1}
        shown = ", ".join(f"{w:g} times that of rank {k[1]}, micro-batch {k[2]}" for k, w in list(odd.items())[:3])
        return f"its parts are counted otherwise than once: {shown}"
    stages, gone = {key[0] for key in weights}, {key[0] for key in missing}
    if len(stages) > 1 and not any(key[0] in gone for key in used):
        named = " and ".join(sorted(stages))
        return f"stages {named} share it, and each has only its own part: the sum over its copies is missing"
    micros = sorted({key[2] for key in missing})
    last = max(key[2] for key in weights)
    if not any(key[2] in micros for key in used):  # of these micro-batches there is nothing
        if {key[2] for key in used} == {last}:
            return f"it has micro-batch {last} alone: each replaces what the ones before left"
        early = ": the sum over ranks does not wait for the last backward" if micros == [last] else ""
        return f"it misses micro-batch {', '.join(map(str, micros))}{early}"
    ranks = sorted({key[1] for key in missing} - {key[1] for key in used})
    if {key[1] for key in used} == {rank} and len(missing) == sum(key[1] != rank for key in weights):
        everyone = sorted({key[1] for key in weights})
        return f"rank {rank} has only its own part: the sum over ranks {everyone} is missing, or nobody waits for it"
    if ranks:
        return f"the parts of rank {', '.join(map(str, ranks))} are missing"
    shown = few([f"micro-batch {key[2]} of rank {key[1]}" for key in missing])
    early = ": the sum over ranks does not wait for every backward" if last in micros else ""
    return f"it misses {shown}{early}"
