"""The oracle: the plain model, eager and untraced, on the whole batch and on each data part."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from nnscaler.errors import NnscalerError
from nnscaler.runtime.nested_values import map_tensors, tensors_in
from nnscaler.tracing.export.independent_module_copies import copied_with_hooks
from nnscaler.tracing.export.user_source_locations import model_errors
from nnscaler.tracing.float64_run import convert_floats, exact, exact_dtype, run_backward, without_dropout
from verify.external.parameter_mapping import Lookup, StateMap, give
from verify.external.program import Batch, ExternalProgram
from verify.external.torchrun.cuda_on_cpu import OnCpu
from verify.programs.eager_reference import (
    choose_learning_rate,
    first_not_finite,
    logical_state,
    randomise_parameters,
    settle_gradients,
)
from verify.programs.module_tensors_by_every_name import every_parameter, state_of

Buffers = dict[str, Tensor]
RAISES = "the plain model itself raises on `batch()`"
_told = partial(model_errors, RAISES)
_told_of_part = partial(model_errors, "the plain model runs on `batch()`, and raises on the rows of one data part")


def initial_model(program: ExternalProgram, seed: int) -> nn.Module:
    """Make the plain model, with every parameter disturbed at random. Raises NnscalerError for what is no module."""
    torch.manual_seed(seed)
    model = program.model()
    if not isinstance(model, nn.Module):
        message = f"`model()` of {program.name} returns {type(model).__name__}, which is no torch.nn.Module"
        raise NnscalerError("usage", message, program.where, help="return the plain eager module")
    randomise_parameters(model, seed)
    return model


@contextmanager
def computing_in(model: nn.Module | None, dtype: torch.dtype, dropout: bool = False) -> Iterator[None]:
    """While open, nothing is dropped (unless asked), and the model computes in `dtype`; in float64 everything does."""
    with ExitStack() as stack:
        if dtype == torch.float64:
            stack.enter_context(exact(model, dropout=dropout, generators=True, recorded=False))
        else:
            if model is not None:
                convert_floats(model, dtype)
            stack.enter_context(without_dropout(model, generators=True))
        stack.enter_context(OnCpu())
        yield


# The batch: its rows are dim 0 of most of its tensors.


def row_count(batch: Batch) -> int:
    """Return the rows of a batch: the size of dim 0 that most of its tensors have; of several, that of the first."""
    tensors = tensors_in(batch)
    sizes = [len(t) for t in tensors if t.dim() and len(t) != 1]
    return max(dict.fromkeys(sizes), key=sizes.count) if sizes else int(any(t.dim() for t in tensors))


def batch_of_step(batch: Batch, step: int) -> Batch:
    """Return the batch of a step: its rows in another order, so that data parts and micro-batches have other rows in
    each step, and what a program keeps of its first batch shows."""
    rows = row_count(batch)
    return map_tensors(batch, lambda t: t.roll(step, 0) if step and t.dim() and len(t) == rows else t)


def part_of(batch: Batch, index: int, parts: int) -> Batch:
    """Return the rows of one data part; tensors that have no rows go to all."""
    if parts == 1:
        return batch
    rows = row_count(batch)
    size = rows // parts
    return map_tensors(batch, lambda t: t[index * size : (index + 1) * size] if t.dim() and len(t) == rows else t)


def copied(batch: Batch, dtype: torch.dtype) -> Batch:
    """Return a copy in which floating-point and complex tensors have the dtype of the run."""
    return map_tensors(batch, lambda t: t.to(exact_dtype(t.dtype, dtype), copy=True), anew=True)


def data_part(program: ExternalProgram, coordinate: Mapping[str, int]) -> tuple[int, int]:
    """Return the number of a rank's data part, and how many parts there are."""
    sizes = dict(program.mesh)
    index, parts = 0, 1
    for axis in program.data_axes:
        index, parts = index * sizes[axis] + coordinate[axis], parts * sizes[axis]
    return index, parts


def data_parts(program: ExternalProgram) -> int:
    """Return how many data parts there are."""
    return data_part(program, dict.fromkeys((axis for axis, _ in program.mesh), 0))[1]


