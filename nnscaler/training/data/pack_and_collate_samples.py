"""Pack documents of tokens into rows, and collate samples into the rows of a batch.

Packed documents are their concatenation, cut into rows: every token is read once per epoch and, but for the first of
its document, predicted once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils.data import IterableDataset, default_collate

from nnscaler.errors import NnscalerError
from nnscaler.global_random_generators import generators_kept
from nnscaler.runtime.nested_values import leaves_of, map_tensors, tensors_in
from nnscaler.runtime.tensor_bits_and_differences import same_bits

Collate = Callable[[list[Any]], Any]
_STACKED = (
    "pad rows to one shape, or give a function that makes a batch of rows: `collate` of [data], or of engine.loader"
)
_BY_ROWS = (
    "make dim 0 of what it returns the rows, in their order, as `torch.stack` does; or train without data parallelism"
)
LABELS_IGNORED = -100  # what torch's cross_entropy leaves out


class _DocumentRun(NamedTuple):
    """A run of a document's tokens in a row, and the tokens that they predict."""

    tokens: torch.Tensor
    labels: torch.Tensor


def pack(documents: Any, length: int) -> PackedRows | PackedStream:
    """Return a dataset of rows of `length` tokens, of a map-style or iterable dataset of documents.

    A document is a tensor of token ids, or a sequence of integers. A row is a dict of tensors of `length`:
        ids        tokens; 0 where the last row has none left
        labels     the next token of the same document; -100 at its end
        documents  number of the token's document in the row: attention is among equal ones
        positions  of the token in its document, counted from the start of the row where it started before
    Raises NnscalerError `bad_data`.
    """
    if length < 1:
        raise NnscalerError("bad_data", f"rows of {length} tokens: a row has at least 1")
    stream = isinstance(documents, IterableDataset)
    return PackedStream(documents, length) if stream else PackedRows(documents, length)


class PackedRows:
    """The rows of a map-style dataset of documents. Where each document starts is read once, at the start; from its
    `lengths` where the dataset has them, else from the documents."""

    def __init__(self, documents: Any, length: int) -> None:
        self._documents, self._length = documents, length
        given = getattr(documents, "lengths", None)
        sizes = given if given is not None else [len(documents[number]) for number in range(len(documents))]
        self._ends = torch.as_tensor(sizes, dtype=torch.int64).cumsum(0)

    def __len__(self) -> int:
        return -(-int(self._ends[-1]) // self._length) if len(self._ends) else 0

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        start, stop = row * self._length, (row + 1) * self._length
        number = int(torch.searchsorted(self._ends, start, right=True))
        pieces = []
        while start < stop and number < len(self._ends):
            tokens = _tokens(self._documents[number])
            first = start - (int(self._ends[number]) - len(tokens))
            pieces.append(_piece(tokens, first, min(first + stop - start, len(tokens))))
            start += len(pieces[-1].tokens)
            number += 1
        return _row(pieces, self._length)


class PackedStream(IterableDataset[dict[str, torch.Tensor]]):
    """The rows of an iterable dataset of documents."""

    def __init__(self, documents: Any, length: int) -> None:
        self._documents, self._length = documents, length

    def set_epoch(self, epoch: int) -> None:
        """Tell the documents, where they want to know."""
        if hasattr(self._documents, "set_epoch"):
            self._documents.set_epoch(epoch)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        pieces: list[_DocumentRun] = []
        room = self._length
        for document in self._documents:
            tokens, first = _tokens(document), 0
            while first < len(tokens):
                pieces.append(_piece(tokens, first, min(first + room, len(tokens))))
                first += len(pieces[-1].tokens)
                room -= len(pieces[-1].tokens)
                if room == 0:
                    yield _row(pieces, self._length)
                    pieces, room = [], self._length
        if pieces:
            yield _row(pieces, self._length)


def _tokens(document: Any) -> torch.Tensor:
    tokens = torch.as_tensor(document)
    if tokens.dim() != 1 or tokens.is_floating_point():
        form = f"{str(tokens.dtype).removeprefix('torch.')}{list(tokens.shape)}"
        raise NnscalerError("bad_data", f"a document of {form}: packed are sequences of token ids")
    return tokens.long()


def _piece(tokens: torch.Tensor, first: int, end: int) -> _DocumentRun:
    following = torch.cat([tokens[first + 1 : end + 1], tokens.new_full((1,), LABELS_IGNORED)])
    return _DocumentRun(tokens[first:end], following[: end - first])


def _row(pieces: Sequence[_DocumentRun], length: int) -> dict[str, torch.Tensor]:
    sizes = [len(piece.tokens) for piece in pieces]
    padding = length - sum(sizes)
    sizes = [*sizes, padding] if padding else sizes
    return {
        "ids": torch.cat([*(piece.tokens for piece in pieces), torch.zeros(padding, dtype=torch.int64)]),
        "labels": torch.cat([*(piece.labels for piece in pieces), torch.full((padding,), LABELS_IGNORED)]),
        "documents": torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes)),
        "positions": torch.cat([torch.arange(size) for size in sizes]),
    }


