"""Say why a parameter or buffer is wrong after a step, and whether a wrong value is right elsewhere: that of another
slice, or of shards that lie in another order.

A worked example. A parameter has 8 rows, and each of 2 ranks updates 4 of them by the gradient of the first 4. Its
second half then has the update that the model gives the first: "of 2 equal parts, part 1 has the update of part 0".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations
from math import prod

import torch
from torch import Tensor

from nnscaler.runtime.tensor_bits_and_differences import largest
from verify.external.comparison.comparison_records import ProgramRun
from verify.external.parameter_mapping import RankPiece, StateMap, addresses_as_tensor
from verify.programs.causes.explain_wrong_values import cause_of
from verify.programs.causes.wrong_tensor import CLOSE, VAGUE, Cause

_EXACT = 1e-9  # of float64: the first updates of Adam, all of one size, differ by more
_FEW = 8  # elements that may agree with others by chance, where only a few digits are compared


def cause_of_state(
    run: ProgramRun, number: int, rank: int, piece: RankPiece, values: Mapping[int, Tensor], expected: Tensor
) -> Cause:
    """Name the cause in the update rather than in the value: what was added is what is wrong. `values`: of all ranks
    that hold the same elements."""
    reference = run.reference
    start = reference.space.flat(reference.start)
    if number:  # what a script makes later on, as a model that it loads, has no value before its first step
        earlier = reference.steps[number - 1].parameters
        start = torch.where(earlier.isnan(), start, earlier)
    before, after = piece.take(start), reference.steps[number].parameters
    updates = {other: value.double() - before for other, value in values.items()}
    right, mine = expected - before, updates[rank]
    if largest(mine) == 0 and largest(right) > 0:
        return Cause("not_updated", f"the {piece.kind} did not change")
    noun = "update" if piece.kind == "parameter" else "buffer"
    found = cause_of(run.wrong_tensor(noun, rank, updates, right))
    if found.kind not in (*VAGUE, "permuted"):
        return found
    wrong = (mine - right).abs() > CLOSE * largest(right)
    if bool(wrong.any()) and largest(mine[wrong]) == 0:
        some = f"{int(wrong.sum())} of its {wrong.numel()} elements"
        return Cause("not_updated", f"{some} did not change: nobody updates them, or they were not gathered")
    elsewhere = cause_elsewhere(run, "update", after - start, piece, mine)
    return elsewhere or cause_elsewhere(run, "value", after, piece, values[rank]) or found


def cause_elsewhere(run: ProgramRun, noun: str, whole: Tensor, piece: RankPiece, value: Tensor) -> Cause | None:
    """Return the cause where a rank's wrong value is that of other elements of the model, whose are `whole`."""
    assert piece.addresses is not None
    exact, addresses = run.reference.dtype == torch.float64, addresses_as_tensor(piece.addresses).flatten()
    return _OtherPlaces(noun, whole, addresses, run.reference.space, run.sizes, exact).cause(value)


@dataclass(frozen=True)
class _OtherPlaces:
    """Looks for a rank's wrong value among the model's.

    noun       "gradient", "update", "value"
    whole      the model's, over all addresses
    addresses  of the elements of the wrong value
    space      in which these are
    sizes      of the mesh axes, over which it may be cut
    exact      it was computed in float64
    """

    noun: str
    whole: Tensor
    addresses: Tensor
    space: StateMap
    sizes: Mapping[str, int]
    exact: bool

    def cause(self, value: Tensor) -> Cause | None:
        """Return the cause where the value, or each of so many equal parts of it that is wrong, is that of elements
        that lie elsewhere; None where it is not."""
        flat = value.double().flatten()
        for count in self._counts():
            if len(flat) % count == 0 and (text := self._told(flat.chunk(count), self.addresses.chunk(count))):
                return Cause("permuted", text)
        return None

    def _counts(self) -> list[int]:
        sizes = [size for size in self.sizes.values() if size > 1]
        return sorted({prod(some) for count in range(len(sizes) + 1) for some in combinations(sizes, count)})

    def _told(self, parts: tuple[Tensor, ...], places: tuple[Tensor, ...]) -> str | None:
        told = None
        for number, (part, own) in enumerate(zip(parts, places, strict=True)):
            if self._near(part, self.whole[own]):
                continue
            found = list(self._elsewhere(part, own))
            if len(found) != 1:
                return None
            told = told or self._sentence(number, places, found[0])
        return told

    def _sentence(self, number: int, places: tuple[Tensor, ...], found: Tensor) -> str:
        if len(places) == 1:
            here, there = self._named(places[0]), self._named(found)
            return f"it is the {self.noun} of {there}, in the place of that of {here}: another slice"
        same = next((i for i, place in enumerate(places) if torch.equal(place, found)), None)
        other = f"part {same}" if same is not None else self._named(found)
        which = f"of {len(places)} equal parts, part {number} has the {self.noun} of {other}"
        return f"{which}: another slice, or shards that were put together in another order"

    def _named(self, addresses: Tensor) -> str:
        first = int(addresses[0])
        (name,) = self.space.names_at(range(first, first + 1))
        return f"the {len(addresses)} elements from {name}[{first - self.space.starts[name]}] on"

    def _elsewhere(self, part: Tensor, own: Tensor) -> Iterator[Tensor]:
        """Yield the addresses of elements that lie as those of a part do, and have its values."""
        if len(part) < (2 if self.exact else _FEW) or self._near(part, part[:1].expand_as(part)):
            return  # so few, or so alike, that they may be those of others by chance
        anchor = int(part.abs().argmax())
        close = (self.whole - part[anchor]).abs() <= self._allowed(part)
        for shift in (close.nonzero().flatten() - own[anchor]).tolist():
            there = own + shift
            inside = int(there.min()) >= 0 and int(there.max()) < len(self.whole)
            if shift and inside and self._near(part, self.whole[there]):
                yield there

    def _near(self, value: Tensor, other: Tensor) -> bool:
        return bool(((value - other).abs() <= self._allowed(value)).all())

    def _allowed(self, value: Tensor) -> float:
        return (_EXACT if self.exact else CLOSE) * largest(value)
