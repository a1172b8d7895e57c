"""Bugs of what runs a program, planted in the runtime for the time of one run. The program's text is right."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from nnscaler.runtime.communication.communicator import Communicator
from nnscaler.runtime.stage_base_class import Parameter, Stage
from nnscaler.runtime.training.executor import RankExecutor
from nnscaler.runtime.training.gradients import gradient_plan
from nnscaler.runtime.training.gradients.accumulate_and_reduce import Gradients
from nnscaler.runtime.training.gradients.buckets import SumBucket
from nnscaler.runtime.training.gradients.gradient_plan import Holding, WantedGradient
from nnscaler.runtime.training.saving import checkpoint
from nnscaler.runtime.training.saving.rank_tensors_as_boxes import StoredTensor, stored_tensors

Fault = Callable[[], AbstractContextManager[object]]
Summed = Callable[[Holding, Tensor, Tensor, Communicator], Tensor]  # of the own gradient, and the sum


def early_reducer(parameter: str) -> Fault:
    """The sum of one parameter's gradient over ranks has what was there before the last micro-batch added its part."""

    def place_of(self: Gradients) -> Tensor | None:
        found = [at for one, at in self._place.items() if one.held.fqn == parameter]
        return found[0][0].place(found[0][1]) if found else None

    def enter(self: Gradients, *given: Any, **named: Any) -> None:
        place = place_of(self)
        if place is not None and any(one.held.fqn == parameter for one in self._added):
            self.__dict__["_early"] = place.clone()
        _enter(self, *given, **named)

    def completed(self: Gradients, one: WantedGradient) -> None:
        place = place_of(self)
        early = self.__dict__.pop("_early", None) if one.held.fqn == parameter else None
        if early is not None and place is not None:
            place.copy_(early)
        _completed(self, one)

    _enter, _completed = Gradients.enter, Gradients._completed

    @contextmanager
    def fault() -> Iterator[None]:
        with patch.object(Gradients, "enter", enter), patch.object(Gradients, "_completed", completed):
            yield

    return fault


def kept_gradients() -> AbstractContextManager[object]:
    """The buffer of gradients is not zeroed between steps."""
    return patch.object(RankExecutor, "zero_grad", lambda self: None)


@contextmanager
def summing(change: Summed) -> Iterator[None]:
    """What comes of the sum over ranks: `change(holding, own gradient, sum, communicator)`."""

    def start(self: SumBucket, communicator: Communicator) -> None:
        self.__dict__["_given"] = communicator, [self.place(i).clone() for i in range(len(self.names))]
        _start(self, communicator)

    def wait(self: SumBucket) -> None:
        _wait(self)
        communicator, own = self.__dict__.pop("_given")
        for i, name in enumerate(self.names):
            self.place(i).copy_(change(Holding(name, self.group), own[i], self.place(i).clone(), communicator))

    _start, _wait = SumBucket.start, SumBucket.wait
    with patch.object(SumBucket, "start", start), patch.object(SumBucket, "wait", wait):
        yield


def dummy_reduced(part: str) -> Fault:
    """A fused kernel has put the gradient elsewhere: what is summed over ranks is a dummy, and nobody reads it."""
    return lambda: summing(lambda held, own, total, _: own if part in held.fqn else total)


def drifting_copy(parameter: str) -> Fault:
    """The update of one copy of a tied parameter does not wait for the sum: from the second step on it uses the one
    before."""
    last: dict[int, Tensor] = {}

    def change(held: Holding, _: Tensor, total: Tensor, communicator: Communicator) -> Tensor:
        if held.fqn != parameter or communicator.rank < communicator.world_size // 2:
            return total
        found, last[communicator.rank] = last.get(communicator.rank, total), total
        return found

    @contextmanager
    def fault() -> Iterator[None]:
        last.clear()
        with summing(change):
            yield

    return fault


def stale_parameter(parameter: str) -> Fault:
    """From the second step on, forward reads one parameter as it was gathered before the last update."""

    def step(self: RankExecutor, batch: Mapping[str, Tensor], *more: Any) -> Tensor | None:
        held = [p for p in self.parameters.values() if p.description.fqn == parameter]  # type: ignore[attr-defined]
        fresh = [p.detach().clone() for p in held]
        before: list[Tensor] = self.__dict__.get("_gathered", fresh)
        with torch.no_grad():
            for p, old in zip(held, before, strict=True):
                p.copy_(old)
        loss = _step(self, batch, *more)
        with torch.no_grad():
            for p, new in zip(held, fresh, strict=True):
                p.copy_(new)
        self.__dict__["_gathered"] = fresh
        return loss

    _step = RankExecutor.step
    return lambda: patch.object(RankExecutor, "step", step)


def mixed_shards(parameter: str) -> Fault:
    """The sum over the copies of a tied parameter pairs the ranks of one stage with others of the next than those
    that hold the same shard."""
    right = gradient_plan.holding

    def wrong(stage: Stage, description: Parameter) -> Holding:
        held = right(stage, description)
        if description.fqn != parameter:
            return held
        ranks = sorted(r for copy in description.copies for r in copy)
        return Holding(held.fqn, tuple(sorted((stage.rank, ranks[-1 - ranks.index(stage.rank)]))))

    return lambda: patch.object(gradient_plan, "holding", wrong)


def names_of_stages() -> AbstractContextManager[object]:
    """A checkpoint in which each stage counts its blocks from zero."""
    right = stored_tensors

    def wrong(stages: Sequence[Stage], tied: Sequence[Sequence[str]] = ()) -> list[StoredTensor]:
        return [
            replace(entry, fqn=entry.fqn.replace(f"blocks.{stage.index}.", "blocks.0."))
            for stage in stages
            for entry in right([stage], tied)
        ]

    return patch.object(checkpoint, "stored_tensors", wrong)