def coordinates(program: ExternalProgram) -> list[dict[str, int]]:
    """Return the coordinate of each rank on the mesh."""
    axes = [axis for axis, _ in program.mesh]
    return [dict(zip(axes, c, strict=True)) for c in product(*(range(size) for _, size in program.mesh))]


def check_rows(program: ExternalProgram, batch: Batch) -> None:
    """Check that the rows of the batch divide. Raises NnscalerError `usage`."""
    parts = data_parts(program)
    rows = row_count(batch)
    if parts > 1 and (rows == 0 or rows % parts):
        message = f"the {rows} rows of `batch()` in {program.name} do not divide into {parts} data parts"
        axes = ", ".join(program.data_axes)
        help = f"data_axes is {axes}: return a multiple of {parts}"
        raise NnscalerError("usage", message, program.batch_where or program.where, help=help)


# What the plain model computes.


@dataclass(frozen=True)
class ReferenceStep:
    """One step of the plain model, before and after the optimizer's update. Tensors over all addresses are float64.

    loss        of the whole batch
    part_losses of each data part by itself
    gradients   [addresses] before clipping; NaN where the loss does not depend on the parameter
    parameters  [addresses] after the update, buffers among them
    norm        of the gradients, where they were clipped
    statistics  [addresses] of each data part, the buffers that it may have after the update: one or more; empty where
                the parts are not run each by itself
    loss_unit   of rounding of the losses, where they may be coarser than what the model computes in; 0 else
    """

    loss: Tensor
    part_losses: tuple[Tensor, ...]
    gradients: Tensor
    parameters: Tensor
    norm: Tensor | None = None
    statistics: tuple[tuple[Tensor, ...], ...] = ()
    loss_unit: float = 0.0


@dataclass(frozen=True)
class PlainReference:
    """A few steps of the plain model.

    space          its address space
    start          its parameters and buffers at the start, by name
    steps          one for each step
    learning_rate  of SGD, where the program brings no optimizer
    dtype          that it computed in
    batch          of the first step, whole
    """

    space: StateMap
    start: Mapping[str, Tensor]
    steps: tuple[ReferenceStep, ...]
    learning_rate: float
    dtype: torch.dtype
    batch: Batch

    def lookup(self) -> Lookup:
        """Return the lookup from values to addresses."""
        return Lookup.of(self.space, self.start)


def run_reference(
    program: ExternalProgram,
    model: nn.Module,
    batch: Batch,
    *,
    steps: int,
    dtype: torch.dtype,
    learning_rate: float | None = None,
) -> PlainReference:
    """Train a copy of the plain model on the whole batch. Raises NnscalerError `model_raised`, `no_gradient`,
    `reference_not_finite`."""
    model = copied_with_hooks(model)
    step_of = program.reference_step or program.step
    parts = data_parts(program)
    rows: list[ReferenceStep] = []
    kept: list[Buffers] = [{}] * parts
    with torch.random.fork_rng(devices=[]), computing_in(model, dtype):
        space, start = StateMap.of(model), logical_state(model)
        optimizers = program.optimizers(model)
        for number in range(steps):
            whole = batch_of_step(batch, number)
            losses, statistics = _run_parts(program, step_of, model, whole, dtype, kept)
            loss = _backward(program, step_of, model, whole, dtype)
            gradients = space.flat({n: p.grad for n, p in every_parameter(model)})
            if dtype == torch.float64:  # a narrower one may overflow where the program does as well
                gradients_of = ((f"the gradient of {n}", p.grad) for n, p in model.named_parameters())
                _check_finite(program, number, [("the loss", loss), *gradients_of])
            if optimizers is None:
                learning_rate = learning_rate or choose_learning_rate(model)
                optimizers = (torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=learning_rate),)
            norm = None
            if program.max_norm is not None:
                norm = _clip(list(model.parameters()), program.max_norm, program.added_to_norm)
            for optimizer in optimizers:
                optimizer.step()
            if dtype == torch.float64:
                updated = ((f"the updated {n}", p) for n, p in model.named_parameters() if p.requires_grad)
                _check_finite(program, number, updated)
            state = {name: tensor for name, tensor, _ in state_of(model)}
            of_parts = tuple(tuple(map(space.flat, left)) for left in statistics)
            rows.append(ReferenceStep(loss, losses, gradients, space.flat(state), norm, of_parts))
    return PlainReference(space, start, tuple(rows), learning_rate or 0.0, dtype, batch)


