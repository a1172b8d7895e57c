"""The reference: the untraced eager model on the whole batch, from its own state with every parameter disturbed.
Nothing of the compiler is used to run it, so a mistake of the tracer cannot be on both sides. Only the sample batch
is taken apart and put together again by shared code, and random numbers are those that the program draws.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from nnscaler.errors import NnscalerError
from nnscaler.runtime.tensor_bits_and_differences import FILL, difference, family_scale, is_finite, kept
from nnscaler.runtime.training.gradients.gradient_norm_and_clipping import separate_gradients
from nnscaler.tracing.export.independent_module_copies import copied
from nnscaler.tracing.export.loss_module import Results, results_of
from nnscaler.tracing.export.user_source_locations import model_errors
from nnscaler.tracing.float64_run import (
    convert_floats,
    exact,
    exact_dtype,
    exact_tensor,
    own_dtype,
    run_backward,
    with_draws,
    without_dropout,
)
from nnscaler.tracing.sample_inputs import SampleInputs
from verify.programs.eager_with_program_draws import Draw, ProgramDraws, UnmatchedDraws
from verify.programs.module_tensors_by_every_name import Kind, every_parameter, state_of
from verify.results.finding import Finding
from verify.results.float64_tolerance import Key, Tolerance

_told = partial(model_errors, "the model itself raises on the sample batch", UnmatchedDraws)


def first_not_finite(named: Iterable[tuple[str, Tensor | None]]) -> str | None:
    """Return the name of the first value that is NaN or infinite; None where none is."""
    return next((name for name, value in named if value is not None and not is_finite(value)), None)


def not_finite(named: Iterable[tuple[str, Tensor | None]]) -> Finding | None:
    """Return a finding for the first value of a reference that is NaN or infinite, which would equal any other."""
    bad = first_not_finite(named)
    if bad is None:
        return None
    message = f"the model itself computes NaN or infinity: {bad}"
    return Finding("reference_not_finite", message, help="its parameters were disturbed at random: try another --seed")


# The state that a comparison starts from: the model's own, with every parameter disturbed.
# A freshly built model has zero biases and unit norms. Terms multiplied by them, or added by them, would be
# invisible: a bias added on every rank adds nothing while it is zero. So each parameter is moved by a random amount
# of its own scale, and so are the running statistics of norms: in evaluation mode a mean of zero and a variance of
# one hide whose they are. Other buffers are left alone: they hold masks and tables whose meaning we do not know.

_FLOOR = 0.05  # for parameters that are zero everywhere
_AMOUNT = 0.3  # of the parameter's own scale


def randomise_parameters(module: nn.Module, seed: int) -> None:
    """Move every parameter and running statistic of `module`, in place; the same seed gives the same values.

    Tied parameters are moved once. Integer parameters stay.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():  # each object once, so tied ones once
            if parameter.is_floating_point() or parameter.is_complex():
                value = exact_tensor(parameter).cpu()
                noise = torch.randn(parameter.shape, generator=generator, dtype=value.dtype)
                parameter.copy_(value + scale_of(value) * _AMOUNT * noise)
        for part in module.modules():
            if isinstance(part, _NormBase) and part.running_mean is not None and part.running_var is not None:
                noise = torch.randn((2, part.num_features), generator=generator, dtype=torch.float64) * _AMOUNT
                part.running_mean.add_(noise[0].to(part.running_mean))
                part.running_var.mul_(noise[1].exp().to(part.running_var))


def scale_of(value: Tensor) -> float:
    """Return the root mean square of a tensor, or a floor where it is (almost) zero."""
    if value.numel() == 0:
        return 0.0
    size = float(value.abs().square().mean().sqrt())
    return size if size > 1e-6 else _FLOOR


