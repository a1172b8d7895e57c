"""Errors planted in the engine, in what it runs on, or in the loop around it, for the time of one training run.

Each fault is a context manager that replaces one function. Ranks are threads of one process, so that a fault may
act on one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nnscaler.runtime.communication.communicator import Communicator
from nnscaler.runtime.training import executor, gradients
from nnscaler.runtime.training.at_rest import AtRest, Division
from nnscaler.runtime.training.executor import RankExecutor
from nnscaler.runtime.training.gradients import Gradients, Holding
from nnscaler.training.engine import Engine, Running
from verify.programs.training import ranks
from verify.programs.training.course import KNOWN, Batch, Course
from verify.programs.training.ranks import Loop

Fault = Callable[[], AbstractContextManager[None]]
Change = Callable[..., Any]


def changed(owner: Any, name: str, change: Callable[[Any], Any]) -> Fault:
    """Replace an attribute by `change` of it."""

    @contextmanager
    def fault() -> Iterator[None]:
        before = getattr(owner, name)
        setattr(owner, name, change(before))
        try:
            yield
        finally:
            setattr(owner, name, before)

    return fault


# -- gradients --------------------------------------------------------------------------------------------------------


def summed(change: Callable[[Holding, Tensor, Tensor, Communicator], Tensor]) -> Fault:
    """What comes of the sum over ranks: `change(holding, own, sum, communicator)`."""

    def wrong(right: Change) -> Change:
        def reduce(pairs: Sequence[tuple[Holding, Tensor]], communicator: Communicator, *more: Any) -> list[Tensor]:
            found = right(pairs, communicator, *more)
            return [change(h, own, total, communicator) for (h, own), total in zip(pairs, found, strict=True)]

        return reduce

    return changed(gradients, "reduce_gradients", wrong)


def finished(change: Callable[[str, Tensor, int], Tensor | None]) -> Fault:
    """What is left in `.grad` after the step: `change(name, gradient, rank)`."""

    def wrong(right: Change) -> Change:
        def finish(self: Gradients, *more: Any) -> None:
            right(self, *more)
            for leaf, rest in self._rest.items():
                if rest.grad is not None:
                    rest.grad = change(self._holdings[leaf].fqn, rest.grad, self._communicator.rank)

        return finish

    return changed(Gradients, "finish", wrong)


def stale_gradient(parameter: str) -> Fault:
    """One parameter's gradient is that of the batch before."""
    last: dict[int, Tensor] = {}

    def change(name: str, gradient: Tensor, rank: int) -> Tensor:
        if name != parameter:
            return gradient
        found, last[rank] = last.get(rank, gradient), gradient
        return found if found.shape == gradient.shape else gradient

    return finished(change)


def scattered(change: Callable[[Sequence[Tensor], Communicator, Division], Tensor | None]) -> Fault:
    """What a rank gets of a gradient that is divided: `change(pieces, communicator, division)`; None: the right one."""

    def wrong(right: Change) -> Change:
        def scatter(found: Mapping[int, Tensor], resting: Sequence[AtRest], communicator: Communicator) -> Any:
            before = dict(found)
            result = right(found, resting, communicator)
            for i, gradient in before.items():
                division = resting[i].divisions[0]
                parts = [division.part(gradient, rank) for rank in range(len(division.group))]
                other = change(parts, communicator, division)
                if other is not None:
                    result[i] = other.clone()
            return result

        return scatter

    return changed(gradients, "scatter", wrong)


def last_micro_batch_alone() -> Fault:
    """ZeRO-2 keeps the gradient of the last micro-batch, and does not add it to those before."""

    def wrong(right: Change) -> Change:
        def collect(self: Gradients, stage: int) -> None:
            self._divided = {}
            right(self, stage)

        return collect

    return changed(Gradients, "collect", wrong)


# -- between rest and use ---------------------------------------------------------------------------------------------


def gathered(change: Callable[[AtRest, Tensor, int], Tensor | None]) -> Fault:
    """What a leaf becomes: `change(entry, right value, how often leaves were made)`; None: it is left as it was."""
    times: dict[int, int] = {}

    def wrong(right: Change) -> Change:
        def gather(resting: Sequence[AtRest], communicator: Communicator) -> None:
            before = [entry.leaf.detach().clone() for entry in resting]
            right(resting, communicator)
            count = times[communicator.rank] = times.get(communicator.rank, -1) + 1
            with torch.no_grad():
                for entry, old in zip(resting, before, strict=True):
                    value = change(entry, entry.leaf.detach().clone(), count)
                    entry.leaf.copy_(old if value is None else value)

        return gather

    def fault() -> AbstractContextManager[None]:
        times.clear()
        return changed(executor, "gather", wrong)()

    return fault