@dataclass
class Collated:
    """Makes a batch of samples; one without rows of a sample that is there for its form.

    joined  data parts' batches are joined along dim 0: that they may be is checked with the first batch
    """

    collate: Collate
    joined: bool = False

    def __call__(self, found: tuple[list[Any], bool]) -> Any:
        samples, form = found
        if self.joined and self.collate is not default_collate:
            check_collate(self.collate, samples if len(samples) > 1 else samples * 2)
            self.joined = False
        try:
            batch = self.collate(samples)
        except (TypeError, RuntimeError, KeyError) as error:
            unlike = _unlike(samples) if self.collate is default_collate else ""
            if not unlike:
                raise
            raise NnscalerError(
                "bad_data", f"the rows of a batch cannot be stacked: {unlike}", help=_STACKED
            ) from error
        if not form:
            return batch
        tensors, twice = (tensors_in(rows) for rows in (batch, self.collate(samples * 2)))
        if len(tensors) != len(twice):
            message = f"`collate` makes {len(tensors)} tensors of one row and {len(twice)} of two: a part without rows"
            raise NnscalerError("bad_data", f"{message} has none to leave out", help=_BY_ROWS)
        other = iter(twice)
        return map_tensors(batch, lambda once: _without_rows(once, next(other)))


def _without_rows(once: torch.Tensor, twice: torch.Tensor) -> torch.Tensor:
    """Return what a batch of one sample has, without the row; what a batch of two does not have longer is no row."""
    return once[:0] if once.dim() and once.shape != twice.shape else once


def check_collate(collate: Collate, samples: list[Any]) -> None:
    """Check that the batches of two parts of these samples, joined along dim 0, are the batch of all of them.

    Tensors that a batch has as they are for any samples need not be joined; those of unequal lengths are padded, and
    refused where they meet. `collate` gets copies, for it may take things out of its rows. Raises
    NnscalerError "bad_data".
    """
    half = len(samples) // 2
    samples = samples[: 2 * half]  # parts of as many rows, for those of unequal shapes are taken for padded
    with generators_kept():
        try:
            batches = [collate(deepcopy(rows)) for rows in (samples, samples, samples[:half], samples[half:])]
            whole, again, *parts = (_tensors_by_place(batch) for batch in batches)
        except Exception:  # noqa: BLE001 - it may want more rows than these; what it raises for a batch is told there
            return
    for path, right in whole.items():
        if not all(path in batch for batch in (again, *parts)):
            continue  # a list of rows, which the engine refuses
        found = [part[path] for part in parts]
        if all(one.shape == right.shape for one in found):
            continue  # no rows
        if not same_bits(right, again[path]) or len({one.shape[1:] for one in found}) > 1:  # it draws, or pads
            continue
        joined = [sum(len(one) for one in found), *found[0].shape[1:]]
        if joined != list(right.shape) or not same_bits(torch.cat(found), right):
            differ = f"{joined}" if joined != list(right.shape) else "other values"
            message = f"{path} is {list(right.shape)} of {len(samples)} rows, and {differ}"
            raise NnscalerError(
                "bad_data",
                "`collate` makes another batch of all rows than of those of two data parts, which are joined along dim "
                f"0: {message} where they are joined",
                help=_BY_ROWS,
            )


def _tensors_by_place(batch: Any) -> dict[str, torch.Tensor]:
    return {path: leaf for path, leaf in leaves_of(batch) if isinstance(leaf, torch.Tensor)}


def _unlike(samples: list[Any]) -> str:
    """Say in what samples are not alike that cannot be stacked; "" where that is not seen."""
    known: dict[str, str] = {}
    for number, sample in enumerate(samples):
        leaves = dict(leaves_of(sample))
        for path, leaf in leaves.items():
            kind = f"of shape {list(leaf.shape)}" if hasattr(leaf, "shape") else type(leaf).__name__
            if known.setdefault(path, kind) != kind or leaf is None:
                first = f", and that of row 0 is {known[path]}" if known[path] != kind else ""
                return f"{path or 'the row'} of row {number} is {kind}{first}"
        if number and leaves.keys() != known.keys():
            return f"row {number} has {', '.join(leaves)}, and row 0 {', '.join(known)}"
    return ""
