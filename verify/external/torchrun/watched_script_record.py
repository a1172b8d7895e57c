"""The record of a script's process: the data that it took in, and what its optimizers saw and made."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, cast

import torch
from torch import Tensor
from torch.utils.data import DistributedSampler

from verify.external.parameter_mapping import Addresses
from verify.programs.module_tensors_by_every_name import Kind

Tensors = tuple[Tensor, ...]
Settings = Mapping[str, float | tuple[float, ...]]  # of a group of parameters
# what does not fit: rows that ranks mixed up or lost, values that replicas start from, or anything else
Mismatch = Literal["mixed_rows", "unequal_starts", "other"]
Events = Mapping[str, tuple[Tensors, ...]]  # "batch 0", "input" or "target" -> what came in, in order


@dataclass(frozen=True)
class Start:
    """How a script is started on one rank.

    words   of the command line after `torchrun`: a file, or `-m` and a module, and its arguments
    rank    and how many `ranks` there are
    store   a file through which they find each other; None: torch is told elsewhere how
    steps   of each optimizer that are watched
    double  every floating-point tensor is float64
    vary    the data are made others on every rank of another number; None: they stay
    devices that torch.accelerator counts; 0: one for each rank
    dropout is on
    louder  factor of every gradient
    reordered
            a seed: sums in narrow dtypes are taken in parts, and in an order that it draws
    kept    the share of labels that count which still do; below 1, others become the one that is ignored
    ignored values of labels that a loss may ignore, beside a negative one
    """

    words: tuple[str, ...]
    rank: int
    ranks: int
    store: Path | None
    steps: int
    double: bool
    vary: int | None = None
    devices: int = 0
    dropout: bool = False
    louder: float = 1.0
    reordered: int | None = None
    kept: float = 1.0
    ignored: tuple[int, ...] = ()


@dataclass(frozen=True)
class HeldInScript:
    """A parameter or buffer on one rank.

    name    of its attributes, without those of wrappers; after "model 2: " for a second model
    whole   shape of the whole tensor, as far as the rank knows: that of the local one for a plain tensor
    shape   of the local tensor
    places  of the local elements in the whole tensor, flattened; None where its layout does not say
    layout  DTensor's placements in words, or "plain"
    trained it requires a gradient
    tied    its other names
    kind    a "buffer" is also what a module holds that takes no part in training
    filled  it is an optimizer's alone, and the script fills in its gradient
    """

    name: str
    whole: tuple[int, ...]
    shape: tuple[int, ...]
    places: Addresses | None
    layout: str
    trained: bool
    tied: tuple[str, ...] = ()
    kind: Kind = "parameter"
    filled: bool = False


@dataclass(frozen=True)
class Clipped:
    """One call of a function of torch's that clips gradients.

    kind   "norm" or "value"
    size   the norm, or the largest local element, before
    limit  beyond which they are clipped
    own    the norm of the process' own gradients at that time, which have been averaged with others; None of others
    """

    kind: str
    size: float
    limit: float
    own: float | None = None


@dataclass(frozen=True)
class ReadNumber:
    """A number of Python that a script reads from a tensor.

    place     the script's line; None where it has none
    of_ranks  what it was read from is computed of `torch.arange` over as many numbers as there are ranks: where a rank
              stands in a grid of them, or data that happen to be as many
    """

    value: float
    place: str | None = None
    of_ranks: bool = False


def unlike_numbers(one: Sequence[ReadNumber], other: Sequence[ReadNumber]) -> Iterator[tuple[ReadNumber, ReadNumber]]:
    """Yield the pairs of numbers that two runs over different numbers of ranks read at the same line, and that differ.

    Where a rank stands in a grid of all ranks is no number of the data. A grid has one element on one rank; what has as
    many as before is a table of the script's own.
    """
    places: dict[str | None, list[ReadNumber]] = {}
    for number in other:
        places.setdefault(number.place, []).append(number)
    left = {place: iter(numbers) for place, numbers in places.items()}
    for number in one:
        pair = next(left.get(number.place, iter(())), None)
        if pair is not None and pair.value != number.value and not (pair.of_ranks and number.of_ranks):
            yield number, pair


@dataclass(frozen=True)
class SampledRows:
    """The rows that a DistributedSampler gives to its rank in the first epoch.

    rows      by their numbers in the data set
    padded    how many rows some rank is given once more, so that all have as many
    replicas  over which it divides the rows
    shuffle   its seed and epoch, added; None where it does not shuffle
    told      the script has told it the number of an epoch before it went through these rows, or other ones
    again     it shuffles, is never told, and a later epoch has the same rows in the same order
    """

    rows: Tensor
    padded: int
    replicas: int
    shuffle: int | None
    told: bool = False
    again: bool = False

    @staticmethod
    def of(sampler: object) -> SampledRows | None:
        """Return those of a loader's sampler; None of another one, which to ask may change."""
        if type(sampler) is not DistributedSampler:
            return None
        shuffle = sampler.seed + sampler.epoch if sampler.shuffle else None
        padded = max(0, sampler.total_size - len(cast(Sized, sampler.dataset)))
        return SampledRows(torch.tensor(list(sampler)), padded, sampler.num_replicas, shuffle)