def name_of(entry: AtRest) -> str:
    """Return the parameter's name in the model."""
    name: str = entry.rest.description.fqn  # type: ignore[attr-defined]
    return name


def turned(entry: AtRest, value: Tensor) -> Tensor:
    """Gather the shards of equal size in the wrong order."""
    division = entry.divisions[0]
    found = value.clone()
    for index in range(len(division.group)):
        other = division.part(value, (index + 1) % len(division.group))
        if other.shape == division.part(value, index).shape:
            division.put(found, index, other)
    return found


def one_off(entry: AtRest, value: Tensor) -> Tensor:
    """Gather every shard but the first one row too early."""
    division = entry.divisions[0]
    found = value.clone()
    for index, slot in enumerate(division.slots):
        if isinstance(slot, slice) and slot.start > 0:
            size = slot.stop - slot.start
            found.narrow(division.dim, slot.start - 1, size).copy_(division.part(value, index))
    return found


# -- clipping ---------------------------------------------------------------------------------------------------------


def clipped(change: Callable[[Change, RankExecutor, float], Tensor]) -> Fault:
    """Clip as `change(right, executor, max_norm)` does."""
    return changed(RankExecutor, "clip_grad_norm", lambda right: lambda self, limit, *more: change(right, self, limit))


def norm(change: Callable[[Sequence[Any], Communicator, Tensor], Tensor]) -> Fault:
    """Compute the norm as `change(stages, communicator, right norm)`."""

    def wrong(right: Change) -> Change:
        def compute(stages: Sequence[Any], communicator: Communicator, *more: Any) -> Tensor:
            return change(stages, communicator, right(stages, communicator, *more))

        return compute

    return changed(executor, "gradient_norm", wrong)


def scale_gradients(self: RankExecutor, factor: float) -> None:
    """Multiply every gradient of a rank."""
    for parameter in {id(p): p for p in self.parameters.values()}.values():
        if parameter.grad is not None:
            parameter.grad = parameter.grad * factor


def local_norm(stages: Sequence[Any], communicator: Communicator, right: Tensor) -> Tensor:
    """Return the norm of what this rank holds."""
    found = [p.grad for stage in stages for p in stage.at_rest.values() if p.grad is not None]
    return torch.stack([torch.linalg.vector_norm(g, dtype=torch.float64) for g in found]).norm()


def copies_counted(stages: Sequence[Any], communicator: Communicator, right: Tensor) -> Tensor:
    """Return the norm over all ranks, each copy counted."""
    own = local_norm(stages, communicator, right).square()
    return communicator.all_reduce(own, tuple(range(communicator.world_size))).sqrt()


def tied_twice(stages: Sequence[Any], communicator: Communicator, right: Tensor) -> Tensor:
    """Return a norm in which the tied parameter is counted under both its names."""
    found = [p.grad for s in stages for n, p in s.at_rest.items() if "words" in n and p.grad is not None]
    own = torch.stack([g.double().square().sum() for g in found]).sum()
    return (right.square() + own).sqrt()


def last_norm() -> Fault:
    """Clip by the norm of the step before."""
    last: dict[int, Tensor] = {}

    def change(stages: Sequence[Any], communicator: Communicator, right: Tensor) -> Tensor:
        found, last[communicator.rank] = last.get(communicator.rank, right), right
        return found

    return norm(change)


# -- the loop ---------------------------------------------------------------------------------------------------------


def loop(method: str, change: Callable[..., Any]) -> Fault:
    """A method of the loop: `change(right, self, ...)`."""
    return changed(Loop, method, lambda right: lambda self, *given: change(right, self, *given))


def at(step: int, change: Callable[..., Any]) -> Callable[..., Any]:
    """Do as `change` says at one call of the method, and right at all others."""

    def work(right: Change, self: Loop, *given: Any) -> Any:
        key = f"_calls_{id(change)}"
        count = self.__dict__[key] = self.__dict__.get(key, -1) + 1
        return change(right, self, *given) if count == step else right(self, *given)

    return work


def on(rank: int, change: Callable[..., Any]) -> Callable[..., Any]:
    """Do as `change` says on one rank, and right on all others."""

    def work(right: Change, self: Loop, *given: Any) -> Any:
        return change(right, self, *given) if self.engine.rank == rank else right(self, *given)

    return work


def skip(right: Change, self: Any, *given: Any) -> None:
    """Do nothing."""


def twice(right: Change, self: Any, *given: Any) -> Any:
    """Do it two times."""
    right(self, *given)
    return right(self, *given)