def _buffers_of(model: nn.Module) -> Buffers:
    return {name: buffer.detach().clone() for name, buffer in model.named_buffers()}


def _put_buffers(model: nn.Module, values: Buffers) -> None:
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            value = values.get(name)
            if value is not None and value.shape == buffer.shape and not torch.equal(buffer, value):
                buffer.copy_(value)


def _run_parts(
    program: ExternalProgram, step_of: Any, model: nn.Module, whole: Batch, dtype: torch.dtype, kept: list[Buffers]
) -> tuple[tuple[Tensor, ...], tuple[tuple[Buffers, ...], ...]]:
    """Run copies of the model on each data part by itself; return the losses, and the buffers that each part leaves.

    Ranks keep statistics of their rows in one of two ways: they begin each step with those of the first one, which DDP
    sends, or with their own, which are `kept`.
    """
    parts = data_parts(program)
    losses, statistics = list[Tensor](), list[tuple[Buffers, ...]]()
    for part in range(parts):
        left: list[Buffers] = []
        for before in ({}, kept[part]) if kept[part] else ({},):
            mine = copied_with_hooks(model)
            _put_buffers(mine, before)
            loss = _part_loss(step_of, model, mine, whole, (part, parts), dtype)
            losses += [] if left else [loss]
            left.append(_buffers_of(mine))
        if program.reference == "parts":
            kept[part] = left[-1] if part else {}
            statistics.append(tuple(left))
    return tuple(losses), tuple(statistics)


