"""Read the first samples of a stream before training, for what is compiled for them, and train on them all the same."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import tee
from typing import Any

from torch.utils.data import IterableDataset

from nnscaler.global_random_generators import generators_kept


class ReadAhead(IterableDataset[Any]):
    """A stream of which the first samples are read once before training: its second iteration goes on with these.

    Iterated again, a stream need not start again: one that reads a pipe, or is its own iterator, has only later ones.
    An iterator that has a state is made to start again.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset, self._begun = dataset, 0
        self._again: Iterator[Any] = iter(())

    def set_epoch(self, epoch: int) -> None:
        """Tell the stream, where it wants to know. What was read ahead is the first epoch's."""
        if hasattr(self._dataset, "set_epoch"):
            self._dataset.set_epoch(epoch)
        self._begun = 2 if epoch else self._begun

    def __iter__(self) -> Iterator[Any]:
        self._begun += 1
        if self._begun == 2:
            return self._again
        rows: Iterator[Any] = iter(self._dataset)
        if self._begun > 1 or hasattr(rows, "state_dict"):
            self._begun = 2
        else:
            rows, self._again = tee(rows)
        return rows

    def __len__(self) -> int:
        return len(self._dataset)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        give = super().__setattr__ if name.startswith("_") else partial(setattr, self._dataset)
        give(name, value)


def reading_first(*datasets: Any) -> AbstractContextManager[None]:
    """Return what the first batch is read inside of. What a stream drew for rows that it gives once it draws no more:
    put back, generators would give the same numbers to the rows after them."""
    return nullcontext() if any(isinstance(dataset, ReadAhead) for dataset in datasets) else generators_kept()