def put_state(module: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Give the parameters and buffers of these names these values."""
    with torch.no_grad():
        for name, tensor, _ in state_of(module):
            if name in values:
                tensor.copy_(values[name])


def logical_state(module: nn.Module) -> dict[str, Tensor]:
    """Return every parameter and buffer by each of its names, detached copies on the CPU."""
    state: dict[str, Tensor] = {}
    copies: dict[int, Tensor] = {}
    for name, tensor, _ in state_of(module):
        if id(tensor) not in copies:
            copies[id(tensor)] = kept(tensor)
        state[name] = copies[id(tensor)]
    return state


UPDATE_SHARE = 0.02  # a step of SGD moves the parameters by about this share of their size
CLIP_SHARE = 0.5  # of the norm of the gradients: clipping is active


@dataclass(frozen=True)
class ReferenceSettings:
    """How both sides train, besides the number of steps and the learning rate.

    clip        the gradients of the last step are clipped
    max_norm    to which; None: chosen so that clipping is active
    loss_scale  backward starts from it, and it is divided out of the gradients
    draws       the operation of each call of a random operator of torch, in order; None: nothing is dropped, and draws
                depend on their place alone
    seed        of the draws
    told        the dtype that a tensor of the float64 run says it has; None: the model's own
    """

    clip: bool = False
    max_norm: float | None = None
    loss_scale: float = 1.0
    draws: tuple[Draw | None, ...] | None = None
    seed: int = 0
    told: torch.dtype | None = None


@dataclass(frozen=True)
class Trajectory:
    """A few steps of training. Tensors are on the CPU, under every name that they have in the model.

    losses      one per step, before its update
    gradients   one map per step, before clipping; None for a parameter that the loss does not depend on
    parameters  after the last step
    buffers     after the last step
    seconds     of wall time
    norm        of all gradients in the last step, where they were clipped
    settings    what another run needs to be comparable (`run_reference(..., settings=...)`)
    results     one map per step: what the model returns besides the loss, by name
    """

    losses: tuple[Tensor, ...]
    gradients: tuple[Mapping[str, Tensor | None], ...]
    parameters: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    learning_rate: float
    seconds: float
    norm: Tensor | None = None
    settings: ReferenceSettings = field(default_factory=ReferenceSettings)
    results: tuple[Mapping[str, Tensor], ...] = ()


def names_of(module: nn.Module) -> dict[str, tuple[str, ...]]:
    """Return, by name of a parameter or buffer, all names of the same tensor, the canonical one first."""
    by_object: dict[int, list[str]] = {}
    for name, tensor, _ in state_of(module):
        by_object.setdefault(id(tensor), []).append(name)
    return {name: tuple(names) for names in by_object.values() for name in names}


def run_reference(
    module: nn.Module,
    sample: SampleInputs,
    *,
    steps: int,
    dtype: torch.dtype = torch.float64,
    learning_rate: float | None = None,
    settings: ReferenceSettings | None = None,
) -> Trajectory:
    """Train a copy of `module` on the sample batch with SGD, in `dtype`. Every part stays in its mode.

    A model without a loss runs forward once.

    In float64 everything is: also what the model's code casts to float32. `learning_rate` None: chosen from the first
    gradient. Raises NnscalerError `model_raised` with the user's own line if the model raises, UnmatchedDraws where it
    draws other random numbers than `settings` says.
    """
    started = time.perf_counter()
    how = settings or ReferenceSettings()
    how = replace(how, told=how.told or own_dtype(module))
    model = copied(module)
    draws = None if how.draws is None else ProgramDraws(how.draws, how.seed)
    losses: list[Tensor] = []
    results: list[Mapping[str, Tensor]] = []
    gradients: list[dict[str, Tensor | None]] = []
    norm = None
    with running_in(model, dtype, draws, how.told):
        for step in range(steps):
            if draws is not None:
                draws.begin(step)
            model.zero_grad(set_to_none=True)
            found = backward_results(model, sample, sample.tensors, how.loss_scale, dtype)
            if draws is not None:
                draws.end()
            results.append({name: kept(t) for name, t in found.rest.tensors.items()})
            if found.loss is None:
                break
            losses.append(kept(found.loss))
            gradients.append(_gradients(model))
            if learning_rate is None:
                learning_rate = choose_learning_rate(model)
            if how.clip and step == steps - 1:
                how, norm = _clip(model, how)
            torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=learning_rate).step()
    after: dict[Kind, dict[str, Tensor]] = {"parameter": {}, "buffer": {}}
    for name, tensor, kind in state_of(model):
        after[kind][name] = tensor.detach().cpu()
    rate = 0.0 if learning_rate is None else learning_rate
    seconds = time.perf_counter() - started
    of_steps = tuple(results)
    return Trajectory(
        tuple(losses), tuple(gradients), after["parameter"], after["buffer"], rate, seconds, norm, how, of_steps
    )


def record_draws(module: nn.Module, sample: SampleInputs) -> ProgramDraws:
    """Return the calls of torch's random operators that one forward makes, in order, as `calls`."""
    model = copied(module)
    draws = ProgramDraws()
    with running_in(model, torch.float64, draws, own_dtype(module)):
        forward_results(model, sample, sample.tensors)
    return draws


def choose_learning_rate(model: nn.Module) -> float:
    """Return a rate, of two digits, at which a step moves the parameters by a small share of their size: enough for a
    wrong update to show, too little for the model to leave the range in which it is smooth."""
    size = sum(float(p.detach().abs().double().square().sum()) for p in model.parameters() if p.requires_grad)
    slope = sum(float(p.grad.abs().double().square().sum()) for p in model.parameters() if p.grad is not None)
    if not slope > 0 or not size > 0 or not slope < float("inf"):
        return 0.01
    return float(f"{UPDATE_SHARE * (size / slope) ** 0.5:.1e}")


def clip_limit(gradients: Iterable[Tensor | None]) -> float | None:
    """Return a norm, of two digits, to which clipping is active; None where the gradients have none."""
    size = float(torch.nn.utils.get_total_norm([gradient for gradient in gradients if gradient is not None]))
    return float(f"{CLIP_SHARE * size:.2g}") if 0 < size < float("inf") else None


def _clip(model: nn.Module, how: ReferenceSettings) -> tuple[ReferenceSettings, Tensor | None]:
    """Clip the gradients by torch's own function, and return their norm before."""
    trained = [p for p in model.parameters() if p.grad is not None]
    limit = how.max_norm
    if limit is None:
        limit = clip_limit(p.grad for p in trained)
    if limit is None:
        return replace(how, clip=False), None
    norm = torch.nn.utils.clip_grad_norm_(trained, limit)
    return replace(how, max_norm=limit), norm.detach().cpu()


def backward_results(
    model: nn.Module,
    sample: SampleInputs,
    inputs: Mapping[str, Tensor],
    scale: float = 1.0,
    dtype: torch.dtype = torch.float64,
) -> Results:
    """Return the results, after a backward pass that starts from `scale`, which is divided out of the gradients.

    A gradient without elements is none: see `gradient_value`.
    """
    found = forward_results(model, sample, inputs, dtype)
    loss = found.loss
    if loss is None:
        return found
    if not loss.requires_grad:
        raise NnscalerError("no_gradient", "the loss does not depend on any parameter that is trained")
    with _told():
        run_backward(loss, torch.full_like(loss, scale))
    settle_gradients(model)
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad = gradient_value(parameter.grad if scale == 1.0 else parameter.grad / scale)
    return found


def settle_gradients(model: nn.Module) -> None:
    """Give each gradient memory of its own, and all of its elements: an embedding's may be sparse, which torch cannot
    clip."""
    separate_gradients(model.parameters())
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad = parameter.grad.to_dense()


def gradient_value(gradient: Tensor | None) -> Tensor | None:
    """Return the whole gradient of a parameter, and None for one without elements: it moves nothing, and a program need
    not compute it."""
    return None if gradient is None or not gradient.numel() else gradient


def forward_results(
    model: nn.Module, sample: SampleInputs, inputs: Mapping[str, Tensor], dtype: torch.dtype = torch.float64
) -> Results:
    """Return what the model makes of copies of these inputs in the dtype. Raises NnscalerError `model_raised`."""
    copies = {name: t.to(exact_dtype(t.dtype, dtype), copy=True) for name, t in inputs.items()}
    args, kwargs = sample.rebuild(copies)
    with _told():
        return results_of(model(*args, **kwargs))


def _gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: kept(p.grad) for name, p in every_parameter(model)}


