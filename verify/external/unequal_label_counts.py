"""Labels that a loss ignores: the batch with another number of counted labels in each data part.

A mean over labels is a sum and a count. A program that takes the mean of its parts' means is right as long as all parts
count as many labels, and a padded batch may do so by chance. So a batch that ignores some labels is tried once more,
with ever more of them ignored from part to part. A batch that ignores none stays: its program may rely on that.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from verify.external.program import Batch, ExternalProgram
from verify.external.reference import computing_in, copied, data_parts, map_batch, row_count, tensors_of

NAME = "unequal labels"
_LOSSES = (torch.ops.aten.nll_loss_forward.default, torch.ops.aten.nll_loss2d_forward.default)


@dataclass(frozen=True)
class UnequalLabels:
    """A batch to try beside the user's own.

    batch  in which data parts count different numbers of labels; None where there is nothing to try, or it does so
    why    it was not tried, where a reader should know
    """

    batch: Batch | None = None
    why: str | None = None


def unequal_labels(program: ExternalProgram, model: nn.Module, batch: Batch) -> UnequalLabels:
    """Find the labels of the plain model's cross entropy in the batch, and let data parts count different numbers."""
    parts, rows = data_parts(program), row_count(batch)
    counted = _counted(program, model, batch) if parts > 1 else {}
    for number, tensor in enumerate(tensors_of(batch)):
        for ignored, right in counted.items():
            if tensor.is_floating_point() or tensor.dim() == 0 or len(tensor) != rows or ignored not in tensor:
                continue
            changed = _replaced(batch, number, _thinned(tensor, ignored, parts))
            after = _counted(program, model, changed).get(ignored)
            if after is not None and after < right:  # it holds the labels
                return UnequalLabels(None if len(set(_counts(tensor, ignored, parts))) > 1 else changed)
    why = "the cross entropy ignores no label of `batch()`, or has too few that count"
    return UnequalLabels(why=why if counted else None)


class _Watch(TorchDispatchMode):
    """Count the labels that a cross entropy does not ignore, by its `ignore_index`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counted: dict[int, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func in _LOSSES:
            _, target, _, _, ignored = args
            self.counted[ignored] = self.counted.get(ignored, 0) + int((target != ignored).sum())
        return func(*args, **(kwargs or {}))


def _counted(program: ExternalProgram, model: nn.Module, batch: Batch) -> dict[int, int]:
    """Run the plain model, and return how many labels count for each `ignore_index`; {} where it raises."""
    mine, watch = copy.deepcopy(model), _Watch()
    with torch.random.fork_rng(devices=[]), computing_in(mine, torch.float64), watch:
        try:
            (program.reference_step or program.step)(mine, copied(batch, torch.float64))
        except Exception:  # noqa: BLE001 - whatever the model raises on labels that are none: they are left as they were
            return {}
    return watch.counted


def _counts(labels: Tensor, ignored: int, parts: int) -> list[int]:
    return [int((piece != ignored).sum()) for piece in labels.chunk(parts)]


def _thinned(labels: Tensor, ignored: int, parts: int) -> Tensor:
    """Return the labels with ever fewer ignored from part to part: the last keeps all, and each keeps at least one."""
    changed = labels.clone()
    for number, piece in enumerate(changed.chunk(parts)):
        values = piece.flatten()
        counted = (values != ignored).nonzero().flatten()
        values[counted[max(1, len(counted) * (number + 1) // parts) :]] = ignored
        piece.copy_(values.view_as(piece))
    return changed


def _replaced(batch: Batch, number: int, tensor: Tensor) -> Batch:
    """Return the batch with another tensor in the place of that number, in the order in which they stand."""
    order = iter(range(len(tensors_of(batch))))
    return map_batch(batch, lambda value: tensor if next(order) == number else value)