def _clip(parameters: Sequence[nn.Parameter], max_norm: float, added: float) -> Tensor:
    """Clip gradients as `torch.nn.utils.clip_grad_norm_` does, and return their norm."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    for gradient in gradients:
        gradient.mul_((max_norm / (norm + added)).clamp(max=1.0))
    return norm.detach().clone()


def _part_loss(
    step_of: Any, model: nn.Module, mine: nn.Module, whole: Batch, part: tuple[int, int], dtype: torch.dtype
) -> Tensor:
    """Return the loss of one data part, of a copy `mine`: what the model keeps between its steps stays as it is.

    Gradients are on, for a step may run the backward pass by itself. Raises NnscalerError `model_raised`.
    """
    rows = part_of(whole, *part)
    try:
        with _told_of_part():
            return _scalar(step_of(mine, copied(rows, dtype)))
    except NnscalerError as error:
        if error.code != "model_raised":
            raise
        with _told():  # it may be that the model does not run at all
            step_of(copied_with_hooks(model), copied(whole, dtype))
        cut = [tuple(a.shape) for a, b in zip(tensors_in(whole), tensors_in(rows), strict=True) if a.shape != b.shape]
        shapes = ", ".join(map(str, cut))
        help = (
            f"tensors of the shapes {shapes} were cut along dim 0 into {part[1]} parts, for there are {cut[0][0]} "
            "rows: one that has no rows (class weights, positions, tables of angles) belongs into the "
            "model as a buffer, or outside of `batch()`, where `step` reads it"
        )
        raise NnscalerError(error.code, error.message, error.where, help) from error


def _backward(program: ExternalProgram, step_of: Any, model: nn.Module, batch: Batch, dtype: torch.dtype) -> Tensor:
    """Run forward and backward on the whole batch, or on its parts one after the other; return the loss. Gradients are
    the means over the parts.

    Each part begins with the same buffers, and those that the first one leaves stay.
    """
    parts = data_parts(program)
    pieces = [part_of(batch, i, parts) for i in range(parts)] if program.reference == "parts" else [batch]
    losses: list[Tensor] = []
    means: dict[nn.Parameter, Tensor] = {}
    before, first = _buffers_of(model), Buffers()
    for piece in pieces:
        _put_buffers(model, before)
        model.zero_grad(set_to_none=True)
        with _told():
            loss = step_of(model, copied(piece, dtype))
            finish_backward(loss, model.parameters())
        settle_gradients(model)
        for parameter in model.parameters():
            if parameter.grad is not None:
                share = parameter.grad / len(pieces)
                means[parameter] = means[parameter] + share if parameter in means else share
        losses.append(_scalar(loss))
        first = first or _buffers_of(model)
    _put_buffers(model, first)
    if not means:
        message = f"the loss of {program.name} depends on no parameter of the plain model that is trained"
        raise NnscalerError("no_gradient", message, program.where, help=_ONLY_INFERS)
    for parameter, gradient in means.items():
        parameter.grad = gradient
    return torch.stack(losses).mean(0)


_ONLY_INFERS = (
    "a program that only infers is compared by a number that is made of its output: let `step` return "
    "`output.square().mean()`, say, and run the model outside of `no_grad` and `inference_mode`"
)


def finish_backward(loss: Any, parameters: Iterable[Tensor]) -> None:
    """Run the backward pass where a step left it to its caller."""
    if isinstance(loss, Tensor) and loss.requires_grad and all(p.grad is None for p in parameters):
        run_backward(loss, torch.ones_like(loss))


def _check_finite(program: ExternalProgram, number: int, named: Iterable[tuple[str, Tensor | None]]) -> None:
    """Check that a step of the plain model gives numbers: NaN would equal any other. Raises NnscalerError
    `reference_not_finite`."""
    name = first_not_finite(named)
    if name is not None:
        message = f"{name} of the plain model of {program.name} is not finite in step {number}: nothing can be compared"
        where = program.batch_where or program.where
        raise NnscalerError("reference_not_finite", message, where, help="choose another `batch()`, or optimizer")


def _scalar(loss: Any) -> Tensor:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        found = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        message = f"`step(model, batch)` returns {found} for the plain model, and no scalar loss"
        raise NnscalerError("usage", message, help="return the loss, or define `reference_step(model, batch)`")
    return loss.detach().reshape(()).clone()


PieceOfStep = Callable[[int, int, int], tuple[Tensor, Tensor]]


def piece_of_step(program: ExternalProgram, model: nn.Module, reference: PlainReference) -> PieceOfStep:
    """Return the function of (step, piece, pieces) that runs the plain model on that piece of the rows alone: the loss,
    and gradients over all addresses. It raises what the model raises."""
    step_of = program.reference_step or program.step
    space = reference.space

    @cache
    def run(number: int, piece: int, pieces: int) -> tuple[Tensor, Tensor]:
        before = reference.steps[number - 1].parameters if number else space.flat(reference.start)
        mine = copied_with_hooks(model)
        with torch.random.fork_rng(devices=[]), computing_in(mine, reference.dtype):
            for name, tensor, _ in state_of(mine):
                give(tensor, before, space.whole(name))
            rows = part_of(batch_of_step(reference.batch, number), piece, pieces)
            loss = step_of(mine, copied(rows, reference.dtype))
            finish_backward(loss, mine.parameters())
            settle_gradients(mine)
            gradients = space.flat({n: p.grad for n, p in every_parameter(mine)})
            return _scalar(loss).double(), gradients

    return run


def mean_over_pieces(run: PieceOfStep, step: int, pieces: int) -> tuple[Tensor, Tensor]:
    """Return the means over equal pieces of the rows: of their losses, and of gradients over all addresses."""
    losses, gradients = zip(*(run(step, piece, pieces) for piece in range(pieces)), strict=True)
    return torch.stack(losses).mean(), torch.stack(gradients).mean(0)


def mean_of(parts: Sequence[Tensor]) -> Tensor:
    """Return the mean of scalar losses in float64."""
    return torch.stack([loss.double() for loss in parts]).mean()
