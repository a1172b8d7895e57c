"""Test whether a gradient is the derivative, by central differences along random directions, in float64.

At a point x, with random cotangents c on all outputs and a random direction d of one input,

    (<c, f(x + ed)> - <c, f(x - ed)>) / 2e    is compared with    <gradient, d>.

Where they disagree, the step decides what that means: a wrong gradient gives the same difference quotient for every
step e and from both sides of x; a kink, a jump or rounding does not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf, isfinite, sqrt
from typing import Any, Literal

import torch
from torch import Tensor

from op_registry.call import Call

from nnscaler.runtime.tensor_bits_and_differences import is_finite
from nnscaler.runtime.training.autocast_on_any_device import AskedDtypes
from verify.evidence.inputs.concrete_call import outputs_of, with_tensors
from verify.evidence.oracle.run_whole_operator import gradients_of

STEPS = (1e-6, 1e-5, 1e-4)  # relative to the input's typical value; the first nearly always decides
AGREES = 1e-5  # right gradients measure about 1e-9, wrong ones 5e-2 and more
FAMILY = 1e-3  # share of the largest slope of all inputs below which a slope counts as zero
STABLE = 0.1  # quotients of a wrong gradient differ among each other by less than this share of the error
SWAMPED = 1e6  # times the usual size of an output's values
DIRECTIONS = 2
POINTS = 2
BESIDE = (0.5, 1.8, 3.0)  # of a number in the code: values on both sides of it, which stay there when they are moved
WAYS = ("shrunk", "grown", "shrunk", "near", "given")  # how points are made from the given inputs, in order

Run = Callable[[Sequence[Tensor]], tuple[Tensor | None, ...]]
Judgement = Literal["agrees", "wrong", "unclear"]
Place = Literal["near", "far", "at"]


@dataclass(frozen=True, slots=True)
class Slope:
    """One comparison: the slope along a direction of input `index`, by differences and by the gradient."""

    index: int
    expected: float
    found: float
    judgement: Judgement
    missing: bool = False  # the gradient was None


@dataclass(frozen=True)
class Point:
    """The point at which slopes are measured.

    units       the typical value of each input
    cotangents  one per output; None for an output without a gradient
    gradients   one per input: what the operator's backward gives
    family      order of magnitude of the largest slope
    hidden      error of a slope that counts for nothing: rounding can hide as much in outputs that do not change, as of
                a function that saturates
    """

    run: Run
    inputs: tuple[Tensor, ...]
    units: tuple[float, ...]
    outputs: tuple[Tensor | None, ...]
    cotangents: tuple[Tensor | None, ...]
    gradients: tuple[Tensor | None, ...]
    family: float
    hidden: float = 0.0


@dataclass(frozen=True)
class Survey:
    """`error`: what the operator raised, where no point could be made."""

    slopes: tuple[Slope, ...]
    points: int
    error: Exception | None = None

    def of(self, index: int, judgement: Judgement) -> list[Slope]:
        """Return the slopes of one input with this judgement."""
        return [s for s in self.slopes if s.index == index and s.judgement == judgement]

    def inputs(self, judgement: Judgement) -> tuple[int, ...]:
        """Return the inputs that have a slope with this judgement."""
        return tuple(dict.fromkeys(s.index for s in self.slopes if s.judgement == judgement))


class NoGradient(Exception):
    """No output has a gradient."""


def make_run(function: Callable[..., Any], call: Call, wide: bool = False) -> Run:
    """Return the operator as a function of its tensors, which it gets copies of, with the same random numbers each
    time."""
    state = torch.get_rng_state()

    def run(tensors: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
        torch.set_rng_state(state)
        args, kwargs = with_tensors(call, [t.clone() for t in tensors], {})
        return outputs_of(function(*args, **kwargs))

    def run_wide(tensors: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
        with AskedDtypes():
            return run(tensors)

    return run_wide if wide else run


def survey(
    run: Run, inputs: Sequence[Tensor], wanted: Sequence[int], seed: int, wide: bool = False, place: Place = "near"
) -> Survey:
    """Measure slopes of the inputs `wanted`, in two directions at two points, and at more where it stays unclear.

    far: the inputs are large, and functions may saturate there: only what is visible among all outputs is wrong. at:
    the inputs themselves, with kinks, are the only point: only what is NaN or infinite is wrong.
    """
    generator = torch.Generator().manual_seed(seed)
    slopes: list[Slope] = []
    points = 0
    error: Exception | None = None
    for way in WAYS if place != "at" else ("given",):
        moved = tuple(moved_from(t, way, generator) if t.is_floating_point() or t.is_complex() else t for t in inputs)
        try:
            point = make_point(run, moved, wanted, generator, wide)
        except Exception as raised:  # noqa: BLE001 - the operator need not be defined everywhere
            error = error or raised
            continue
        if point is None:
            continue
        if place == "far":
            point = replace(point, hidden=_noise(point, point.outputs) / STEPS[0])
        points += 1
        for index in wanted:
            found = _slopes_at(point, index, generator)
            slopes += [s for s in found if place != "at" or not isfinite(s.found)]
        decided = {s.index for s in slopes if s.judgement != "unclear"}
        if points >= POINTS and decided.issuperset(wanted):
            break
    return Survey(tuple(slopes), points, error if not points else None)


def _slopes_at(point: Point, index: int, generator: torch.Generator) -> list[Slope]:
    """Measure slopes at one point, with one more direction for each input that hits a kink."""
    found: list[Slope] = []
    for _ in range(DIRECTIONS):
        slope = measure(point, index, direction_of(point, index, generator))
        if slope.judgement == "unclear":
            slope = measure(point, index, direction_of(point, index, generator))
        found.append(slope)
    return found


def make_point(
    run: Run, inputs: tuple[Tensor, ...], wanted: Sequence[int], generator: torch.Generator | None, wide: bool = False
) -> Point | None:
    """Run forward and backward; None where that gives NaN for being outside of the operator's domain.

    Without `generator`, cotangents are all ones. Raises NoGradient, and whatever the operator raises.
    """
    leaves = [t.clone().requires_grad_() if i in set(wanted) else t for i, t in enumerate(inputs)]
    with torch.enable_grad():
        outputs = run(leaves)
    if not any(o is not None and o.requires_grad and o.numel() for o in outputs):
        raise NoGradient
    cotangents = tuple(
        _cotangent(o, generator) if o is not None and o.requires_grad and o.numel() else None for o in outputs
    )
    held = [o.detach() for o, c in zip(outputs, cotangents, strict=True) if o is not None and c is not None]
    finite = all(is_finite(o) for o in held)
    if any(bool(o.isnan().any()) for o in held if not finite) or not any(
        bool(c.any()) for c in cotangents if c is not None
    ):
        return None
    if wide:
        with AskedDtypes():
            gradients = gradients_of([outputs], [cotangents], [leaves])[0]
    else:
        gradients = gradients_of([outputs], [cotangents], [leaves])[0]
    if not finite and not all(is_finite(g) for g in gradients if g is not None):
        return None
    detached = tuple(None if o is None else o.detach() for o in outputs)
    units = tuple(unit_of(t) for t in inputs)
    return with_gradients(Point(run, inputs, units, detached, cotangents, (), 0.0), gradients)


def gradients_at(point: Point, wanted: Sequence[int], cotangents: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """Return what the backward gives at a point for these cotangents; None: of an output that is not used."""
    leaves = [t.clone().requires_grad_() if i in set(wanted) else t for i, t in enumerate(point.inputs)]
    with torch.enable_grad():
        outputs = point.run(leaves)
    return gradients_of([outputs], [cotangents], [leaves])[0]


def with_gradients(point: Point, gradients: Sequence[Tensor | None]) -> Point:
    """Return the same point with other gradients to judge."""
    family = max(
        (float(g.norm()) * unit for g, unit in zip(gradients, point.units, strict=True) if g is not None), default=0.0
    )
    return replace(point, gradients=tuple(gradients), family=family if isfinite(family) else 0.0)


def measure(point: Point, index: int, direction: Tensor) -> Slope:
    """Compare the gradient of one input with difference quotients along `direction`."""
    gradient = point.gradients[index]
    found = 0.0 if gradient is None else _dot(gradient, direction)
    quotients: list[tuple[float, float]] = []  # (quotient, its rounding noise)
    sided = 0.0
    for number, step in enumerate(STEPS):
        try:
            with torch.no_grad():
                ahead = point.run(_moved(point.inputs, index, direction, step))
                behind = point.run(_moved(point.inputs, index, direction, -step))
        except Exception:  # noqa: BLE001 - beyond the operator's domain
            continue
        expected = _change(point, ahead, behind) / (2 * step)
        scale = max(abs(expected), abs(found) if isfinite(found) else 0.0, FAMILY * point.family)
        if not isfinite(expected):
            continue
        if abs(expected - found) <= AGREES * scale:
            return Slope(index, expected, found, "agrees", gradient is None)
        noise = _noise(point, ahead, behind) / step
        if noise <= 1e-3 * scale:
            if abs(expected - found) <= AGREES * scale + noise:
                return Slope(index, expected, found, "agrees", gradient is None)
            quotients.append((expected, noise))
        if number == 0:
            forward, backward = _change(point, ahead, point.outputs), _change(point, point.outputs, behind)
            sided = abs(forward - backward) / step
    expected, found, judgement = _judged(quotients, found, sided)
    if judgement == "wrong" and abs(expected - found) <= point.hidden:
        judgement = "unclear"
    return Slope(index, expected, found, judgement, gradient is None)


def _judged(quotients: list[tuple[float, float]], found: float, sided: float) -> tuple[float, float, Judgement]:
    """Judge a slope: wrong, if the quotients of all steps and of both sides are the same number; else
    a kink or noise."""
    if len(quotients) < 2:
        return (quotients[0][0] if quotients else 0.0), found, "unclear"
    values = [q for q, _ in quotients]
    error = min(abs(q - found) for q in values) if isfinite(found) else inf
    spread = max(values) - min(values)
    noise = max(n for _, n in quotients)
    stable = STABLE * (error if error < inf else max(abs(v) for v in values))
    wrong = spread <= stable + noise and sided <= stable + 2 * noise
    return values[0], found, "wrong" if wrong else "unclear"


def around(tensor: Tensor, number: float, shift: int, generator: torch.Generator, positive: bool = False) -> Tensor:
    """Values on both sides of a number and, unless all shall be `positive`, of its negative; none is near to one.

    Every six elements have all kinds. `shift`: the kind of the first, which is the only one where there is no other.
    """
    places = torch.arange(tensor.numel()) + shift
    factors = torch.tensor(BESIDE, dtype=torch.float64)[places % 3]
    signs = torch.where((places // 3 % 2 == 1) & (not positive), -1.0, 1.0)
    order = torch.randperm(tensor.numel(), generator=generator)
    jitter = 1 + 0.1 * torch.rand(tensor.numel(), generator=generator, dtype=torch.float64)
    values = (number * factors * signs * jitter)[order].reshape(tensor.shape)
    if not tensor.is_complex():
        return values
    turns = torch.rand(tensor.shape, generator=generator, dtype=torch.float64) * 6.28
    return torch.polar(values.abs(), turns)


def moved_from(tensor: Tensor, way: str, generator: torch.Generator) -> Tensor:
    """Other values near the given ones, of the same signs: no kink at a round number is hit twice.

    Zeros move too, away from kinks at zero; upwards only where nothing is negative.
    """
    tensor = tensor.detach().to(torch.complex128 if tensor.is_complex() else torch.float64, copy=True)
    if way == "given" or not tensor.numel():
        return tensor
    drawn = torch.rand(tensor.shape, generator=generator, dtype=torch.float64)
    factor = {"shrunk": 1 - 0.4 * drawn, "grown": 1 + 0.3 * drawn, "near": 1 + 0.01 * (drawn - 0.5)}[way]
    small = (0.01 if way == "near" else 0.3) * (0.2 + drawn) * unit_of(tensor)
    if tensor.is_complex() or bool((tensor < 0).any()):
        small = torch.where(torch.rand(tensor.shape, generator=generator) < 0.5, -small, small)
    return torch.where(tensor == 0, small.to(tensor.dtype), tensor * factor)


def unit_of(tensor: Tensor) -> float:
    """Return the typical size of a tensor's values, by which steps are measured; masks of -1e9 do not count."""
    if not (tensor.is_floating_point() or tensor.is_complex()) or not tensor.numel():
        return 0.0
    sizes = tensor.detach().abs().flatten()
    sizes = sizes[torch.isfinite(sizes) & (sizes > 0)]
    return min(max(float(sizes.median()), 1e-2), 1e2) if sizes.numel() else 1.0


