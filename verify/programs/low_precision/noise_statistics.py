"""The noise of a dtype on this very model: how far runs of the model itself are from the exact result.

The truth is the untraced model in float64, from parameters, buffers and inputs that are values of the dtype. A draw is
a run of the same model in the dtype, with one of the disturbances that a right program may have as well:

    plain        the model as it is: its distance from float64
    reassociated its sums in another order and in parts (`verify.programs.low_precision.reassociation_mode`)
    moved        parameters and inputs moved at random by -1, 0 or +1 unit in the last place; and where the first draws
                 have not explained an error, what is chosen among nearly equal values chosen otherwise
                 (`NearTies`)

The recipe of a draw is the program's. A program of a float32 model that runs in another precision has every floating
dtype replaced, so a float32 island (the norm of a Llama) is none, neither there nor in a draw; in float16 some models
overflow without. A model whose parameters are in the dtype already keeps its islands on both sides. In one thing the
program is better: it adds the gradients of micro-batches and ranks in float32 and rounds the sum, where a draw adds
its parts in the dtype. So noise is measured a little too large there, never too small; with two parts both round to
the same.

Differences are measured in three numbers that see different errors:

    greatest   the largest absolute difference, relative to the largest value: one wrong element
    norm       the Frobenius norm of the difference, relative to the tensor's own: permuted, missing or foreign pieces
    factor     how far the best factor `a = f e` is from 1: everything a little too large. Rounding errors of N elements
               cancel in it, so that it sees errors that are sqrt(N) times smaller than the noise of one element.

Each relates to the larger of the tensor itself and a thousandth of its family (see `verify.results.float64_tolerance`):
a gradient that is zero in theory has no scale of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from math import inf, isfinite, sqrt
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from op_registry.call import dtype_name

from nnscaler.runtime.tensor_bits_and_differences import (
    FAMILY_SHARE,
    FILL,
    as_real,
    difference,
    family_scale,
    is_finite,
    is_whole,
    real_numbers,
)
from nnscaler.tracing.export.independent_module_copies import copied_with_hooks
from nnscaler.tracing.float64_run import exact
from nnscaler.tracing.sample_inputs import SampleInputs
from verify.programs.eager_reference import Trajectory, run_reference
from verify.programs.low_precision.reassociation_mode import Reassociated, RulesMode
from verify.results.float64_tolerance import Key

NAMES = ("greatest", "norm", "factor")
Statistics = tuple[float, float, float]


def statistics(actual: Tensor, expected: Tensor, family: float) -> Statistics:
    """Return the three numbers, in the order of NAMES; infinity for unequal shapes, and where `actual`
    is not finite."""
    greatest = difference(actual, expected, family).relative
    if actual.shape != expected.shape or not is_finite(actual) or not is_finite(expected):
        return (inf, inf, inf) if greatest > 0 else (0.0, 0.0, 0.0)
    e = real_numbers(expected)
    gap = real_numbers(actual) - e
    scale = max(_norm(e), FAMILY_SHARE * family * sqrt(e.numel()))
    if scale == 0:
        return (greatest, greatest, greatest)
    return (greatest, _norm(gap) / scale, abs(float((gap * e).sum())) / scale**2)


def floors(expected: Tensor, unit: float) -> Statistics:
    """Return the three statistics of rounding the right result once to the dtype. `unit`: half an epsilon."""
    if not (expected.is_floating_point() or expected.is_complex()):
        return (0.0, 0.0, 0.0)
    square = real_numbers(expected).square()
    total = float(square.sum())
    # the errors of the elements are independent: their sum grows with the root of how many there are
    spread = sqrt(float(square.square().sum())) / total if total > 0 and isfinite(total) else 1.0
    return (unit, unit, unit * spread)


def size(expected: Tensor, family: float) -> float:
    """Return the tensor's own size relative to the scale that `norm` uses: 1 unless it is (almost) zero in theory."""
    e = real_numbers(expected)
    own = _norm(e)
    scale = max(own, FAMILY_SHARE * family * sqrt(e.numel()))
    return own / scale if scale > 0 else 0.0


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor)) if tensor.numel() else 0.0