@contextmanager
def running_in(
    model: nn.Module, dtype: torch.dtype, draws: ProgramDraws | None, told: torch.dtype | None
) -> Iterator[None]:
    """While open, the model computes in `dtype` and draws what a program draws; without `draws` nothing is dropped.

    `told`: in float64, what its tensors say of their dtype: what the trace saw, the `own_dtype` of the model before it
    was converted for the first time.
    """
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))  # drawing moves torch's generator
        if dtype == torch.float64:
            stack.enter_context(exact(model, draws=draws, told=told))
        else:
            convert_floats(model, dtype)
            stack.enter_context(without_dropout(model) if draws is None else with_draws(draws, model))
        yield


# Measure how far the reference itself moves when its parameters move by a unit of rounding: is it ill-conditioned?


def measure_condition(model: nn.Module, sample: SampleInputs, reference: Trajectory, steps: int) -> Tolerance:
    """Return the tolerance with the noise that one unit of rounding in the parameters makes."""
    moved = moved_model(model)
    rate, settings = reference.learning_rate, reference.settings
    run = run_reference(moved, sample, steps=steps, learning_rate=rate, settings=settings)
    return Tolerance(noise_between(run, reference))


def moved_model(model: nn.Module) -> nn.Module:
    """Return a copy in float64 whose parameters are moved by one unit of rounding each, up or down."""
    moved = copied(model)
    convert_floats(moved, torch.float64)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in moved.parameters():
            if parameter.is_floating_point() or parameter.is_complex():
                signs = torch.randint(0, 2, parameter.shape, generator=generator) * 2 - 1
                parameter.mul_(1 + signs.double() * torch.finfo(torch.float64).eps)
    return moved