def without_lasting_state(right: Change, self: Loop) -> None:
    """Lose the optimizer's state before the update."""
    self.optimizer.state.clear()
    right(self)


def state(change: Callable[[str, str, Tensor, Loop], Tensor]) -> Callable[..., Any]:
    """Change the optimizer's tensors after the update: `change(parameter, name, tensor, loop)`."""

    def work(right: Change, self: Loop) -> None:
        right(self)
        for name, parameter in self.engine.parameters.items():
            held = self.optimizer.state.get(parameter, {})
            for key, value in list(held.items()):
                if isinstance(value, Tensor):
                    held[key] = change(name, key, value, self)

    return work


def values(change: Callable[[str, Tensor], Tensor]) -> Callable[..., Any]:
    """Change the parameters after the update."""

    def work(right: Change, self: Loop) -> None:
        right(self)
        with torch.no_grad():
            for name, parameter in self.engine.parameters.items():
                parameter.copy_(change(name, parameter.detach().clone()))

    return work


def before_update(change: Callable[[Loop, str, Tensor], Tensor | None]) -> Callable[..., Any]:
    """Change the gradients after clipping."""

    def work(right: Change, self: Loop) -> None:
        for name, parameter in self.engine.parameters.items():
            if parameter.grad is not None:
                parameter.grad = change(self, name, parameter.grad)
        right(self)

    return work


def exchanged_state(name: str, key: str, tensor: Tensor, self: Loop) -> Tensor:
    """Give each rank the state of the next one, where the shards are of one size."""
    if not tensor.dim():
        return tensor
    communicator = self.engine.communicator
    everyone = tuple(range(communicator.world_size))
    shape = torch.tensor([*tensor.shape])
    shapes = communicator.all_gather(shape, everyone)
    pieces = communicator.all_gather(tensor, everyone, [tuple(s.tolist()) for s in shapes])
    other = pieces[(self.engine.rank + 1) % communicator.world_size]
    return other if other.shape == tensor.shape else tensor


def last_gradients(self: Loop, name: str, gradient: Tensor) -> Tensor:
    """Return the gradient of the step before."""
    last: dict[str, Tensor] = self.__dict__.setdefault("_last", {})
    found, last[name] = last.get(name, gradient), gradient
    return found


def tied_update(right: Change, self: Loop) -> None:
    """Update the tied parameter under each of its names."""
    right(self)
    kept = [(p, p.grad) for n, p in self.engine.parameters.items() if n != "words.weight"]
    for parameter, _ in kept:
        parameter.grad = None
    right(self)
    for parameter, gradient in kept:
        parameter.grad = gradient


def counts_batches(name: str, key: str, tensor: Tensor, self: Loop) -> Tensor:
    """Count the batches of the accumulated step, too."""
    if key != "step" or self.engine.context.step != 3:
        return tensor
    return tensor + 1


def optimizer(change: Callable[..., Any]) -> Fault:
    """The optimizer of a loop: `change(right, parameters, course)`."""
    return changed(ranks, "make_optimizer", lambda right: lambda parameters, course: change(right, parameters, course))


def with_l2(right: Change, parameters: Mapping[str, Tensor], course: Course) -> torch.optim.Optimizer:
    """Make Adam, which has the decay in the gradient, and not AdamW."""
    found: torch.optim.Optimizer = right(parameters, course)
    groups = [{k: v for k, v in g.items() if k in ("params", "weight_decay")} for g in found.param_groups]
    return torch.optim.Adam(groups, lr=course.learning_rate, eps=KNOWN["adamw"]["eps"])


def without_one(parameter: str) -> Callable[..., Any]:
    """Leave a parameter out of the optimizer."""

    def work(right: Change, parameters: Mapping[str, Tensor], course: Course) -> torch.optim.Optimizer:
        some = {n: p for n, p in parameters.items() if n != parameter}
        found: torch.optim.Optimizer = right(some, course)
        return found

    return work


def scheduler_of_first_group(right: Change, self: Loop) -> None:
    """Schedule the rate of the first group alone."""
    kept = [group["lr"] for group in self.optimizer.param_groups]
    right(self)
    for group, rate in list(zip(self.optimizer.param_groups, kept, strict=True))[1:]:
        group["lr"] = rate


def scheduled_early(right: Change, self: Loop, engine: Engine, course: Course) -> None:
    """Step the scheduler once before the first step."""
    right(self, engine, course)
    self.optimizer.step()  # there are no gradients yet: nothing moves, and torch is content with the order
    self.scheduler.step()


