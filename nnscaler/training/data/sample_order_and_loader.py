"""Order the samples of a run, knowing nothing of plans, and load each data part's rows of each global batch.

The order of an epoch is a function of (seed, epoch). A batch is a run of that order, and a data part has the rows of it
that the program cuts for it: a contiguous block, the larger ones first where the batch does not divide. So the same
samples meet in the same step under every plan, and a run's place in it, which is saved, knows no parts or workers.
"""

from __future__ import annotations

import copy
import hashlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, count, islice, pairwise
from typing import Any, cast
from unittest.mock import patch
from zlib import crc32

import torch
from torch.utils.data import IterableDataset, Sampler, default_collate, get_worker_info
from torch.utils.data._utils import worker as worker_loop
from torchdata.stateful_dataloader import StatefulDataLoader

from nnscaler.errors import NnscalerError
from nnscaler.model_file import seed_generators
from nnscaler.runtime.nested_values import leaves_of
from nnscaler.runtime.tensor_bits_and_differences import bits_of
from nnscaler.runtime.training.cut_batch import DataPart
from nnscaler.training.check_replicas import ONE_STREAM
from nnscaler.training.data.ended_workers import read_from_workers
from nnscaler.training.data.pack_and_collate_samples import Collate, Collated, pack


def rows_of(part: DataPart, size: int) -> range:
    """Return the part's rows of a batch of `size`: contiguous, of sizes that differ by one, the larger ones first."""
    each, more = divmod(size, part.count)
    start = part.index * each + min(part.index, more)
    return range(start, start + each + (part.index < more))


@dataclass(frozen=True)
class SampleOrder:
    """The samples of each batch.

    batch_size  rows of a global batch
    shuffle     by (seed, epoch)
    seed        of the shuffle
    drop_last   leave out a last batch that is short
    """

    batch_size: int
    shuffle: bool = False
    seed: int = 0
    drop_last: bool = False

    def end(self, size: int) -> int:
        """Return how many of `size` samples an epoch uses."""
        return size - size % self.batch_size if self.drop_last else size

    def indices(self, epoch: int, size: int) -> torch.Tensor:
        """Return the samples of an epoch in their order."""
        if not self.shuffle:
            return torch.arange(size)
        key = hashlib.sha256(f"{self.seed}, {epoch}".encode()).digest()[:8]
        generator = torch.Generator().manual_seed(int.from_bytes(key) >> 1)  # seeds are of 63 bits
        return torch.randperm(size, generator=generator)


class _Place:
    """Where a run is in its data: `samples` of `epoch` were handed out, of all parts together. It moves.

    `stream`: the state of an iterable dataset that has one, after those samples. `at_end`: they are all of the epoch's.
    """

    def __init__(self) -> None:
        self.start(0)

    def start(self, epoch: int) -> None:
        """Go to the start of an epoch."""
        self.epoch, self.samples, self.at_end = epoch, 0, False
        self.stream: Any = None


class _Batches(Sampler[list[int]]):
    """The indices of this part's rows of each batch of an epoch, from the place on.

    A part that has no row of a short batch gets the complement of an index: that sample for its form alone.
    """

    def __init__(self, order: SampleOrder, part: DataPart, size: int, place: _Place) -> None:
        self._order, self._part, self._size, self._place = order, part, size, place

    def __len__(self) -> int:
        return (self._order.end(self._size) + self._order.batch_size - 1) // self._order.batch_size

    def __iter__(self) -> Iterator[list[int]]:
        samples, end = self._order.indices(self._place.epoch, self._size), self._order.end(self._size)
        for start in range(self._place.samples, end, self._order.batch_size):
            batch = samples[start : min(start + self._order.batch_size, end)]
            rows = rows_of(self._part, len(batch))
            yield batch[rows.start : rows.stop].tolist() or [~int(batch[0])]


