"""Rows of numbers, and the same numbers in order: what the T5 of t5_hf.py learns.

nnscaler train examples/t5.toml
nnscaler train examples/t5.toml --ranks=2 --plan=tp=2
"""

from __future__ import annotations

import torch
from torch import Tensor

NUMBERS = 30  # 1 to NUMBERS are drawn, none twice; 0 stands before the first one that is written
SHORTEST, LONGEST = 5, 9
IGNORED = -100


class Unsorted(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Rows first, first + 1, ...: each is drawn from its number alone, and padded on the right."""

    def __init__(self, first: int, count: int) -> None:
        self._first, self._count = first, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(self._first + index)
        length = int(torch.randint(SHORTEST, LONGEST + 1, (), generator=generator))
        numbers = torch.randperm(NUMBERS, generator=generator)[:length] + 1
        padding = LONGEST - length
        return {
            "input_ids": torch.nn.functional.pad(numbers, (0, padding)),
            "attention_mask": (torch.arange(LONGEST) < length).long(),
            "labels": torch.nn.functional.pad(numbers.sort().values, (0, padding), value=IGNORED),
        }


def datasets() -> tuple[Unsorted, Unsorted]:
    """Rows to train on, and others for validation."""
    return Unsorted(0, 100_000), Unsorted(100_000, 480)
