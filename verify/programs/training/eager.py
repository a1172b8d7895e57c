"""The eager model on a course: untraced, in float64, with torch's own optimizer; and single computations of it, for
what could have gone wrong."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from nnscaler.errors import NnscalerError
from nnscaler.tracing.export.independent_module_copies import copied
from nnscaler.tracing.export.loss_module import Results
from nnscaler.tracing.float64_run import own_dtype
from nnscaler.tracing.sample_inputs import SampleInputs
from verify.programs.delayed_sgd_staleness import version_at
from verify.programs.eager_reference import (
    backward_results,
    forward_results,
    moved_model,
    put_state,
    record_draws,
    running_in,
)
from verify.programs.eager_with_program_draws import Draw, ProgramDraws
from verify.programs.prepare_verification import Prepared
from verify.programs.training.rank_loop import StepRecord, rates_of, states_of
from verify.programs.training.training_recipe import Batch, Course, make_optimizer, make_scheduler

Draws = tuple[Draw | None, ...]


@dataclass(frozen=True)
class EagerRun:
    """The model's own training.

    initial     parameters before it
    steps       as recorded
    buffers     after the steps, by name
    evaluation  the loss in evaluation mode after it; None where there was none
    """

    initial: Mapping[str, Tensor]
    steps: tuple[StepRecord, ...]
    buffers: Mapping[str, Tensor]
    evaluation: Tensor | None

    def before(self, step: int) -> Mapping[str, Tensor]:
        """Return the parameters that a step starts from."""
        return self.initial if step <= 0 else self.steps[step - 1].parameters

    def read(self, step: int, delays: Mapping[str, int]) -> dict[str, Tensor]:
        """Return the parameters that a batch reads which goes without so many updates, by parameter."""
        return {name: self.before(version_at(step, delay))[name] for name, delay in delays.items()}

    def states_before(self, step: int) -> Mapping[str, Mapping[str, Tensor]]:
        """Return the optimizer's states that a step starts from."""
        return {} if step <= 0 else self.steps[step - 1].states