class _Samples:
    """A map-style dataset that also gives samples for their form alone."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitems__(self, indices: list[int]) -> tuple[list[Any], bool]:
        form = indices[0] < 0
        wanted = [~index for index in indices] if form else indices
        several = getattr(self._dataset, "__getitems__", None)
        return (several(wanted) if several else [self._dataset[index] for index in wanted]), form


class _Stream(IterableDataset[tuple[Any, int, Any, int | None]]):
    """This part's rows of each batch of a stream, the batch's size, and the stream's state after it; with the first one
    that a worker makes, a checksum of the first batch that it read.

    Every part reads the whole stream, and so does each of several worker processes, which make one batch in turn: it is
    not told that there are others, and draws the same random numbers as they.
    """

    def __init__(self, dataset: Any, order: SampleOrder, part: DataPart, collate: Collate, place: _Place) -> None:
        self._dataset, self._order, self._part, self._place = dataset, order, part, place
        self._collate = Collated(collate, part.count > 1)

    def __iter__(self) -> Iterator[tuple[Any, int, Any, int | None]]:
        worker = get_worker_info()
        turn, turns = (0, 1) if worker is None else (worker.id, worker.num_workers)
        if worker is not None:
            seed_generators(worker.seed - worker.id)
        with _as_only_worker():
            rows = self._started()
        first = None
        for number in count():
            with _as_only_worker():
                batch = list(islice(rows, self._order.batch_size))
                state = self._state(rows)
            if not batch or (len(batch) < self._order.batch_size and self._order.drop_last):
                return
            if not number:
                first = _checksum(batch)
            if number % turns == turn:
                mine = rows_of(self._part, len(batch))
                found = (batch[mine.start : mine.stop] or batch[:1], not mine)
                yield self._collate(found), len(batch), state, first
                first = None

    def _started(self) -> Iterator[Any]:
        """Return the samples from the place on."""
        place, own = self._place, hasattr(self._dataset, "load_state_dict")
        if hasattr(self._dataset, "set_epoch"):
            self._dataset.set_epoch(place.epoch)
        if place.stream is not None and own:
            self._dataset.load_state_dict(place.stream)
        rows = iter(self._dataset)
        if place.stream is None:
            next(islice(rows, place.samples, place.samples), None)
        elif not own:
            rows.load_state_dict(place.stream)  # it gave the state
        return rows  # type: ignore[no-any-return]

    def _state(self, rows: Iterator[Any]) -> Any:
        for holder in (self._dataset, rows):
            if hasattr(holder, "state_dict"):
                return copy.deepcopy(holder.state_dict())
        return None


@contextmanager
def _as_only_worker() -> Iterator[None]:
    """While open, a dataset that takes a part of its data by `get_worker_info` takes all of it."""
    with patch.object(worker_loop, "_worker_info", None):
        yield


def _checksum(samples: list[Any]) -> int:
    """Return a number that tells other samples from these."""
    leaves = (leaf for _, leaf in leaves_of(samples))
    bits = (bits_of(x).cpu().numpy().tobytes() if isinstance(x, torch.Tensor) else repr(x).encode() for x in leaves)
    return crc32(b"|".join(bits))


class Loader(StatefulDataLoader):  # type: ignore[misc]  # torchdata has no types
    """The batches of one data part, an epoch for each `iter`, which goes on from where the last one was left.

    `state_dict` is the same on all parts, and any number of them loads it, with any number of worker processes:
    StatefulDataLoader's own, of each worker, would tie a run to their number.

    ends_known  read a stream a batch ahead, so that the last batch of an epoch is known to be the last
    agree       is called on every rank with a checksum of each epoch's first batch of a stream, as this rank read it
    """

    ends_known = False
    agree: Callable[[int], None] | None = None

    def __init__(
        self, dataset: Any, order: SampleOrder, part: DataPart, collate: Collate, options: Mapping[str, Any]
    ) -> None:
        self.order, self.part = order, part
        self._place = _Place()
        self._streams = isinstance(dataset, IterableDataset)
        self._first: int | None = None  # checksum of the epoch's first batch
        self._known = -1 if self._streams else len(dataset)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "'set_vital' is deprecated")  # torchdata 0.11 calls it
            if self._streams:
                stream = _Stream(dataset, order, part, collate, self._place)
                options = {**options, "persistent_workers": False}  # they are told their place when they begin
                super().__init__(stream, batch_size=None, collate_fn=_unchanged, **options)
            else:
                options = {**options, "batch_sampler": _Batches(order, part, self._known, self._place)}
                samples = cast("torch.utils.data.Dataset[Any]", _Samples(dataset))
                super().__init__(samples, collate_fn=Collated(collate, part.count > 1), **options)

    @property
    def epoch(self) -> int:
        """The epoch that the next batch is of; after the last batch of one still that."""
        return self._place.epoch

    @property
    def samples(self) -> int:
        """How many samples of the epoch were handed out, to all parts together."""
        return self._place.samples

    @property
    def completed(self) -> int:
        """How many epochs were handed out to their last batch; of a stream, see `ends_known`."""
        return self._place.epoch + self._place.at_end

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch."""
        self._place.start(epoch)

    def __len__(self) -> int:
        """Return how many batches an epoch has. Raises NnscalerError `bad_data` for a stream: its end tells."""
        if self._streams:
            raise NnscalerError("bad_data", "a stream has no number of batches before it ends", help=_NO_LENGTH)
        return int(super().__len__())

    def left(self, epochs: int) -> int | None:
        """Return how many batches of so many epochs are not handed out; None for a stream: its end tells."""
        rest = self.order.end(self._known) - self.samples
        return None if self._streams else -(-rest // self.order.batch_size) + (epochs - self.epoch - 1) * len(self)

    def __iter__(self) -> Iterator[Any]:
        place, self._first = self._place, None
        batches = read_from_workers(super().__iter__()) if self.num_workers else super().__iter__()
        ahead = self._streams and self.ends_known
        for found, last in _with_last(batches) if ahead else ((batch, False) for batch in batches):
            if self._streams:
                batch, size, place.stream, checksum = found
                self._check_stream(checksum)
                place.samples += size
                place.at_end = last
            else:
                batch, end = found, self.order.end(self._known)
                place.samples = min(place.samples + self.order.batch_size, end)
                place.at_end = place.samples == end
            yield batch
        self.set_epoch(place.epoch + 1)

    def _check_stream(self, checksum: int | None) -> None:
        """Check that all workers and ranks read one stream. Raises NnscalerError "batch_differs"."""
        if checksum is None:
            return
        if self._first is None:
            self._first = checksum
            if self.agree is not None:
                self.agree(checksum)
        elif checksum != self._first:
            raise NnscalerError("batch_differs", "two workers read other samples of the stream", help=ONE_STREAM)

    def state_dict(self) -> dict[str, Any]:
        """Return where the run is, as of the batch that was handed out last: the same on all parts."""
        place = {name: getattr(self._place, name) for name in ("epoch", "samples", "stream", "at_end")}
        return {**place, "seed": self.order.seed, "shuffle": self.order.shuffle, "length": self._known}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go to where a run was. Raises NnscalerError `other_data` where the order there was another one, and some of
        the epoch is left."""
        mine, place = self.state_dict(), self._place
        between = not self._streams and (state_dict["samples"] == 0 or state_dict.get("at_end", False))
        for name, told in _OF_ORDER.items():
            if state_dict.get(name) != mine[name] and (name == "length" or not between):
                message = f"the run was in data with {told} {state_dict.get(name)}, and this loader's is {mine[name]}"
                raise NnscalerError("other_data", f"cannot go on in the middle of an epoch: {message}", help=_OTHER)
        place.epoch, place.samples, place.stream = (state_dict[name] for name in ("epoch", "samples", "stream"))
        place.at_end = state_dict.get("at_end", False)


_OF_ORDER = {"seed": "seed", "shuffle": "shuffle", "length": "a number of samples of"}
_OTHER = "give what the run had, or start from its weights alone, in another folder; in Python also: set_epoch(n)"
_SAVED_BY_US = {"snapshot_every_n_steps": None}
_NO_LENGTH = "count steps instead of epochs"
_STREAM = "shuffle the stream itself, or give a dataset with __len__ and __getitem__"
_FORMS = "a dataset has __len__ and __getitem__, or is a torch.utils.data.IterableDataset"


def _unchanged(batch: Any) -> Any:
    return batch


def _with_last(batches: Iterator[Any]) -> Iterator[tuple[Any, bool]]:
    """Yield each batch, and whether it is the last one: the next one is read before."""
    end = object()
    for batch, following in pairwise(chain(batches, (end,))):
        yield batch, following is end


def loader(
    dataset: Any,
    order: SampleOrder,
    part: DataPart,
    *,
    collate: Collate | None = None,
    workers: int = 0,
    packed: int | None = None,
    **options: Any,
) -> Loader:
    """Return a loader of this part's rows of each global batch of an order.

    `dataset`: map-style or iterable; of an iterable one every part reads the whole stream and takes its rows.
    `packed`: the dataset has documents of tokens, which are packed into rows of this length (`pack`). `workers`:
    processes that read. `options`: what else StatefulDataLoader takes, such as pin_memory and prefetch_factor; workers
    of a stream begin anew in each epoch, persistent or not.
    Random augmentation in a dataset is resumed where it draws from a generator keyed by the sample and its epoch.
    Raises NnscalerError `bad_data`.
    """
    if order.batch_size < 1 or workers < 0:
        what = f"batch_size {order.batch_size}" if order.batch_size < 1 else f"workers {workers}"
        raise NnscalerError("bad_data", f"{what}: a batch has at least 1 row, and workers are not fewer than 0")
    if packed is not None:
        dataset = pack(dataset, packed)
    if isinstance(dataset, IterableDataset):
        if order.shuffle:
            raise NnscalerError("bad_data", "an iterable dataset comes in its own order: no shuffle", help=_STREAM)
    elif not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise NnscalerError("bad_data", f"a {type(dataset).__name__} is no dataset", help=_FORMS)
    elif len(dataset) == 0:
        message = f"the dataset, a {type(dataset).__name__}, has no samples: its len() is 0"
        raise NnscalerError("bad_data", message, help="look at what finds its files, or leaves rows out")
    elif order.drop_last and len(dataset) < order.batch_size:
        message = f"the dataset has {len(dataset)} samples, a batch {order.batch_size}, and short ones are dropped"
        raise NnscalerError("bad_data", message, help="take a smaller batch, or keep the last one")
    return Loader(dataset, order, part, collate or default_collate, {**_SAVED_BY_US, "num_workers": workers, **options})
