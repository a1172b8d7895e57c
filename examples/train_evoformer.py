"""Families of a chain that folds: what the Evoformer with recycling of evoformer.py learns.

    nnscaler train examples/evoformer.toml
    nnscaler train examples/evoformer.toml --ranks=2 --plan=pp=2 --pipeline=3f1b --micro-batches=2

A chain lies in the plane, and at each residue it turns left, right or not at all, as the kind of the residue says. So a
distance is of all residues in between, and the model has to put the turns together. Its relatives in the alignment are
copies with mutations: a masked residue is mostly that of its column.
"""

from __future__ import annotations

import math

import torch
from evoformer import IGNORED, Evoformer, EvoformerConfig
from torch import Tensor

SEQUENCES, LENGTH = 4, 8
KINDS = EvoformerConfig.residues - 1  # the last one is the mask
MUTATED, MASKED, MISSING = 0.1, 0.2, 0.1


def build_model() -> Evoformer:
    """Three runs of two blocks, the last one differentiated."""
    return Evoformer(EvoformerConfig(blocks=2, recycles=2))


class Families(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Families first, first + 1, ...: each is drawn from its number alone."""

    def __init__(self, first: int, count: int) -> None:
        self._first, self._count = first, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(self._first + index)

        def chance(share: float) -> Tensor:
            return torch.rand(SEQUENCES, LENGTH, generator=generator) < share

        target = torch.randint(KINDS, (LENGTH,), generator=generator)
        others = torch.randint(KINDS, (SEQUENCES, LENGTH), generator=generator)
        mutated, masked, missing = chance(MUTATED), chance(MASKED), chance(MISSING)
        mutated[0] = missing[0] = False  # the first row is the target
        rows = torch.where(mutated, others, target)
        return {
            "alignment": rows.masked_fill(masked, KINDS),
            "present": (~missing).float(),
            "masked": rows.masked_fill(~masked | missing, IGNORED),
            "distances": distances(target),
        }


def distances(kinds: Tensor) -> Tensor:
    """Bins [length, length] of the distances in the plane; steps of the chain have length 1."""
    directions = ((kinds % 3 - 1) * (math.pi / 2)).cumsum(0)
    places = torch.stack((directions.cos(), directions.sin()), dim=-1).cumsum(0)
    apart = torch.cdist(places, places)
    return (2 * apart).round().long().clamp(max=EvoformerConfig.bins - 1)


def datasets() -> tuple[Families, Families]:
    """Families to train on, and others for validation."""
    return Families(0, 100_000), Families(100_000, 64)