# The model as a dtype sees it: values rounded to the dtype, and moved by one unit in the last place.

_BITS: Mapping[torch.dtype, torch.dtype] = MappingProxyType(
    {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32, torch.float64: torch.int64}
)


def rounded_model(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Return a copy whose parameters and buffers are values of `dtype`, in their own dtypes."""
    result = copied_with_hooks(model)
    with torch.no_grad():
        for tensor in (*result.parameters(), *result.buffers()):
            if tensor.is_floating_point():
                tensor.copy_(tensor.to(dtype))
    return result


def rounded_sample(sample: SampleInputs, dtype: torch.dtype) -> SampleInputs:
    """Return the batch with its floating-point tensors rounded to values of `dtype`."""
    return replace(sample, tensors={n: _rounded(t, dtype) for n, t in sample.tensors.items()})


def moved_model(model: nn.Module, dtype: torch.dtype, generator: torch.Generator) -> nn.Module:
    """Return a copy in which every number of parameters that round moves by -1, 0 or +1 unit in the last place."""
    result = copied_with_hooks(model)
    with torch.no_grad():
        for parameter in result.parameters():  # each object once, so tied ones once
            if not is_whole(parameter):
                parameter.copy_(moved(parameter, dtype, generator))
    return result


def moved_sample(sample: SampleInputs, dtype: torch.dtype, generator: torch.Generator) -> SampleInputs:
    """Return the batch with its floating-point tensors moved likewise, inside of the range that each has: a model may
    take no other values, such as probabilities beyond 1."""

    def within(tensor: Tensor) -> Tensor:
        there = moved(tensor, dtype, generator)
        return there.clamp(tensor.min(), tensor.max()) if tensor.numel() else there

    tensors = {n: within(t) if t.is_floating_point() else t for n, t in sample.tensors.items()}
    return replace(sample, tensors=tensors)


def moved(tensor: Tensor, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Return the tensor, rounded to `dtype`, with each element moved by -1, 0 or +1 unit of that dtype in the last
    place.

    Zero, infinity and NaN stay, and so does what would become infinite. Of complex ones both parts are moved.
    """
    if tensor.is_complex():
        return torch.view_as_complex(moved(as_real(tensor.detach()), dtype.to_real(), generator))
    here = tensor.detach().to(dtype)
    step = torch.randint(-1, 2, here.shape, generator=generator).to(_BITS[dtype]).to(here.device)
    there = (here.view(_BITS[dtype]) + step).view(dtype)  # floating-point numbers of one sign are ordered as integers
    stays = (here == 0) | ~torch.isfinite(here) | ~torch.isfinite(there)
    return torch.where(stays, here, there).to(tensor.dtype)


def _rounded(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype).to(tensor.dtype) if tensor.is_floating_point() else tensor


# Choices among near-equal values: a router's best experts, the first of a sort, the place of a maximum.
# Where two values differ by less than rounding, right programs choose differently, and what follows differs by far
# more than rounding. Such a flip is rare by itself: one token among hundreds has two experts so near. A program may
# meet one that none of a few runs of the model meets. The mode below makes them frequent: values that a choice
# compares are moved by up to a unit in the last place, each relative to itself, and what is chosen keeps its own
# value. A choice that is clear stays as it is, and so does one among zeros or infinities.

aten = torch.ops.aten
UNITS = 1.0  # in the last place, at most: about what the roundings of the values themselves are


class NearTies(RulesMode):
    """While open, every choice is made among values that are moved."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__(_RULES, self._moved)
        self._generator = generator

    def _moved(self, x: Tensor) -> Tensor:
        """Move values in float64, where a part of a unit counts."""
        share = torch.rand(x.shape, generator=self._generator, dtype=torch.float64).to(x.device) * 2 - 1
        return x.double() * (1 + UNITS * torch.finfo(x.dtype).eps * share)


def _chosen(position: int, moved: Callable[[Tensor], Tensor], func: Any, x: Tensor, *rest: Any, **named: Any) -> Any:
    """`position`: where `dim` stands among the arguments after `x`; the last dim is its default."""
    if not x.dim():
        return func(x, *rest, **named)
    found = func(moved(x), *rest, **named)
    dim = int(rest[position] if len(rest) > position else named.get("dim", -1))
    return found if isinstance(found, Tensor) else _unmoved(x, found[1], dim)


def _unmoved(x: Tensor, indices: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Return the values that `x` itself has at the indices, of which a maximum may have dropped the dim."""
    kept = indices if indices.dim() == x.dim() else indices.unsqueeze(dim)
    return x.gather(dim, kept).view(indices.shape), indices


_RULES: Mapping[Any, Callable[..., Any]] = MappingProxyType(
    {
        aten.topk.default: partial(_chosen, 1),
        aten.sort.default: partial(_chosen, 0),
        aten.sort.stable: partial(_chosen, 1),
        aten.max.dim: partial(_chosen, 0),
        aten.min.dim: partial(_chosen, 0),
        aten.argmax.default: partial(_chosen, 0),
        aten.argmin.default: partial(_chosen, 0),
    }
)


LOSS_SCALES = (1024.0, 32.0)
SCALE_MARGIN = 8.0  # what a program adds up before it divides may be larger than what the model does
KINDS = ("plain", "reassociated", "moved", "reassociated", "moved", "reassociated")


@dataclass(frozen=True)
class NoisyModel:
    """The model and batch, with values of `dtype`, from which noise is drawn.

    truth       their exact result
    parts       numbers of parts in which the program computes its sums
    seed        of the draws
    replaced    all floating dtypes of the model's code become `dtype`
    loss_scale  of the program's run, and so of every draw
    """

    model: nn.Module
    sample: SampleInputs
    dtype: torch.dtype
    truth: Trajectory
    parts: tuple[int, ...]
    seed: int
    replaced: bool
    loss_scale: float = 1.0

    @property
    def unit(self) -> float:
        """The largest relative error of one rounding."""
        return torch.finfo(self.dtype).eps / 2


@dataclass(frozen=True)
class Target:
    """One tensor of the exact result. `family`: the largest value of its kind. `size`: see `size`."""

    value: Tensor
    family: float
    size: float


@dataclass(frozen=True)
class Noise:
    """The rounding noise of the reference.

    draws       number of draws
    largest     the largest statistics over all draws, at least those of rounding the right result once
    overflowed  a tensor that is not finite in some draw although it is in float64
    """

    draws: int
    largest: Mapping[Key, Statistics]
    overflowed: Key | None = None

    def joined(self, other: Noise) -> Noise:
        """Join the noise of two sets of draws."""
        largest = {
            key: _larger(self.largest.get(key, (0.0, 0.0, 0.0)), other.largest.get(key, (0.0, 0.0, 0.0)))
            for key in {**self.largest, **other.largest}
        }
        return Noise(self.draws + other.draws, largest, self.overflowed or other.overflowed)


def subject_of(
    model: nn.Module, sample: SampleInputs, dtype: torch.dtype, reference: Trajectory, parts: Sequence[int], seed: int
) -> NoisyModel:
    """Round the model and run it exactly, as long and as fast as `reference` did."""
    low, batch = rounded_model(model, dtype), rounded_sample(sample, dtype)
    truth = run_reference(
        low, batch, steps=len(reference.results), learning_rate=reference.learning_rate, settings=reference.settings
    )
    replaced = any(p.dtype != dtype for p in model.parameters() if p.is_floating_point())
    return NoisyModel(low, batch, dtype, truth, tuple(parts), seed, replaced)


def targets_of(trajectory: Trajectory) -> dict[Key, Target]:
    """Return every tensor of the exact result by (kind, step, name)."""
    found: dict[Key, Target] = {}
    for kind, step, tensors in _families(trajectory):
        family = family_scale(tensors.values(), FILL if kind in ("parameter", "buffer") else inf)
        for name, value in tensors.items():
            if value is not None and (kind != "result" or is_finite(value)):  # masked places of a result are infinite
                found[kind, step, name] = Target(value, family, size(value, family))
    return found


def draw_noise(subject: NoisyModel, targets: Mapping[Key, Target], first: int, count: int) -> Noise:
    """Return the noise over draws number `first` and the next ones, `count` in all."""
    noise = Noise(0, {key: floors(target.value, subject.unit) for key, target in targets.items()})
    for number in range(first, first + count):
        run = draw(subject, number)
        noise = noise.joined(_noise_of(run, targets))
        if noise.overflowed is not None:
            break
    return noise


def draw(subject: NoisyModel, number: int) -> Trajectory:
    """Run number `number`, counted from 0; the same number gives the same run."""
    kind = KINDS[number % len(KINDS)] if number < len(KINDS) else KINDS[1 + (number - 1) % (len(KINDS) - 1)]
    generator = torch.Generator().manual_seed((1_000_003 * subject.seed + number) % 2**63)
    model, sample = subject.model, subject.sample
    if kind == "moved":
        model = moved_model(model, subject.dtype, generator)
        sample = moved_sample(sample, subject.dtype, generator)
    else:
        model = rounded_model(model, subject.dtype)  # a copy: `exact` converts what it is given
    settings = replace(subject.truth.settings, loss_scale=subject.loss_scale)
    with ExitStack() as stack:
        if subject.replaced:  # random numbers are `run_reference`'s matter: only dtypes are replaced here
            name = dtype_name(subject.dtype)
            stack.enter_context(exact(model, dtype=name, dropout=settings.draws is not None))
        if kind == "reassociated":
            stack.enter_context(Reassociated(generator, subject.parts))
        if kind == "moved" and number >= len(KINDS):
            stack.enter_context(NearTies(generator))
        steps, rate = len(subject.truth.results), subject.truth.learning_rate
        return run_reference(model, sample, steps=steps, dtype=subject.dtype, learning_rate=rate, settings=settings)


def choose_loss_scale(subject: NoisyModel, targets: Mapping[Key, Target]) -> float:
    """Choose the scale of the loss that keeps small gradients above the least number of the dtype: 1 where the dtype
    reaches as far down as float32 does; else the largest of a few at which nothing overflows, with a margin."""
    if torch.finfo(subject.dtype).tiny <= torch.finfo(torch.float32).tiny:
        return 1.0
    for scale in LOSS_SCALES:
        run = draw(replace(subject, loss_scale=scale * SCALE_MARGIN), 0)
        if _noise_of(run, targets).overflowed is None:
            return scale
    return 1.0


def _noise_of(run: Trajectory, targets: Mapping[Key, Target]) -> Noise:
    largest: dict[Key, Statistics] = {}
    for kind, step, tensors in _families(run):
        for name, value in tensors.items():
            target = targets.get((kind, step, name))
            if value is None or target is None or is_whole(value):
                continue
            if not is_finite(value) and is_finite(target.value):
                return Noise(1, largest, (kind, step, name))
            largest[kind, step, name] = statistics(value, target.value, target.family)
    return Noise(1, largest)


def _families(run: Trajectory) -> Iterator[tuple[str, int, Mapping[str, Tensor | None]]]:
    """Yield kind, step and tensors of one scale. Of a model without a loss each result that can be compared is one."""
    for step, loss in enumerate(run.losses):
        yield "loss", step, {"": loss}
    for step, gradients in enumerate(run.gradients):
        yield "gradient", step, gradients
    for name, result in run.results[0].items() if run.results and not run.losses else ():
        if result.is_floating_point():
            yield "result", 0, {name: result}
    yield "parameter", len(run.losses) - 1, run.parameters
    yield "buffer", len(run.losses) - 1, run.buffers


def _larger(one: Statistics, other: Statistics) -> Statistics:
    a, b, c = (max(pair) for pair in zip(one, other, strict=True))
    return (a, b, c)


def parts_of(axes: Mapping[str, int], micro_batches: int) -> tuple[int, ...]:
    """Return the numbers of parts in which sums may be computed under these axes.

    Each axis alone, the micro-batches, and both together; (2,) where nothing is divided.
    """
    sizes = {size for name, size in axes.items() if name != "pp" and size > 1}
    found = sizes | {size * micro_batches for size in sizes} | {micro_batches}
    return tuple(sorted(n for n in found if n > 1)) or (2,)
