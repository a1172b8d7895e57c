"""Errors planted in the loop of a training run, in the data that it reads, and in the modes of the model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nnscaler.runtime.training import executor
from nnscaler.runtime.training.saving.dcp import Folder, TensorShard
from nnscaler.runtime.training.saving.rank_tensors_as_boxes import StoredTensor
from nnscaler.training.engine import Engine
from nnscaler.training.program_on_rank import Running
from verify.programs.training import rank_loop
from verify.programs.training.rank_loop import Loop
from verify.programs.training.training_recipe import KNOWN, Batch, Course
from verify.self_test.training.engine_faults import Change, Fault, changed

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


def exchanged_state(_name: str, _key: str, tensor: Tensor, self: Loop) -> Tensor:
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


def counts_batches(_name: str, key: str, tensor: Tensor, self: Loop) -> Tensor:
    """Count the batches of the accumulated step, too."""
    if key != "step" or self.engine.context.step != 3:
        return tensor
    return tensor + 1


def optimizer(change: Callable[..., Any]) -> Fault:
    """The optimizer of a loop: `change(right, engine, course)`."""
    return changed(rank_loop, "make_optimizer", lambda right: lambda engine, course, _: change(right, engine, course))


def with_l2(right: Change, engine: Engine, course: Course) -> torch.optim.Optimizer:
    """Make Adam, which has the decay in the gradient, and not AdamW."""
    found: torch.optim.Optimizer = right(engine, course, course.undecayed)
    groups = [{k: v for k, v in g.items() if k in ("params", "weight_decay")} for g in found.param_groups]
    return torch.optim.Adam(groups, lr=course.learning_rate, eps=KNOWN["adamw"]["eps"])


def decayed_but(names: Callable[[Engine, Course], Collection[str]]) -> Fault:
    """Decay all parameters but `names(engine, course)`."""
    return optimizer(lambda right, engine, course: right(engine, course, frozenset(names(engine, course))))


def without_one(rank: int, parameter: str) -> Fault:
    """Leave a parameter out of the optimizer of one rank."""

    def make(right: Change, engine: Engine, course: Course) -> torch.optim.Optimizer:
        found: torch.optim.Optimizer = right(engine, course, course.undecayed)
        for group in found.param_groups if engine.rank == rank else ():
            group["params"] = [p for p in group["params"] if p is not engine.parameters[parameter]]
        return found

    return optimizer(make)


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


def narrow(what: str) -> Change:
    """In the program's own dtypes, keep parameters, gradients or states in bfloat16."""

    def work(right: Change, self: Loop, *given: Any) -> Any:
        found = right(self, *given)
        for parameter in self.engine.parameters.values() if self.course.precision is None else ():
            if what == "gradient" and parameter.grad is not None:
                gradient = parameter.grad.bfloat16()
                parameter.grad = None
                parameter.grad_dtype = torch.bfloat16  # else torch refuses it
                parameter.grad = gradient
            elif what == "parameter":
                parameter.data = parameter.data.bfloat16()
            elif what == "state":
                held = self.optimizer.state[parameter]
                held["exp_avg"] = held["exp_avg"].bfloat16()
        return found

    return work


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


def cleared_between(_right: Change, self: Loop, step: int) -> list[Tensor]:
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


def in_training_mode(_right: Change, self: Engine, batch: Batch) -> Tensor:
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
    return changed(executor, "total_loss", lambda right: lambda stage, losses, *more: torch.stack(losses).sum(0))


# -- checkpoints ------------------------------------------------------------------------------------------------------


def without_buffers(right: Change) -> Change:
    """Leave buffers as a new model has them."""

    def read(engine: Engine, opened: Folder) -> None:
        before = [(s.tensor, s.tensor.clone()) for s in engine.stored() if s.kind == "buffer"]
        right(engine, opened)
        for tensor, value in before:
            tensor.copy_(value)

    return read


def rounded_shards(right: Change) -> Change:
    """Write weights in half precision."""

    def shards(stored: Sequence[StoredTensor], *, to_write: bool) -> list[TensorShard]:
        narrow = (replace(s, tensor=s.tensor.detach().bfloat16().to(s.tensor.dtype)) for s in stored)
        found: list[TensorShard] = right(list(narrow), to_write=to_write)
        return found

    return shards


def on_other_ranks_than(rank: int) -> Callable[[Change], Change]:
    """Read nothing on one rank."""
    return lambda right: lambda engine, opened: None if engine.rank == rank else right(engine, opened)