def noise_between(one: Trajectory, exact: Trajectory) -> dict[Key, float]:
    """Return the relative difference of every loss, gradient, parameter and buffer."""
    noise: dict[Key, float] = {}
    scale = family_scale(exact.losses)
    for step, (a, b) in enumerate(zip(one.losses, exact.losses, strict=True)):
        noise["loss", step, ""] = difference(a, b, scale).relative
    for step, (found, right) in enumerate(zip(one.gradients, exact.gradients, strict=True)):
        _family(noise, ("gradient", step), found, right, family_scale(right.values()))
    for step, (returned, own) in enumerate(zip(one.results, exact.results, strict=True)):
        _family(noise, ("result", step), returned, own, 0.0)
    last = len(exact.losses) - 1
    if one.norm is not None and exact.norm is not None:
        noise["norm", last, ""] = difference(one.norm, exact.norm).relative
    for kind, found, right in (("parameter", one.parameters, exact.parameters), ("buffer", one.buffers, exact.buffers)):
        _family(noise, (kind, last), found, right, family_scale(right.values(), FILL))
    return noise


def _family(
    noise: dict[Key, float],
    when: tuple[str, int],
    found: Mapping[str, Tensor | None],
    right: Mapping[str, Tensor | None],
    scale: float,
) -> None:
    for name, expected in right.items():
        actual = found.get(name)
        if expected is not None and actual is not None:
            noise[(*when, name)] = difference(actual, expected, scale).relative
