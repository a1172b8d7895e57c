"""Explain a wrong gradient by the other tensors that share elements with it: those of other ranks, cut in another way,
and those of other names, where the program has made several parameters of a tied one.

Every element has an address (`verify.external.parameter_mapping`), so that no two tensors need be cut alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nnscaler.runtime.tensor_bits_and_differences import largest
from verify.external.comparison.comparison_records import ProgramRun
from verify.external.observe_rank_run import RankRecord
from verify.external.parameter_mapping import RankPiece
from verify.programs.causes.explain_wrong_values import cause_of
from verify.programs.causes.wrong_tensor import VAGUE, Cause


@dataclass(frozen=True)
class WrongGradient:
    """The gradient of a piece on one rank in a step, which is not the model's.

    agrees  whether a tensor in its place is right
    """

    run: ProgramRun
    number: int
    record: RankRecord
    piece: RankPiece
    value: Tensor
    agrees: Callable[[Tensor], bool]

    def cause(self) -> Cause | None:
        """Return the cause that shows in its elements; None where none does."""
        return self._untied() or self._of_some_elements()

    def _untied(self) -> Cause | None:
        """Test whether it is right with what parameters of other names have for the same elements."""
        addresses, total = _addresses(self.piece), self.value.double().flatten()
        others = dict.fromkeys(other.local for record in self.run.records for other in self._related(record))
        names = [self.piece.local]
        for name in others:
            held = self._held(self.run.records, addresses, name)
            if name != self.piece.local and held is not None:
                names, total = [*names, name], total + held
        if len(names) == 1 or not self.agrees(total.view(self.piece.shape)):
            return None
        listed = ", ".join(names[:-1]) + f" and {names[-1]}"
        text = f"{listed} are one parameter of the model, and each has a part of its gradient here: tie them once they "
        return Cause("untied", text + "are made parallel, or add up their gradients")

    def _of_some_elements(self) -> Cause | None:
        """Test the elements that are wrong by themselves: ranks may hold them beside others that are right."""
        right = self.piece.take(self.run.reference.steps[self.number].gradients).nan_to_num(0.0).flatten()
        own = self.value.double().flatten()
        whole = self.run.wrong_tensor("gradient", self.record.rank, {}, right)
        off = (own - right).abs() > whole.close * largest(right)
        if not 0 < int(off.sum()) < len(own):
            return None
        values = {self.record.rank: own[off]}
        for record in self.run.records:
            held = self._held((record,), _addresses(self.piece)[off])
            if record.rank != self.record.rank and held is not None:
                values[record.rank] = held
        found = cause_of(self.run.wrong_tensor("gradient", self.record.rank, values, right[off]))
        if found.kind in VAGUE:
            return None
        return replace(found, text=f"of {int(off.sum())} of its {len(own)} elements: {found.text}")

    def _related(self, record: RankRecord) -> list[RankPiece]:
        """Return the tensors of a rank that have elements of the same tensors of the model."""
        names = set(self.piece.names)
        return [p for p in record.pieces if p.kind == "parameter" and p.addresses is not None and names & set(p.names)]

    def _held(self, records: Iterable[RankRecord], addresses: Tensor, name: str | None = None) -> Tensor | None:
        """Return the gradients of these elements as the ranks have them, by the first of each, under this name in the
        program if it is given; None where some have none."""
        found = torch.full((len(addresses),), torch.nan, dtype=torch.float64)
        for record in records:
            for other in self._related(record):
                gradient = record.steps[self.number].gradients.get(other.local)
                if gradient is not None and gradient.shape == other.shape and name in (None, other.local):
                    found = torch.where(found.isnan(), _at(other, gradient, addresses), found)
        return None if bool(found.isnan().any()) else found


def _addresses(piece: RankPiece) -> Tensor:
    """Return the address of each element, flattened."""
    have = piece.addresses
    assert have is not None
    return torch.arange(have.start, have.stop) if isinstance(have, range) else have.flatten()


def _at(piece: RankPiece, gradient: Tensor, addresses: Tensor) -> Tensor:
    """Return the gradient at these addresses; NaN where the piece has no such element."""
    have, order = _addresses(piece).sort()
    if not len(have):
        return torch.full((len(addresses),), torch.nan, dtype=torch.float64)
    places = torch.searchsorted(have, addresses).clamp_max(len(have) - 1)
    values = gradient.double().flatten()[order[places]]
    return torch.where(have[places] == addresses, values, torch.nan)