def scheduled_per_batch(right: Change, self: Loop, step: int) -> list[Tensor]:
    """Step the scheduler for each batch but the last, too."""
    losses: list[Tensor] = right(self, step)
    for _ in losses[1:]:
        self.scheduler.step()
    return losses


# -- data -------------------------------------------------------------------------------------------------------------


def read(change: Callable[[Loop, Batch], Batch]) -> Fault:
    """The rows of a rank: `change(loop, global batch)`."""
    return loop("rows", lambda right, self, batch: dict(change(self, batch)))


def other_step(by: int, step: int) -> Callable[..., Any]:
    """Read the batches of another step."""
    return lambda right, self, number: right(self, number + by if number == step else number)


def of_part(self: Loop, index: int, batch: Batch) -> Batch:
    """Return the rows of one data part."""
    return self.course.rows(batch, index, self.engine.data_part.count)


def labels_of_next(self: Loop, batch: Batch) -> Batch:
    """Pair the rows of this part with the labels of the next one."""
    part = self.engine.data_part
    own, other = (of_part(self, i % part.count, batch) for i in (part.index, part.index + 1))
    same = own["labels"].shape == other["labels"].shape
    return {**own, "labels": other["labels"]} if same else own


def filled_up(self: Loop, batch: Batch) -> Batch:
    """Fill a short batch up with its own rows."""
    size = self.course.steps[0][0]["ids"].shape[0]
    rows = torch.arange(size) % batch["ids"].shape[0]
    whole = {name: tensor[rows] for name, tensor in batch.items()}
    return self.course.rows(whole, self.engine.data_part.index, self.engine.data_part.count)


def averaged_over_batches(right: Change, self: Loop, step: int) -> list[Tensor]:
    """Divide the gradients by the number of the step's batches."""
    losses: list[Tensor] = right(self, step)
    for parameter in self.engine.parameters.values():
        if parameter.grad is not None and len(losses) > 1:
            parameter.grad = parameter.grad / len(losses)
    return losses


def cleared_between(right: Change, self: Loop, step: int) -> list[Tensor]:
    """Forget the gradients between the batches of a step."""
    batches = self.batches(step)
    losses = []
    for rows in batches:
        self.clear()
        losses.append(self.engine.step(rows, last=rows is batches[-1]))
    return losses


# -- modes and buffers ------------------------------------------------------------------------------------------------


def evaluated(change: Callable[[Change, Engine, Batch], Tensor]) -> Fault:
    """`Engine.evaluate`: `change(right, engine, rows)`."""
    return changed(Engine, "evaluate", lambda right: lambda self, batch: change(right, self, batch))


def in_training_mode(right: Change, self: Engine, batch: Batch) -> Tensor:
    """Evaluate by the program of the steps."""
    running, rows = self._prepared(batch, training=True)
    return self._told(running, running.executor.forward_only(rows))


def with_a_step(right: Change, self: Engine, batch: Batch) -> Tensor:
    """Evaluate, and keep what norms see of the batch."""
    loss: Tensor = right(self, batch)
    self.step(batch)
    return loss


def context(change: Callable[[Engine], None]) -> Fault:
    """Before each batch, the counts of the engine: `change(engine)`."""

    def wrong(right: Change) -> Change:
        def step(self: Engine, batch: Batch, *, last: bool = True) -> Tensor:
            change(self)
            found: Tensor = right(self, batch, last=last)
            return found

        return step

    return changed(Engine, "step", wrong)


def set_passes(count: Callable[[Engine], int]) -> Fault:
    """Draw random numbers as for batch `count(engine)`."""

    def change(self: Engine) -> None:
        self.context.passes = count(self)

    return context(change)


def dropout_off(self: Engine) -> None:
    """Drop nothing."""
    self.context.dropout = False


def told(change: Callable[[Change, Engine, Running, Tensor | None], Tensor]) -> Fault:
    """The loss that ranks are told: `change(right, engine, running, own)`."""
    return changed(Engine, "_told", lambda right: lambda self, running, loss: change(right, self, running, loss))


def from_wrong_rank(right: Change, self: Engine, running: Running, loss: Tensor | None) -> Tensor:
    """Take the loss from the rank after the one that has it."""
    found: Tensor = right(self, replace(running, source=(running.source + 1) % self.world_size), loss)
    return found


def unsummed_loss() -> Fault:
    """Each rank has the loss of its own rows."""

    def wrong(right: Change) -> Change:
        def total(self: RankExecutor, stage: Any, losses: list[Tensor]) -> Tensor:
            return torch.stack(losses).sum(0)

        return total

    return changed(RankExecutor, "_total", wrong)
