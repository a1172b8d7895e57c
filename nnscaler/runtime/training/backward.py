"""Run the backward passes of one rank, whole or in two halves, with the gradients that come in and go out."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from nnscaler.instructions import Instruction
from nnscaler.runtime.communication.communicator import Communicator
from nnscaler.runtime.communication.sharded_parameter_gathers import ParameterReads
from nnscaler.runtime.recompute_in_backward import SavedValues, regions_in
from nnscaler.runtime.split_backward import Root, SplitBackward
from nnscaler.runtime.stage_base_class import Stage, is_observed, may_gather_again, number_of, place_of
from nnscaler.runtime.training.gradients.accumulate_and_reduce import Gradients
from nnscaler.runtime.training.messages import Mail


@dataclass(frozen=True, slots=True)
class _Output:
    """All of an output that backward needs. Its value is not among that, and goes once it is sent.

    edge  where backward enters the graph; None: no gradient of it is asked for
    """

    edge: GradientEdge | None
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, slots=True)
class _InFlight:
    """One micro-batch, or slice of it, between its forward and its backward, or the first half of it."""

    outputs: Mapping[str, _Output]
    received: Mapping[str, Tensor]


class BackwardPasses:
    """Runs B, I and W. `schedule`: says which backwards are run in halves; `last`: those of a step with which all
    gradients of their stage are complete."""

    def __init__(
        self,
        schedule: Collection[Instruction],
        last: Collection[Instruction],
        communicator: Communicator,
        mail: Mail,
        gradients: Gradients,
        reads: ParameterReads,
    ) -> None:
        self._reads = reads
        self._communicator, self._mail, self._gradients = communicator, mail, gradients
        self._in_halves = {i.of("F") for i in schedule if i.kind == "W"}
        self._last = frozenset(last)
        self._may_gather: dict[int, bool] = {}  # by stage
        self._split: dict[Instruction, SplitBackward] = {}  # by forward, until W
        self._in_flight: dict[Instruction, _InFlight] = {}  # by forward, until B or I

    def clear(self) -> None:
        """Forget what forwards left behind."""
        self._split.clear()
        self._in_flight.clear()

    def recording(self, stage: Stage, forward: Instruction) -> AbstractContextManager[None]:
        """Return what the forward of a micro-batch runs inside of."""
        if not torch.is_grad_enabled():
            return nullcontext()
        if stage.index not in self._may_gather:
            self._may_gather[stage.index] = may_gather_again(stage)
        gathers = self._may_gather[stage.index] and self._reads.gathers((stage.index, "F"))
        reads = self._reads if gathers else None
        if forward not in self._in_halves:
            return _whole(reads)
        is_compiled = "forward" in vars(stage)
        parameters = [getattr(stage, name) for name in stage.parameters]
        split = SplitBackward(parameters, reads, once=not is_compiled, hooked=is_observed(stage))
        self._split[forward] = split
        return split.recording()

    def keep(
        self, stage: Stage, forward: Instruction, outputs: Mapping[str, Tensor], received: Mapping[str, Tensor]
    ) -> None:
        """Keep where the backward of a micro-batch enters the graph, and the leaves where it ends."""
        names = [send.key for send in stage.sends if send.needs_grad] + (["loss"] if stage.loss is not None else [])
        kept = {name: _output(outputs[name]) for name in names}
        self._in_flight[forward] = _InFlight(kept, received)

    def run(self, stage: Stage, instruction: Instruction, loss_scale: float) -> None:
        """Run a backward. B and I receive the gradients of sent tensors, and return those of received tensors; W has
        all that it needs. `loss_scale`: the gradient of the loss."""
        forward = instruction.of("F")
        self._gradients.enter(stage.index, divides=instruction.kind != "I", last=instruction in self._last)
        if instruction.kind == "W":
            with self._reads.passing((stage.index, "W")):
                self._split.pop(forward).weights()
                self._reads.settle()
            self._gradients.collect(stage.index)
            return
        flight = self._in_flight.pop(forward)
        number = number_of(stage, instruction.at)
        roots = self._roots(stage, flight, number, loss_scale)
        received = {name: flight.received[name] for name, receive in stage.receives.items() if receive.needs_grad}
        with self._reads.passing((stage.index, instruction.kind)):
            if instruction.kind == "I":
                self._split[forward].inputs(roots, list(received.values()))
            elif roots:
                torch.autograd.backward([edge for edge, _ in roots], [gradient for _, gradient in roots])
            self._reads.settle()
        if instruction.kind == "I":
            self._gradients.widen(kept=True)
        else:
            self._gradients.collect(stage.index)
        for name, leaf in received.items():
            gradient = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            leaf.grad = None
            with self._communicator.at(place_of(stage)):
                self._mail.send_gradient(stage, stage.receives[name], gradient, number)

    def expect(self, stage: Stage, instruction: Instruction) -> None:
        """Begin to receive the gradients that a B or I starts from, where its forward has run."""
        flight = self._in_flight.get(instruction.of("F")) if instruction.kind != "W" else None
        if flight is None:
            return
        for send in stage.sends:
            if send.needs_grad:
                output, number = flight.outputs[send.key], number_of(stage, instruction.at)
                with self._communicator.at(place_of(stage)):
                    self._mail.expect_gradient(stage, send, output.shape, output.dtype, number)

    def _roots(self, stage: Stage, flight: _InFlight, micro: int, loss_scale: float) -> list[Root]:
        """Return where backward enters the graph, with the gradients of the outputs."""
        gradients: dict[str, Tensor] = {}
        for send in stage.sends:
            if send.needs_grad:
                output = flight.outputs[send.key]
                with self._communicator.at(place_of(stage)):
                    gradient = self._mail.receive_gradient(stage, send, output.shape, output.dtype, micro)
                gradients[send.key] = gradients[send.key] + gradient if send.key in gradients else gradient
        if stage.loss is not None:
            gradients["loss"] = _gradient_of_loss(flight.outputs["loss"], loss_scale)
        edges = {name: flight.outputs[name].edge for name in gradients}
        return [(edge, gradients[name]) for name, edge in edges.items() if edge is not None]


@contextmanager
def _whole(reads: ParameterReads | None) -> Iterator[None]:
    """Run a forward inside whose backward runs at once. `reads`: gathers parameters again; None: all are kept."""
    saved = SavedValues(reads)
    with regions_in(saved), nullcontext() if reads is None else saved.hooks():
        yield


def _output(value: Tensor) -> _Output:
    edge = get_gradient_edge(value) if value.requires_grad else None
    return _Output(edge, value.shape, value.dtype, value.device)


def _gradient_of_loss(loss: _Output, scale: float) -> Tensor:
    """Return the scale; a number beyond the loss's dtype is infinite, as in torch, and the scaler skips the step."""
    return torch.full(loss.shape, scale, dtype=torch.float64, device=loss.device).to(loss.dtype)
