"""Measure how far the reference itself moves when its parameters move by a unit of rounding: is it ill-conditioned?"""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from nnscaler.tracing.sample_inputs import SampleInputs
from verify.programs.reference.eager import Trajectory, run_reference
from verify.results.tensor_difference import difference, family_scale
from verify.results.tolerance import Key, Tolerance, exact_tolerance


def measure_condition(model: nn.Module, sample: SampleInputs, reference: Trajectory, steps: int) -> Tolerance:
    """Return the tolerance with the noise that one unit of rounding in the parameters makes."""
    moved = copy.deepcopy(model).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in moved.parameters():
            if parameter.is_floating_point():
                signs = torch.randint(0, 2, parameter.shape, generator=generator) * 2 - 1
                parameter.mul_(1 + signs.double() * torch.finfo(torch.float64).eps)
    rate, settings = reference.learning_rate, reference.settings
    run = run_reference(moved, sample, steps=steps, learning_rate=rate, settings=settings)
    return exact_tolerance(noise_between(run, reference))


def noise_between(one: Trajectory, exact: Trajectory) -> dict[Key, float]:
    """Return the relative difference of every loss, gradient, parameter and buffer."""
    noise: dict[Key, float] = {}
    scale = family_scale(exact.losses)
    for step, (a, b) in enumerate(zip(one.losses, exact.losses, strict=True)):
        noise["loss", step, ""] = difference(a, b, scale).relative
    for step, (found, right) in enumerate(zip(one.gradients, exact.gradients, strict=True)):
        _family(noise, "gradient", step, found, right)
    last = len(exact.losses) - 1
    if one.norm is not None and exact.norm is not None:
        noise["norm", last, ""] = difference(one.norm, exact.norm).relative
    _family(noise, "parameter", last, one.parameters, exact.parameters)
    floating = {n: b for n, b in exact.buffers.items() if b.is_floating_point()}
    _family(noise, "buffer", last, one.buffers, floating)
    return noise


def _family(
    noise: dict[Key, float],
    kind: str,
    step: int,
    found: Mapping[str, Tensor | None],
    right: Mapping[str, Tensor | None],
) -> None:
    scale = family_scale(right.values())
    for name, expected in right.items():
        actual = found.get(name)
        if expected is not None and actual is not None:
            noise[kind, step, name] = difference(actual, expected, scale).relative
