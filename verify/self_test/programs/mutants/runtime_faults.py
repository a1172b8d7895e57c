"""Bugs of what runs a program, planted in the runtime for the time of one run. The program's text is right."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nnscaler.runtime.communication.communicator import Communicator
from nnscaler.runtime.role import Parameter, Stage
from nnscaler.runtime.training import checkpoint, gradients
from nnscaler.runtime.training.executor import RankExecutor
from nnscaler.runtime.training.gradients import Gradients, Holding, reduce_gradients
from nnscaler.runtime.training.stored import StoredTensor, stored_tensors
from nnscaler.runtime.training.stream import StreamExecutor
from nnscaler.runtime.training.versions import Versions

Fault = Callable[[], AbstractContextManager[None]]
Pairs = Sequence[tuple[Holding, Tensor]]


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def early_reducer(parameter: str) -> Fault:
    """The sum of one parameter's gradient over ranks starts before the last micro-batch has added its part."""

    def collect(self: Gradients, *more: Any) -> None:
        _collect(self, *more)
        history: list[dict[torch.nn.Parameter, Tensor]] = self.__dict__.setdefault("_history", [])
        history.append(
            {p: p.grad.clone() for p, h in self._holdings.items() if p.grad is not None and h.fqn == parameter}
        )

    def finish(self: Gradients, *more: Any) -> None:
        history = self.__dict__.pop("_history", [])
        if len(history) > 1:
            for held, gradient in history[-2].items():
                held.grad = gradient
        _finish(self, *more)

    _collect, _finish = Gradients.collect, Gradients.finish

    @contextmanager
    def fault() -> Iterator[None]:
        with _replaced(Gradients, "collect", collect), _replaced(Gradients, "finish", finish):
            yield

    return fault


def kept_gradients() -> AbstractContextManager[None]:
    """The buffer of gradients is not zeroed between steps."""
    return _replaced(RankExecutor, "zero_grad", lambda self: None)


def _reducing(change: Callable[[Pairs, list[Tensor], Communicator], list[Tensor]]) -> AbstractContextManager[None]:
    def wrong(pairs: Pairs, communicator: Communicator, *more: Any) -> list[Tensor]:
        return change(pairs, reduce_gradients(pairs, communicator, *more), communicator)

    return _replaced(gradients, "reduce_gradients", wrong)


def dummy_reduced(part: str) -> Fault:
    """A fused kernel has put the gradient elsewhere: what is summed over ranks is a dummy, and nobody reads it."""

    def change(pairs: Pairs, summed: list[Tensor], _: Communicator) -> list[Tensor]:
        return [own if part in held.fqn else total for (held, own), total in zip(pairs, summed, strict=True)]

    return lambda: _reducing(change)


def drifting_copy(parameter: str) -> Fault:
    """The update of one copy of a tied parameter does not wait for the sum: from the second step on it uses the one
    before."""
    last: dict[int, Tensor] = {}

    def change(pairs: Pairs, summed: list[Tensor], communicator: Communicator) -> list[Tensor]:
        found = list(summed)
        for i, (held, _) in enumerate(pairs):
            if held.fqn == parameter and communicator.rank >= communicator.world_size // 2:
                found[i] = last.get(communicator.rank, summed[i])
                last[communicator.rank] = summed[i]
        return found

    @contextmanager
    def fault() -> Iterator[None]:
        last.clear()
        with _reducing(change):
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
    return lambda: _replaced(RankExecutor, "step", step)


def mixed_shards(parameter: str) -> Fault:
    """The sum over the copies of a tied parameter pairs the ranks of one stage with others of the next than those
    that hold the same shard."""
    right = gradients.holding

    def wrong(stage: Stage, description: Parameter) -> Holding:
        held = right(stage, description)
        if description.fqn != parameter:
            return held
        ranks = sorted(r for copy in description.copies for r in copy)
        return Holding(held.fqn, tuple(sorted((stage.rank, ranks[-1 - ranks.index(stage.rank)]))))

    return lambda: _replaced(gradients, "holding", wrong)


def names_of_stages() -> AbstractContextManager[None]:
    """A checkpoint in which each stage counts its blocks from zero."""
    right = stored_tensors

    def wrong(stages: Sequence[Stage], tied: Sequence[Sequence[str]] = ()) -> list[StoredTensor]:
        return [
            replace(entry, fqn=entry.fqn.replace(f"blocks.{stage.index}.", "blocks.0."))
            for stage in stages
            for entry in right([stage], tied)
        ]

    return _replaced(checkpoint, "stored_tensors", wrong)


# Bugs of what runs a stream.


def no_stashing() -> AbstractContextManager[None]:
    """A backward goes through the newest parameters, whichever its forward read."""
    return _replaced(Versions, "begin", lambda self: None)


def stale_forward() -> AbstractContextManager[None]:
    """A forward reads the version before the newest one."""

    def read(self: Versions, batch: int) -> None:
        right(self, batch)
        last = self._places[(self._made - 1) % self._stage.versions] if self._made else None
        if last is not None and len(self._places) > 1:
            self._leaves[batch] = {name: torch.nn.Parameter(value.clone()) for name, value in last.items()}
            self.again(batch)

    right = Versions.read
    return _replaced(Versions, "read", read)


def repeated_update(times: int) -> Fault:
    """Add to the parameters so many times what an update adds."""

    def apply(self: StreamExecutor, *given: Any) -> None:
        before = {p: p.detach().clone() for p in self.parameters.values()}
        right(self, *given)
        with torch.no_grad():
            for p, old in before.items():
                p.copy_(old + times * (p - old))

    right = StreamExecutor._apply
    return lambda: _replaced(StreamExecutor, "_apply", apply)


def update_before_the_sum() -> AbstractContextManager[None]:
    """An update takes the gradient of this rank's rows, before the sum over data parts."""
    return _reducing(lambda pairs, summed, _: [own for _, own in pairs])