@dataclass(frozen=True)
class EagerModel:
    """The model as it is built, with its random parameters.

    draws  its random operations for a batch of so many rows; None for a model that draws nothing, or not alike
    told   the dtype that a tensor says it has: that of the model as it was traced
    """

    model: nn.Module
    sample: SampleInputs
    seed: int
    draws: Mapping[int, Draws] | None
    told: torch.dtype | None

    def train(self, course: Course, moved: bool = False) -> EagerRun:
        """Train a copy on the course. `moved`: from parameters that are moved by one unit of rounding.

        With delays this is delayed SGD: each batch reads every parameter as it was so many updates before.
        """
        model = moved_model(self.model) if moved else copied(self.model)
        draws = self._drawing()
        with running_in(model, torch.float64, draws, self.told):  # converts it
            initial = _parameters(model)
        trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
        optimizer = make_optimizer(trained, course)
        scheduler = make_scheduler(optimizer)
        steps: list[StepRecord] = []
        for number, batches in enumerate(course.steps):
            model.zero_grad(set_to_none=True)
            first = course.first_batch(number)
            read = EagerRun(initial, tuple(steps), {}, None).read(number, course.delays or {})
            with running_in(model, torch.float64, draws, self.told), _reading(model, read):
                losses = [self._backward(model, batch, first + i, draws) for i, batch in enumerate(batches)]
            gradients = {n: None if p.grad is None else p.grad.detach().clone() for n, p in trained.items()}
            norm = None
            if course.max_norm is not None:
                norm = torch.nn.utils.clip_grad_norm_(list(trained.values()), course.max_norm).detach()
            rates = rates_of(optimizer, trained)
            optimizer.step()  # outside: torch's optimizers keep counts and products in the default dtype
            scheduler.step()
            kept = {n: t for n, t in _parameters(model).items() if n in trained}
            steps.append(StepRecord(tuple(losses), gradients, norm, rates, kept, states_of(optimizer, trained)))
        buffers = {n: b.detach().clone() for n, b in model.named_buffers()}
        evaluation = None
        if course.evaluation is not None:
            with running_in(model, torch.float64, None, self.told):
                evaluation = self._evaluated(model, course.evaluation)
        return EagerRun(initial, tuple(steps), buffers, evaluation)

    def compute(
        self,
        parameters: Mapping[str, Tensor],
        batch: Batch,
        number: int = 0,
        *,
        dropout: bool = True,
        evaluate: bool = False,
        back: Mapping[str, Tensor] | None = None,
    ) -> tuple[Tensor, dict[str, Tensor | None]]:
        """Return loss and gradients of one batch with these parameters. `number`: of the batch, for random numbers;
        `back`: parameters that take their place in memory before the backward."""
        model = copied(self.model)
        draws = self._drawing() if dropout and not evaluate else None
        with running_in(model, torch.float64, draws, self.told):
            put_state(model, parameters)
            if evaluate:
                return self._evaluated(model, batch), {}
            if back is not None:
                model.register_forward_hook(lambda *_: _overwrite(model, back))
            loss = self._backward(model, batch, number, draws)
            return loss, {n: p.grad for n, p in model.named_parameters()}

    def buffers_after(self, parameters: Mapping[str, Tensor], batch: Batch) -> list[tuple[str, dict[str, Tensor]]]:
        """Return what a batch makes of the buffers as they are built, and of zeros."""
        found = []
        for text in ("the buffers as they are built", "zeros"):
            model = copied(self.model)
            with torch.no_grad(), running_in(model, torch.float64, None, self.told):
                put_state(model, parameters)
                for buffer in model.buffers() if text == "zeros" else ():
                    buffer.zero_()
                forward_results(model, self.sample, batch)
            found.append((text, {n: b.detach().clone() for n, b in model.named_buffers()}))
        return found

    def runs_on(self, batch: Batch) -> bool:
        """Return whether the model takes the batch, and its loss is finite."""
        model = copied(self.model)
        try:
            with torch.no_grad(), running_in(model, torch.float64, None, self.told):
                return bool(torch.isfinite(_loss(forward_results(model, self.sample, batch))))
        except Exception:  # noqa: BLE001 - whatever the user's code raises
            return False

    def draws_in_evaluation(self) -> bool:
        """Return whether the model draws random numbers in evaluation mode."""
        return bool(record_draws(copied(self.model).eval(), self.sample).calls)

    def without_draws(self) -> EagerModel:
        """Return the same without dropout."""
        return replace(self, draws=None)

    def _drawing(self) -> ProgramDraws | None:
        return None if self.draws is None else ProgramDraws((), self.seed)

    def _backward(self, model: nn.Module, batch: Batch, number: int, draws: ProgramDraws | None) -> Tensor:
        if draws is not None and self.draws is not None:
            draws.begin(number, self.draws.get(_rows(batch), next(iter(self.draws.values()))))
        loss = _loss(backward_results(model, self.sample, batch)).detach().clone()
        if draws is not None:
            draws.end()
        return loss

    def _evaluated(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the loss in evaluation mode, in which the model then is."""
        model.eval()
        with torch.no_grad():
            return _loss(forward_results(model, self.sample, batch)).detach().clone()


def _loss(found: Results) -> Tensor:
    if found.loss is None:
        raise NnscalerError("no_loss", "the model returns no loss: there is nothing to train")
    return found.loss


def eager_model(prepared: Prepared, seed: int, more: Mapping[int, Draws]) -> EagerModel:
    """Return the eager model of a verification. `more`: its random operations for batches of other sizes."""
    draws = None
    if prepared.draws is not None:
        draws = {_rows(prepared.sample.tensors): prepared.draws, **more}
    return EagerModel(prepared.model, prepared.sample, seed, draws, own_dtype(prepared.model))


def updated(
    course: Course,
    parameters: Mapping[str, Tensor],
    states: Mapping[str, Mapping[str, Tensor]],
    gradients: Mapping[str, Tensor | None],
    rate: float,
    undecayed: frozenset[str] | None = None,
) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    """Return parameters and states after one step of torch's optimizer from here.

    `undecayed`: the parameters without decay, where they are not the course's.
    """
    leaves = {n: nn.Parameter(parameters[n].clone()) for n in gradients}
    optimizer = make_optimizer(leaves, course, undecayed)
    for group in optimizer.param_groups:
        group["lr"] = rate
    for name, leaf in leaves.items():
        gradient = gradients[name]
        leaf.grad = None if gradient is None else gradient.to(leaf.dtype).clone()
        if states.get(name):
            optimizer.state[leaf] = {key: value.clone() for key, value in states[name].items()}
    optimizer.step()
    return {n: p.detach() for n, p in leaves.items()}, states_of(optimizer, leaves)


@contextmanager
def _reading(model: nn.Module, values: Mapping[str, Tensor]) -> Iterator[None]:
    """While open, these parameters have these values."""
    newest = {name: p.detach().clone() for name, p in model.named_parameters() if name in values}
    put_state(model, values)
    try:
        yield
    finally:
        put_state(model, newest)


def _overwrite(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Set values behind autograd's back, which takes them for those of the forward."""
    for name, parameter in model.named_parameters():
        if name in values:
            parameter.data.copy_(values[name])


def _parameters(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.detach().clone() for n, p in model.named_parameters()}


def _rows(batch: Batch) -> int:
    return next((t.shape[0] for t in batch.values() if t.dim()), 0)
