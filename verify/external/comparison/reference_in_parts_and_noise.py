"""The plain model run in other ways: in micro-batches, and with other rounding.

The plain model in parts: what pipelines and accumulation compute where micro-batches couple their rows.

How far the plain model moves by rounding alone: what a right program's values may differ by.

In float64 the bound of `verify.results.float64_tolerance` decides, and noise is measured only where something exceeds
it. In narrower dtypes the truth is the model in float64 from values of the dtype, and noise is the largest distance
from it of some runs of the model in the dtype: as it is, in the data parts of the program, with parameters moved by a
unit in the last place, sums taken in another order, and choices among nearly equal values made otherwise
(`verify.programs.low_precision`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor, nn

from nnscaler.errors import NnscalerError
from nnscaler.runtime.tensor_bits_and_differences import difference
from verify.external.program import ExternalProgram
from verify.external.reference import (
    PieceOfStep,
    PlainReference,
    data_parts,
    mean_over_pieces,
    row_count,
    run_reference,
)
from verify.programs.causes.wrong_tensor import Cause
from verify.programs.low_precision.noise_statistics import NearTies, moved_model, rounded_model
from verify.programs.low_precision.reassociation_mode import Reassociated
from verify.results.float64_tolerance import Key, Tolerance

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


# Rounding.


DRAWS = 3  # runs with moved parameters
PARTS = (2, 3, 4)  # in which a sum may be computed
UNKNOWN = "how far rounding alone moves it is not known, for no run with other rounding ended well"
HALF = 0.5  # of a unit is lost where a value is rounded, although no draw may show it: they may all round alike


def rounded(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Return the model with values of the dtype."""
    return model if dtype == torch.float64 else rounded_model(model, dtype)


def measure(program: ExternalProgram, model: nn.Module, truth: PlainReference, dtype: torch.dtype) -> Tolerance:
    """Measure the noise of `dtype` around `truth`, which is float64 from the same values."""
    noise = largest_distances(_draws(program, model, truth, dtype))
    return Tolerance(noise, torch.finfo(dtype).eps, exact=dtype == torch.float64)


def largest_distances(runs: Iterable[tuple[PlainReference, PlainReference]]) -> dict[Key, float]:
    """Return how far each tensor of a run is at most from the same one of the run beside it."""
    noise: dict[Key, float] = {}
    for run, right in runs:
        for key, value in _distances(run, right):
            noise[key] = max(noise.get(key, 0.0), value)
    return noise


def _draws(
    program: ExternalProgram, model: nn.Module, truth: PlainReference, dtype: torch.dtype
) -> Iterator[tuple[PlainReference, PlainReference]]:
    """Yield runs of the plain model in the dtype, each with what it would be in float64.

    Ranks sum in parts, in another order, and the mean over data parts cancels what is large in each of them: a run in
    the parts of the program has the noise of that, whether or not the mean over parts is the loss of the whole batch.
    """
    generator = torch.Generator().manual_seed(0)
    parted = replace(program, reference="parts")

    def run(how: ExternalProgram, one: nn.Module, which: torch.dtype) -> PlainReference:
        rate = truth.learning_rate
        return run_reference(how, one, truth.batch, steps=len(truth.steps), dtype=which, learning_rate=rate)

    narrow = dtype != torch.float64
    programs = [(program, truth)]
    if program.data_axes and program.reference != "parts":
        programs.append((parted, run(parted, model, torch.float64)))
    for how, right in programs:
        yield run(how, model, dtype), right
        for draw in range(DRAWS):
            moved = moved_model(model, dtype, generator)
            with ExitStack() as stack:
                if narrow:
                    stack.enter_context(NearTies(generator))
                if narrow and draw:
                    stack.enter_context(Reassociated(generator, PARTS))
                yield run(how, moved, dtype), right


def _distances(run: PlainReference, truth: PlainReference) -> Iterator[tuple[Key, float]]:
    """Yield how far each tensor of a run is from the same one of another run."""
    space = truth.space
    for number, (found, right) in enumerate(zip(run.steps, truth.steps, strict=True)):
        yield ("loss", number, ""), difference(found.loss.double(), right.loss.double()).relative
        if found.norm is not None and right.norm is not None:
            yield ("norm", number, ""), difference(found.norm.double(), right.norm.double()).relative
        families = (("gradient", found.gradients, right.gradients), ("parameter", found.parameters, right.parameters))
        for kind, a, b in families:
            scale = space.family_scale(kind, b)
            for name in space.names:
                whole = space.whole(name)
                if len(whole):
                    one, two = _finite(a[whole.start : whole.stop]), _finite(b[whole.start : whole.stop])
                    what = space.kinds[name] if kind == "parameter" else kind
                    yield (what, number, name), difference(one, two, 0.0 if what == "buffer" else scale).relative


def _finite(values: Tensor) -> Tensor:
    return values.nan_to_num(0.0)
