"""Errors planted in the engine, in what it runs on, or in the loop around it, for the time of one training run.

Each fault is a context manager that replaces one function. Ranks are threads of one process, so that a fault may
act on one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from nnscaler.runtime.communication.communicator import Communicator
from nnscaler.runtime.training import executor
from nnscaler.runtime.training.executor import RankExecutor
from nnscaler.runtime.training.gradients.accumulate_and_reduce import Gradients
from nnscaler.runtime.training.gradients.buckets import DivisionBucket
from nnscaler.runtime.training.zero_1_2_and_master_weights import AtRest, Division
from verify.self_test.programs.mutants.runtime_faults import Summed, summing

Fault = Callable[[], AbstractContextManager[object]]
Change = Callable[..., Any]


def changed(owner: Any, name: str, change: Callable[[Any], Any]) -> Fault:
    """Replace an attribute by `change` of it."""
    return lambda: patch.object(owner, name, change(getattr(owner, name)))


# -- gradients --------------------------------------------------------------------------------------------------------


def summed(change: Summed) -> Fault:
    """What comes of the sum over ranks: `change(holding, own, sum, communicator)`."""
    return lambda: summing(change)


def finished(change: Callable[[str, Tensor, int], Tensor | None]) -> Fault:
    """What is left in `.grad` after the step: `change(name, gradient, rank)`."""

    def wrong(right: Change) -> Change:
        def finish(self: Gradients, *more: Any) -> None:
            right(self, *more)
            for leaf, rest in self._rest.items():
                if rest.grad is not None and leaf in self._wanted:
                    rest.grad = change(self._wanted[leaf].held.fqn, rest.grad, self._communicator.rank)

        return finish

    return changed(Gradients, "finish", wrong)


def stale_gradient(parameter: str) -> Fault:
    """One parameter's gradient is that of the batch before."""
    last: dict[int, Tensor] = {}

    def change(name: str, gradient: Tensor, rank: int) -> Tensor:
        if name != parameter:
            return gradient
        found, last[rank] = last.get(rank, gradient), gradient.clone()
        return found if found.shape == gradient.shape else gradient

    return finished(change)


def scattered(change: Callable[[Sequence[Tensor], Division], Tensor]) -> Fault:
    """What a rank gets of a gradient that is divided: `change(own pieces for each rank, division)`."""

    def taking(right: Change) -> Change:
        def take(self: DivisionBucket, position: int, gradient: Tensor) -> None:
            division = self._divisions[position]
            pieces = [division.part(gradient, rank).clone() for rank in range(len(division.group))]
            self.__dict__.setdefault("_taken", {})[position] = pieces
            right(self, position, gradient)

        return take

    def parting(right: Change) -> Change:
        def parts(self: DivisionBucket) -> list[Tensor]:
            taken = self.__dict__["_taken"]
            return [change(taken[i], self._divisions[i]) for i, _ in enumerate(right(self))]

        return parts

    @contextmanager
    def fault() -> Iterator[None]:
        with changed(DivisionBucket, "take", taking)(), changed(DivisionBucket, "parts", parting)():
            yield

    return fault


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

    def fault() -> AbstractContextManager[object]:
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


def local_norm(stages: Sequence[Any], _communicator: Communicator, _right: Tensor) -> Tensor:
    """Return the norm of what this rank holds."""
    found = [p.grad for stage in stages for p in stage.at_rest.values() if p.grad is not None]
    squares = [g.double().square().sum() for g in found]
    return torch.stack(squares).sum().sqrt()


def copies_counted(stages: Sequence[Any], communicator: Communicator, right: Tensor) -> Tensor:
    """Return the norm over all ranks, each copy counted."""
    own = local_norm(stages, communicator, right).square()
    return communicator.all_reduce(own, tuple(range(communicator.world_size))).sqrt()


def tied_twice(stages: Sequence[Any], _communicator: Communicator, right: Tensor) -> Tensor:
    """Return a norm in which the tied parameter is counted under both its names."""
    found = [p.grad for s in stages for n, p in s.at_rest.items() if "words" in n and p.grad is not None]
    own = torch.stack([g.double().square().sum() for g in found]).sum()
    return (right.square() + own).sqrt()


def last_norm() -> Fault:
    """Clip by the norm of the step before."""
    last: dict[int, Tensor] = {}

    def change(_stages: Sequence[Any], communicator: Communicator, right: Tensor) -> Tensor:
        found, last[communicator.rank] = last.get(communicator.rank, right), right
        return found

    return norm(change)
