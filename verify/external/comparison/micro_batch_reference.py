"""The plain model in parts: what pipelines and accumulation compute where micro-batches couple their rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache

from torch import Tensor

from nnscaler.errors import NnscalerError
from verify.external.program import ExternalProgram
from verify.external.reference import PieceOfStep, PlainReference, data_parts, mean_over_pieces, row_count
from verify.programs.causes.wrong_tensor import Cause

MicroMeans = Callable[[int], Iterator[tuple[int, Tensor, Tensor]]]
MEAN_OF_MEANS = Cause(
    "mean_of_means",
    "it is the mean over the data parts, each by itself, and that is not the loss of the whole batch: the parts have "
    'unequal numbers of terms, or couple their rows; if it is meant, say `reference = "parts"`',
)
_MOST = 16  # micro-batches of the whole batch: the plain model runs on each


def micro_means(program: ExternalProgram, reference: PlainReference, run: PieceOfStep) -> MicroMeans:
    """Return the function of a step that yields, for each number of equal micro-batches that the rows of a data part
    divide into, that number and the means over all of them: of losses, and of gradients over all addresses.

    What raises in the plain model (a batch norm of one row) is left out.
    """
    parts = data_parts(program)
    rows = row_count(reference.batch) // parts
    counts = [n for n in range(2, rows + 1) if rows % n == 0 and parts * n <= _MOST]

    @cache
    def mean(step: int, count: int) -> tuple[Tensor, Tensor] | None:
        try:
            return mean_over_pieces(run, step, parts * count)
        except (NnscalerError, RuntimeError, ValueError, TypeError, IndexError):
            return None

    def means(step: int) -> Iterator[tuple[int, Tensor, Tensor]]:
        for count in counts:
            found = mean(step, count)
            if found is not None:
                yield count, *found

    return means


def cause_by_micro_batches(means: MicroMeans, step: int, agrees: Callable[[Tensor, Tensor], bool]) -> Cause | None:
    """Return the cause where a value agrees with the mean over micro-batches; `agrees` is told loss and gradients."""
    for count, loss, gradients in means(step):
        if agrees(loss, gradients):
            text = (
                f"it is the mean over {count} micro-batches, each by itself, and that is not the loss of the whole "
                "batch: they couple their rows (a batch norm, or dim 0 is not the batch), or have unequal numbers of "
                "terms; if it is meant, let `reference_step` do the same"
            )
            return Cause("micro_batches", text)
    return None