class SampledEpochs:
    """Notes what samplers give to a rank, each time that a script goes through a loader.

    found  by the kind of the data: what is known of the first epoch
    """

    def __init__(self) -> None:
        self.found: dict[str, SampledRows] = {}
        self._told: set[int] = set()  # samplers that have been told a number
        self._ended: set[str] = set()  # kinds of which an epoch has come to its end: others may only look at a batch

    def begin(self, kind: str, sampler: object) -> None:
        """Note that an epoch begins, by this loader's sampler."""
        now = SampledRows.of(sampler)
        if now is None:
            return
        first = self.found.setdefault(kind, now)
        told = first.told or id(sampler) in self._told
        shuffled_again = not told and now.shuffle is not None and kind in self._ended and len(now.rows) > 1
        again = first.again or (shuffled_again and torch.equal(now.rows, first.rows))
        self.found[kind] = replace(first, told=told, again=again)

    def end(self, kind: str) -> None:
        """Note that an epoch ends: every batch was taken."""
        self._ended.add(kind)

    def changes(self) -> list[tuple[object, str, Callable[..., None]]]:
        """Return what stands for the method by which samplers are told the number of an epoch."""
        tell = DistributedSampler.set_epoch

        def set_epoch(this: DistributedSampler[object], epoch: int) -> None:
            self._told.add(id(this))
            tell(this, epoch)

        return [(DistributedSampler, "set_epoch", set_epoch)]


@dataclass(frozen=True)
class SeenStep:
    """One step of the script's optimizers. Tensors are local, by name.

    losses     scalars whose backward pass was run since the step before
    gradients  when the optimizer was called: clipped, if the script clips; None where there is none
    own        gradients of this process' own data, before any average with others; empty where nothing was averaged
    state      parameters and buffers after the step, when they are used again; after the last one, at its end
    settings   numbers of each group of parameters: learning rate, momentum and so on
    taken      data event -> how many of it had come in before the step
    norm       of the gradients that torch's functions clipped before the step; None where they clipped none
    late       gradients after the step, as far as it made them others
    unread     parameters whose gradient no optimizer of this rank reads
    clipped    calls of torch's functions that clip gradients, before the step
    loss_unit  of rounding of the losses: the largest of their dtypes
    """

    losses: Tensors
    gradients: Mapping[str, Tensor | None]
    own: Mapping[str, Tensor | None]
    state: Mapping[str, Tensor]
    settings: tuple[Settings, ...]
    taken: Mapping[str, int]
    norm: Tensor | None = None
    late: Mapping[str, Tensor] = field(default_factory=dict)
    unread: frozenset[str] = frozenset()
    clipped: tuple[Clipped, ...] = ()
    loss_unit: float = 0.0


@dataclass(frozen=True)
class ScriptRecord:
    """A run of the script in one process, until it had made enough steps or ended.

    rank     in torchrun's numbers
    held     its parameters and buffers
    start    these before the first step, local, by name
    steps    of its optimizers
    events   the data
    groups   ranks of each process group that it made
    notes    what was done for it: a device mapped, a draw left out
    drew     a forward pass drew random numbers
    dtype    that its parameters have
    unseen   what was changed and cannot be compared
    replica  its number among the ranks whose gradients DDP or FSDP averages, and how many these are; None without them
    dropped  it would drop something, and was kept from it
    draws    random numbers that it drew for itself, outside of its models
    numbers  that it read from tensors, outside of its models and not of what they return
    measured it took norms of gradients by itself, outside of optimizers and of torch's clipping
    ignored  each `ignore_index` of its cross entropies
    trained  kind and number of the data, inputs of models and targets, that a backward pass went through; it is not
             known of schedules of pipelines
    sampled  what samplers give to this rank, by the kind of the data
    stopped  it had made enough steps, and takes part in nothing more
    """

    rank: int
    held: tuple[HeldInScript, ...]
    start: Mapping[str, Tensor]
    steps: tuple[SeenStep, ...]
    events: Events
    groups: tuple[tuple[int, ...], ...]
    notes: tuple[str, ...]
    drew: bool
    dtype: torch.dtype
    unseen: tuple[str, ...] = ()
    replica: tuple[int, int] | None = None
    dropped: bool = False
    draws: Tensors = ()
    numbers: tuple[ReadNumber, ...] = ()
    measured: bool = False
    ignored: tuple[int, ...] = ()
    trained: frozenset[tuple[str, int]] = frozenset()
    sampled: Mapping[str, SampledRows] = field(default_factory=dict)
    stopped: bool = False


class Stopped(BaseException):
    """Raised in the script when enough was seen. No script catches it by `except Exception`."""


class Unmatched(BaseException):
    """Raised in a run on one rank whose data cannot be matched with that of the ranks. `args[0]` says why."""

    def __init__(self, why: str, mismatch: Mismatch = "other") -> None:
        super().__init__(why)
        self.mismatch = mismatch
