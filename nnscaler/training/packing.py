"""Documents of tokens, packed: their concatenation, cut into rows.

Every token is read once per epoch and, but for the first of its document, predicted once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.data import IterableDataset

from nnscaler.errors import NnscalerError

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