def direction_of(point: Point, index: int, generator: torch.Generator) -> Tensor:
    """Return a random direction of one input, of its typical size: signed numbers of 0.5 to 1.5 times that."""
    tensor = point.inputs[index]
    drawn = _signed(tensor, generator) * point.units[index]
    return drawn if is_finite(tensor) else torch.where(torch.isfinite(tensor), drawn, torch.zeros_like(drawn))


def _cotangent(output: Tensor, generator: torch.Generator | None) -> Tensor:
    """Draw numbers of 0.5 to 1.5 of either sign; 0 where the output is infinite or swamps its summands (a mask)."""
    drawn = torch.ones_like(output) if generator is None else _signed(output, generator).to(output.dtype)
    sizes = output.detach().abs()
    if float(sizes.max()) <= SWAMPED:
        return drawn
    usual = max(float(sizes.flatten().kthvalue(1 + sizes.numel() // 4).values), 1.0)
    return torch.where(sizes <= SWAMPED * usual, drawn, torch.zeros_like(drawn)) if isfinite(usual) else drawn * 0


def _signed(like: Tensor, generator: torch.Generator) -> Tensor:
    shape = (*like.shape, 2) if like.is_complex() else tuple(like.shape)
    drawn = torch.rand(shape, generator=generator, dtype=torch.float64) * 2 - 1
    drawn = drawn + torch.where(drawn < 0, -0.5, 0.5)
    return torch.view_as_complex(drawn) if like.is_complex() else drawn


def _moved(inputs: tuple[Tensor, ...], index: int, direction: Tensor, step: float) -> list[Tensor]:
    return [t + step * direction if i == index else t for i, t in enumerate(inputs)]


def _dot(a: Tensor, b: Tensor) -> float:
    """Return the real inner product."""
    product = (a.conj() * b) if a.is_complex() else a * b
    return float(product.real.sum() if product.is_complex() else product.sum())


def _change(point: Point, ahead: Sequence[Tensor | None], behind: Sequence[Tensor | None]) -> float:
    total = 0.0
    for c, a, b in zip(point.cotangents, ahead, behind, strict=True):
        if c is None or a is None or b is None:
            continue
        difference = a - b
        if not is_finite(difference):  # where the output is not finite, its cotangent is zero
            difference = torch.where(c != 0, difference, torch.zeros_like(difference))
        total += _dot(c, difference)
    return total


def _noise(point: Point, ahead: Sequence[Tensor | None], behind: Sequence[Tensor | None] | None = None) -> float:
    """Bound the part of the difference that rounding of the changed outputs can cause; of all, without `behind`."""
    square = 0.0
    for c, a, b in zip(point.cotangents, ahead, behind or ahead, strict=True):
        if c is not None and a is not None and b is not None:
            held = torch.where(((a != b) | (behind is None)) & (c != 0), a.abs() * c.abs(), 0.0)
            square += float(held.norm()) ** 2
    return 8 * float(torch.finfo(torch.float64).eps) * sqrt(square)
