"""Try the batch with unequal numbers of labels in its data parts, or micro-batches: the loss ignores the others.

A mean over labels is a sum and a count. A program that takes the mean of its parts' means is right as long as all parts
count as many labels, and a padded batch may do so by chance. So a batch that ignores some labels is tried once more,
with ever more of them ignored from row to row. Parts are the data parts; where there is one, they are micro-batches, in
any number that divides the rows. What a tensor of the batch ignores is a value of it:

    labels   the `ignore_index` of a cross entropy that the plain model calls, and a negative constant: a loss that its
             author has written by hand tests for one
    a mask   of 0 and 1: the zeros. A mask without a zero is one too, for why else is it there

Which tensor is which the plain model says: with more of them ignored its gradient is no longer the mean over the data
parts. A mask of its attention, or a target of 0 and 1, leaves that mean as it is, and stays. So do labels that all
count: their program may rely on that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from nnscaler.errors import NnscalerError
from nnscaler.exception_in_one_line import in_one_line
from nnscaler.runtime.nested_values import map_tensors, tensors_in
from nnscaler.runtime.tensor_bits_and_differences import difference
from nnscaler.tracing.export.independent_module_copies import copied_with_hooks
from verify.external.program import Batch, ExternalProgram
from verify.external.reference import (
    PlainReference,
    computing_in,
    copied,
    data_parts,
    mean_over_pieces,
    piece_of_step,
    row_count,
    run_reference,
)

NAME = "unequal labels"
_LOSSES = (torch.ops.aten.nll_loss_forward.default, torch.ops.aten.nll_loss2d_forward.default)
_UNEQUAL = 1e-6  # a relative difference of gradients that no rounding of float64 makes


@dataclass(frozen=True)
class UnequalLabels:
    """A step to try beside the user's own batch.

    truth    the plain model's step on a batch in which data parts count different numbers of labels; None where there
             is nothing to try, or the user's own batch does so
    counted  of which they count different numbers: "labels"
    why      something was not tried, where a reader should know
    """

    truth: PlainReference | None = None
    counted: str = "labels"
    why: str | None = None


@dataclass(frozen=True)
class _Ignoring:
    """A tensor of the batch that may hold labels or a mask.

    number   of the tensor, in the order in which they stand
    ignored  value that does not count
    counted  what the others are, in words
    splits   into how many parts the rows may be divided
    """

    number: int
    tensor: Tensor
    ignored: int
    counted: str
    splits: tuple[int, ...]

    @property
    def thinned(self) -> Tensor:
        """Return the tensor with more of it ignored."""
        return _thinned(self.tensor, self.ignored, self.splits)

    @property
    def equal(self) -> bool:
        """Return whether as much of it counts in each part."""
        return _equal(self.tensor, self.ignored, self.splits)

    def replaced_in(self, batch: Batch) -> Batch:
        """Return the batch with more of the tensor ignored."""
        order = iter(range(len(tensors_in(batch))))
        thinned = self.thinned
        return map_tensors(batch, lambda value: thinned if next(order) == self.number else value)


def unequal_labels(program: ExternalProgram, model: nn.Module, reference: PlainReference) -> UnequalLabels:
    """Find what the plain model's loss ignores in the batch of `reference`, and let data parts count other numbers."""
    parts, batch = data_parts(program), reference.batch
    rows = row_count(batch)
    splits = (parts,) if parts > 1 else tuple(n for n in range(2, rows + 1) if rows % n == 0)
    if not splits:
        return UnequalLabels()
    entropies = _indices_ignored(program, model, batch)
    plain = _Plain(program, model, reference.learning_rate or None, splits[0])
    tried: list[_Ignoring] = []
    told: list[str] = []
    unequal = False
    for one in _candidates(batch, entropies, splits):
        truth = plain.step_on(one.replaced_in(batch))
        if isinstance(truth, str):
            told.append(truth)
        elif plain.differs_from_mean_of_parts(truth):
            tried, unequal = [*tried, *([one] if one.equal else [])], unequal or not one.equal
    for chosen in (tried, tried[:1]):  # all at once may leave nothing that counts, or as much in each part
        changed = batch
        for one in chosen:
            changed = one.replaced_in(changed)
        truth = plain.step_on(changed) if chosen else ""
        if not isinstance(truth, str) and plain.differs_from_mean_of_parts(truth):
            counted = " and ".join(dict.fromkeys(one.counted for one in chosen))
            return UnequalLabels(truth, counted, next(iter(told), None))
    if parts == 1 or unequal or not (told or entropies or any(not t.is_floating_point() for t in tensors_in(batch))):
        return UnequalLabels()
    loss = "the cross entropy ignores no label of `batch()`, or has too few that count"
    hand = "no tensor of `batch()` was found to hold labels that the loss ignores, or a mask that it counts"
    return UnequalLabels(why=told[0] if told else loss if entropies else hand)


