"""Runs hand-written roles on threads and gathers what they made."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from nnscaler.layout import States
from nnscaler.runtime import ExecutorSettings, RankExecutor, Simulator, Stage
from nnscaler.runtime.shards import assemble, unravel
from tests.layouts import gradient_states


def role(schedule: str, *stages: type[Stage]) -> ModuleType:
    """A role module of these stages, for the ranks that all of them run on."""
    module = ModuleType("role_under_test")
    ranks = set(stages[0].ranks).intersection(*(s.ranks for s in stages))
    module.__dict__.update(STAGES=stages, RANKS=tuple(sorted(ranks)), SCHEDULE=schedule)
    return module


@dataclass
class Run:
    """The executors of all ranks after their steps, and the losses of each rank, step by step."""

    executors: list[RankExecutor]
    losses: list[list[float | None]]

    def logical(self, kind: str) -> dict[str, Tensor | None]:
        """Every "gradient", "parameter" or "buffer" by fqn; copies are bitwise equal, in all stages that hold it."""
        found: dict[str, Tensor | None] = {}
        stages = {s.index: s for e in self.executors for s in e.stages.values()}
        for index, stage in stages.items():
            declared = {"buffer": stage.buffers}.get(kind, stage.parameters)
            for name, description in declared.items():
                held = [
                    (unravel(stage.ranks.index(e.rank), stage.axes), tensor)
                    for e in self.executors
                    for (i, n, _, tensor) in e.local_tensors(kind)
                    if (i, n) == (index, name)
                ]
                value = _whole(held, description.states, stage.axes, description.shape)
                known = found.setdefault(description.fqn, value)
                assert (known is None) == (value is None)
                assert known is None or value is None or torch.equal(known, value), f"copies of {description.fqn}"
        return found


def _whole(
    held: Sequence[tuple[Mapping[str, int], Tensor | None]],
    states: States,
    sizes: Mapping[str, int],
    shape: Sequence[int],
) -> Tensor | None:
    if all(tensor is None for _, tensor in held):
        return None
    made = assemble([(at, tensor) for at, tensor in held if tensor is not None], gradient_states(states), sizes, shape)
    assert not made.differences, [str(d) for d in made.differences]
    return made.value


Runner = Callable[..., Run]


@pytest.fixture
def run() -> Runner:
    """run(roles, state, batches, **settings of the executor): a step per batch, with SGD of 0.1 between steps."""

    def go(
        roles: Sequence[ModuleType], state: Mapping[str, Tensor], *batches: Mapping[str, Tensor], **options: Any
    ) -> Run:
        world_size = 1 + max(rank for r in roles for rank in r.RANKS)

        def work(communicator: Any) -> tuple[RankExecutor, list[float | None]]:
            module = next(r for r in roles if communicator.rank in r.RANKS)
            executor = RankExecutor(module, communicator.rank, communicator, state, ExecutorSettings(**options))
            losses: list[float | None] = []
            for step, batch in enumerate(batches):
                if step:
                    for parameter in {id(p): p for p in executor.parameters.values()}.values():
                        if parameter.grad is not None:
                            parameter.data.sub_(parameter.grad, alpha=0.1)
                    executor.zero_grad()
                loss = executor.step(batch)
                losses.append(None if loss is None else loss.item())
            return executor, losses

        results = Simulator(world_size).run(work)
        return Run([e for e, _ in results], [losses for _, losses in results])

    return go


@pytest.fixture(name="role")
def role_fixture() -> Callable[..., ModuleType]:
    return role
