"""Run an asynchronous pipeline: a role module whose parameters are updated after each batch, while others are on the
way. Such a stream has no steps.

The order of a device is followed as long as batches come; which version of its parameters a batch reads follows from
it (`nnscaler.instructions`).

Each version has a place in memory, out of as many as the stage declares: a new one takes that of the oldest. The tensor
between steps, which the optimizer updates and checkpoints see, is always the newest version. Each batch reads its
version through leaves of its own, so that gradients of two batches are never added up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from nnscaler.instructions import batches_written, going_on
from nnscaler.runtime.communication.communicator import ProgramError
from nnscaler.runtime.stage_base_class import Stage
from nnscaler.runtime.training.autocast_on_any_device import autocast_on, precision_of_run
from nnscaler.runtime.training.cut_batch import Batch
from nnscaler.runtime.training.executor import RankExecutor
from nnscaler.runtime.training.model_outputs import total_loss
from nnscaler.runtime.training.zero_1_2_and_master_weights import gather


class Versions:
    """The versions of a stage's parameters: a batch reads the newest one, and its backward that one again.

    Batches are named by any number that is free again after `gradients`.
    """

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._rest = {name: stage.at_rest[name] for name in stage.parameters}
        self._places: list[dict[str, Tensor]] = [{name: rest.data for name, rest in self._rest.items()}]
        self._made = 0
        self._leaves: dict[int, dict[str, Parameter]] = {}

    def read(self, batch: int) -> None:
        """Let the program's text read the newest version, for the forward of a batch."""
        # `.data`: a later update in place of the same memory is for the check of versions to find, not for autograd
        self._leaves[batch] = {name: Parameter(rest.data) for name, rest in self._rest.items()}
        self.again(batch)

    def again(self, batch: int) -> None:
        """Let the text read what the forward of a batch read: what is computed again in backward."""
        for name, leaf in self._leaves[batch].items():
            setattr(self._stage, name, leaf)

    def gradients(self, batch: int) -> None:
        """Put the gradients of a batch to the tensors between steps, and let go of what it read."""
        for name, leaf in self._leaves.pop(batch).items():
            self._rest[name].grad = leaf.grad

    def begin(self) -> None:
        """Begin a new version, as a copy of the newest one in the place of the oldest one."""
        self._made += 1
        at = self._made % self._stage.versions
        if at == len(self._places):
            self._places.append({name: rest.data.clone() for name, rest in self._rest.items()})
        for name, rest in self._rest.items():
            place = self._places[at][name]
            if place.data_ptr() != rest.data_ptr():
                place.copy_(rest.data)
                rest.data = place

    def end(self) -> None:
        """Let the text read the tensors between steps, as outside of a stream."""
        for name, rest in self._rest.items():
            setattr(self._stage, name, rest)


def executor_of(module: ModuleType) -> type[RankExecutor]:
    """Return what runs a role: one whose stages declare a staleness is a stream's."""
    return StreamExecutor if any(stage.staleness is not None for stage in module.STAGES) else RankExecutor


class StreamExecutor(RankExecutor):
    """An executor of a program that updates its parameters after each batch. `forward_only` runs one batch through the
    newest parameters, between streams."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        if len(self.stages) != 1:
            raise ProgramError(
                f"rank {self.rank} has the stages {sorted(self.stages)}: a stream has one on each device"
            )
        (self._stage,) = self.stages.values()
        self._written = batches_written(map(str, self.schedule))
        self._versions: Versions | None = None  # while a stream runs

    @torch.inference_mode(False)  # in which nothing would be trained
    def stream(self, batches: Iterable[Batch], update: Callable[[], object]) -> list[Tensor]:
        """Run a stream of global batches, with an update after each; return their losses on the ranks whose stage
        computes them, in order.

        `update` makes the optimizer's step of this rank: `.grad` is then the gradient of one batch, complete on every
        rank, at the parameters that the batch read. When the last batch has been through, the parameters have all
        updates. Every rank is given as many batches. Raises ProgramError and CommunicationError as `step`.
        """
        if self._versions is not None:
            raise ProgramError(f"rank {self.rank}: a stream runs already")
        versions = self._versions = Versions(self._stage)
        self._backward.clear()
        self._mail.clear()
        self._results.begin(())
        self.zero_grad()
        try:
            with (
                torch.enable_grad(),
                precision_of_run(self.precision, self._asks),
                autocast_on(self.device.type),
                torch.autograd.set_multithreading_enabled(False),  # communication in backward belongs to this thread
            ):
                if self._resting:  # what is not trained
                    gather(self._resting, self.communicator)
                losses = self._follow(batches, update, versions)
                self.communicator.finish()
        finally:
            versions.end()
            self._versions = None
        return losses

    def clip_grad_norm(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale all gradients to a norm, between streams. Raises ProgramError in one: stages are at different batches,
        and no gradient of the whole model exists."""
        if self._versions is not None:
            message = "in a stream there is no norm of all gradients: the stages are at different batches"
            raise ProgramError(f"rank {self.rank}: {message}; clip the gradients of this rank by value, or not at all")
        return super().clip_grad_norm(max_norm, norm_type)

    def _follow(self, batches: Iterable[Batch], update: Callable[[], object], versions: Versions) -> list[Tensor]:
        """Follow the order for as many batches as there are."""
        stage, first, begun = self._stage, self.context.passes, 0
        source, waiting, losses = iter(batches), list[Batch](), list[Tensor]()

        def more(_: int) -> bool:
            found = next(source, None)
            waiting.extend(() if found is None else (found,))
            return found is not None

        for instruction in going_on(self.schedule, more):
            # messages and leaves are named by places, each of which is free again when the order comes back to it
            at = replace(instruction, at=(instruction.micro % self._written,))
            self.context.passes = first + instruction.micro  # by which random numbers are drawn, in backward again
            if instruction.kind == "F":
                begun += 1
                batch = waiting.pop(0)
                prepared = self._prepare(stage, batch)
                versions.read(at.micro)
                loss = self._forward(stage, at, prepared, batch, keep=True)
                if loss is not None:
                    with self._working("the sum of the loss"):
                        losses.append(total_loss(stage, {at.at: loss}, self.communicator, self.precision))
            elif instruction.kind == "U":
                with self._working(str(instruction), stage):
                    self._apply(at.micro, update, versions)
            else:
                versions.again(at.micro)
                self._go_back(stage, at)
        self.context.passes = first + begun
        return losses

    def _apply(self, batch: int, update: Callable[[], object], versions: Versions) -> None:
        """Sum the gradients of a batch over ranks, and make the update."""
        self._gradients.begin()
        self._gradients.enter(self._stage.index, divides=True, last=True)
        versions.gradients(batch)
        self._gradients.collect(self._stage.index)
        self._gradients.finish(self.loss_scale)
        versions.begin()
        versions.end()  # what `update` may look at
        update()
        self.context.step += 1
        self.zero_grad()