@dataclass(frozen=True)
class _Plain:
    """Runs the plain model for one step on other batches."""

    program: ExternalProgram
    model: nn.Module
    learning_rate: float | None
    parts: int

    def step_on(self, batch: Batch) -> PlainReference | str:
        """Return the step on a batch; why there is none, where the model raises on it or its loss is not finite."""
        rate = self.learning_rate
        try:
            return run_reference(self.program, self.model, batch, steps=1, dtype=torch.float64, learning_rate=rate)
        except Exception as error:  # noqa: BLE001 - whatever the model raises on rows without labels
            return error.message if isinstance(error, NnscalerError) else in_one_line(error)

    def differs_from_mean_of_parts(self, truth: PlainReference) -> bool:
        """Return whether the gradient of the whole batch is another one than the mean over the parts."""
        piece = piece_of_step(self.program, self.model, truth)
        whole, whole_gradient = piece(0, 0, 1)
        try:
            loss, gradient = mean_over_pieces(piece, 0, self.parts)
        except Exception:  # noqa: BLE001 - whatever a model raises that takes no part of the batch
            return False
        pairs = ((loss, whole), (gradient.nan_to_num(0.0), whole_gradient.nan_to_num(0.0)))
        return any(difference(mean, right).relative > _UNEQUAL for mean, right in pairs)


def _candidates(batch: Batch, entropies: Sequence[int], splits: tuple[int, ...]) -> Iterator[_Ignoring]:
    """Yield the tensors that have rows and a value that may not count, and of which some can be ignored."""
    rows = row_count(batch)
    for number, tensor in enumerate(tensors_in(batch)):
        if tensor.dim() == 0 or len(tensor) != rows or tensor.is_complex() or not tensor.numel():
            continue
        values: dict[int, str] = {}
        if not (tensor.is_floating_point() or tensor.dtype == torch.bool):
            negative = tensor[tensor < 0].unique().tolist()
            constants = [*entropies, *(negative if len(negative) == 1 else [])]
            values = {value: "labels" for value in constants if value in tensor}
        if bool(((tensor == 0) | (tensor == 1)).all()):
            values.setdefault(0, "ones in a mask")
        for ignored, counted in values.items():
            found = _Ignoring(number, tensor, ignored, counted, splits)
            if not torch.equal(tensor, found.thinned):
                yield found


class _Watch(TorchDispatchMode):
    """Note each `ignore_index` of a cross entropy."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ignored: dict[int, None] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func in _LOSSES:
            self.ignored[args[4]] = None
        return func(*args, **(kwargs or {}))


def _indices_ignored(program: ExternalProgram, model: nn.Module, batch: Batch) -> tuple[int, ...]:
    """Run the plain model, and return each `ignore_index` of its cross entropies; () where it raises."""
    mine, watch = copied_with_hooks(model), _Watch()
    with torch.random.fork_rng(devices=[]), computing_in(mine, torch.float64), watch:
        try:
            (program.reference_step or program.step)(mine, copied(batch, torch.float64))
        except Exception:  # noqa: BLE001 - whatever the model raises under a mode that sees its operators
            return ()
    return tuple(watch.ignored)


def _thinned(values: Tensor, ignored: int, splits: Sequence[int]) -> Tensor:
    """Return the values with fewer that count, in the first way that leaves parts with different numbers of them; the
    values themselves where no way does."""
    for made in _ways_to_thin(values, ignored, splits[0]):
        if not (torch.equal(made, values) or _equal(made, ignored, splits)):
            return made
    return values


def _ways_to_thin(values: Tensor, ignored: int, parts: int) -> Iterator[Tensor]:
    """Yield the values with ever fewer that count from row to row, the last row keeping all and each at least one; from
    part to part, for a row may hold one value; and with one left in the first part, for shares may come out equal."""
    rows, several, first = values.clone(), values.clone(), values.clone()
    for number, row in enumerate(rows if values.dim() > 1 else ()):
        ignore_some(row, ignored, (number + 1) / len(values))
    yield rows
    for number, piece in enumerate(several.chunk(parts)):
        ignore_some(piece, ignored, (number + 1) / parts)
    yield several
    ignore_some(first.chunk(parts)[0], ignored, 0.0)
    yield first


def _equal(values: Tensor, ignored: int, splits: Sequence[int]) -> bool:
    """Return whether as much counts in each part, for some number of parts."""
    return any(len({int((piece != ignored).sum()) for piece in values.chunk(parts)}) == 1 for parts in splits)


def ignore_some(values: Tensor, ignored: int, share: float) -> None:
    """Let a share of what counts stay, at least one of them, and ignore the others."""
    flat = values.flatten()
    counted = (flat != ignored).nonzero().flatten()
    flat[counted[max(1, int(len(counted) * share)) :]] = ignored
    values.copy_(flat.view_as(values))
