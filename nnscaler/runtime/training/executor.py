"""Run a role module on one rank: the instructions of a step, and the methods that a training loop needs.

A step cuts this rank's pieces out of the global batch, runs `prepare` of each stage once, then SCHEDULE instruction by
instruction, then sums gradients over ranks. Gradients accumulate over micro-batches in the parameter's `.grad`, in
float32 where the parameter is of half precision and there are several.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from nnscaler.instructions import Instruction
from nnscaler.runtime.communication.communicator import CommunicationError, Communicator, ProgramError
from nnscaler.runtime.communication.sharded_parameter_gathers import ParameterReads
from nnscaler.runtime.communication.token_slice_cache import KeptRows
from nnscaler.runtime.program.import_role_and_user_files import last_place
from nnscaler.runtime.stage_base_class import (
    Input,
    RunContext,
    Stage,
    enter,
    number_of,
    parse_schedule,
    place_of,
    times_of,
)
from nnscaler.runtime.training.autocast_on_any_device import autocast_on, dtype_named, in_precision, precision_of_run
from nnscaler.runtime.training.backward import BackwardPasses
from nnscaler.runtime.training.build_stages import Held, Key, StageBuilder, adopted, compile_each, stages_of, taken_over
from nnscaler.runtime.training.cut_batch import Batch, BatchCutter
from nnscaler.runtime.training.executor_settings import ExecutorSettings
from nnscaler.runtime.training.gradients.accumulate_and_reduce import Gradients
from nnscaler.runtime.training.gradients.gradient_norm_and_clipping import clip_gradients, gradient_norm
from nnscaler.runtime.training.instrument_role_source import observed_copy
from nnscaler.runtime.training.messages import Mail
from nnscaler.runtime.training.model_outputs import Kept, Results, check_outputs, total_loss
from nnscaler.runtime.training.zero_1_2_and_master_weights import gather

Observe = Callable[[int, int, str, str, Tensor], None]

_AS_WRITTEN = ExecutorSettings()


class RankExecutor:
    """`role_module` on rank `rank`, with parameters and buffers cut from the logical tensors in `state`.

    `observe(stage, micro, phase, name, tensor)` sees every tensor that the program assigns: phase is "prepare" (micro
    is -1), "forward", or "backward" for its gradient.

    `parameters` maps (stage index, attribute) to the trainable parameters as they lie between steps, each with its
    `.description`; a tied parameter that two stages hold on this rank occurs twice, as one object.

    `share`: executors of the same model, under other programs or for batches of other sizes. They have their parameters
    and their counts of steps in common; `take_buffers` hands buffers over.
    Raises ProgramError for a role or a state that does not fit.
    """

    def __init__(
        self,
        role_module: ModuleType,
        rank: int,
        communicator: Communicator,
        state: Mapping[str, Tensor],
        settings: ExecutorSettings = _AS_WRITTEN,
        *,
        observe: Observe | None = None,
        share: Sequence[RankExecutor] = (),
    ) -> None:
        if rank != communicator.rank:
            raise ProgramError(f"rank {rank} was given the communicator of rank {communicator.rank}")
        self.module = role_module if observe is None else observed_copy(role_module)
        self.rank, self.communicator = rank, communicator
        self.precision, self.device = settings.precision, torch.device(settings.device)
        self._asks = hasattr(role_module, "user") and not settings.compiled  # operators that may ask for dtypes
        first, passes = settings.first_step, settings.first_pass
        own = RunContext(settings.seed, settings.dropout, first, first if passes is None else passes)
        self.context: RunContext = share[0].context if share else own
        self.tied = tuple(tuple(names) for names in settings.tied)
        self.loss_scale = settings.loss_scale
        self._cutter = BatchCutter(dict(settings.shapes), settings.cut_axes)
        self._observe, self._running = observe, ("", -1)
        classes = stages_of(self.module, rank)
        self.schedule = parse_schedule(self.module.SCHEDULE, classes)
        self._updates = any(c.staleness is not None for c in classes)  # also one of which nothing is trained
        # of a stream, that of one batch
        self._step = tuple(i for i in self.schedule if not self._updates or (i.micro == 0 and i.kind != "U"))
        self._next = dict(pairwise(() if self._updates else self._step))  # what a message may be received for early
        self._trained = {i.stage for i in self.schedule if i.kind != "F"}  # the stages that run backward
        given = taken_over(other.held for other in share)
        reads = self._reads = ParameterReads(communicator)
        builder = StageBuilder(communicator, state, self.precision, self.device, self.context, given, reads)
        with precision_of_run(self.precision):
            self.stages = {c.index: builder.build(c, self._observer(c.index)) for c in classes}
        self.parameters: dict[tuple[int, str], torch.nn.Parameter] = {
            (index, name): stage.at_rest[name] for index, stage in self.stages.items() for name in stage.parameters
        }
        self.held: dict[Key, Held] = builder.held
        self._resting = tuple(builder.resting)
        for other in share:
            other._resting += adopted(other.stages.values(), other.held, self.held)
        backwards = Counter(i.stage for i in self._step if i.kind != "F")
        self._gradients = Gradients(self.stages, self._resting, communicator, self.precision, reads, backwards)
        if settings.compiled and observe is None:
            compile_each(self.stages.values(), communicator, self._gradients, reads)
        self._results = Results(self.stages, communicator, settings.returns, self.precision)
        self._mail = Mail(communicator, self.device)
        last = {} if self._updates else {i.stage: i for i in self._step if i.kind in "BW"}
        self._backward = BackwardPasses(self.schedule, last.values(), communicator, self._mail, self._gradients, reads)
        self._kept: dict[tuple[int, int], KeptRows] = {}  # by stage and micro-batch, while slices of it are to come
        self._updated: dict[int, dict[str, Tensor]] = {}  # what forward has of new buffers, by stage

    # -- a training step ------------------------------------------------------------------------------------------

    def step(self, batch: Batch, *, last: bool = True, keep: Collection[str] | None = ()) -> Tensor | None:
        """Run forward and backward of the global `batch`; return the loss on the ranks whose stage computes it (else
        None).

        Afterwards `.grad` of each parameter has this step's gradient added to what it held, complete on every rank.
        `context.step` counts this as an optimizer step. Where gradients of several batches are added up for one, `last`
        is False for all but the last of them; `skip` takes the count back where the optimizer makes no step.
        `keep`: the names of the results to keep besides the loss (None: all), for `results` and `gather_results`.
        Raises ProgramError or CommunicationError, which name the rank, the instruction and the line of the program.
        """
        if not self._results.with_loss:
            raise ProgramError("the program has no loss, and only runs forward: call predict")
        if self._updates:
            raise ProgramError("the program updates its parameters after each batch, and has no step: call stream")
        with torch.enable_grad():
            self._gradients.begin()
            self._results.begin(keep)
            total = self._run(batch, backward=True, update=True)
        self.context.passes += 1
        self.context.step += last
        return total

    def skip(self) -> None:
        """Count no optimizer step after the last batch: its gradients are not used. On every rank."""
        self.context.step -= 1

    def forward_only(self, batch: Batch, *, keep: Collection[str] | None = (), update: bool = False) -> Tensor | None:
        """Return the loss of the global `batch` as `step` gives it, without gradients; nothing of the program changes
        but buffers, where `update` is True.

        This is no evaluation mode: dropout and batch norm do what they do in the program's steps. `keep`: as in `step`.
        """
        with torch.no_grad():
            self._results.begin(keep)
            return self._run(batch, backward=False, update=update)

    def predict(self, batch: Batch) -> Any:
        """Run forward alone, and return what the model returns, as `returned`."""
        return self.returned(self.forward_only(batch, keep=None))

    def returned(self, loss: Tensor | None) -> Any:
        """Return what the model returned in a run that kept all: its structure of logical tensors, on every rank."""
        with self._working("gathering the results"), torch.no_grad():
            return self._results.restored(loss)

    @property
    def results(self) -> dict[str, Tensor]:
        """Name to this rank's part of each result that the last run kept, on the ranks of the stage that makes it.

        Micro-batches are put together; over ranks it lies as the stage's `results` declare.
        """
        return self._results.local()

    def forget_results(self) -> None:
        """Hold no result of the last run any more."""
        self._results.begin(())

    def gather_results(self) -> dict[str, Tensor]:
        """Return the logical tensors of the results that the last run kept, on every rank. Every rank calls this."""
        with self._working("gathering the results"), torch.no_grad():
            return self._results.gathered()

    def zero_grad(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None

    def clip_grad_norm(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale all gradients to a norm of at most `max_norm`; return the norm before, the same on every rank.

        The norm is that of the whole model, as torch.nn.utils.clip_grad_norm_ has it on one device. Every rank calls
        this after `step`.
        """
        stages = list(self.stages.values())
        with self._working("the gradient norm"):
            norm = gradient_norm(stages, self.communicator, norm_type)
        clip_gradients(stages, norm, max_norm)
        return norm

    def take_buffers(self, values: Mapping[str, Tensor]) -> None:
        """Go on with these buffers, by name in the model: those of another executor that has it."""
        for stage in self.stages.values():
            for name, description in stage.buffers.items():
                setattr(stage, name, values.get(description.fqn, getattr(stage, name)))

    @property
    def buffers(self) -> dict[tuple[int, str], Tensor]:
        """(stage index, attribute) to the local tensor, as of now: steps replace the tensors of updated buffers."""
        return {(i, name): getattr(s, name) for i, s in self.stages.items() for name in s.buffers}

    def local_tensors(self, kind: str) -> list[tuple[int, str, str, Tensor | None]]:
        """(stage index, attribute, fqn, tensor) of every "parameter" (frozen ones too), "gradient" or "buffer"."""
        found: list[tuple[int, str, str, Tensor | None]] = []
        for index, stage in self.stages.items():
            if kind == "buffer":
                found += [(index, name, d.fqn, getattr(stage, name)) for name, d in stage.buffers.items()]
            elif kind == "parameter":
                both = {**stage.parameters, **stage.frozen}
                found += [(index, name, d.fqn, stage.at_rest[name].detach()) for name, d in both.items()]
            elif kind == "gradient":
                found += [(index, name, d.fqn, stage.at_rest[name].grad) for name, d in stage.parameters.items()]
            else:
                raise ValueError(f"kind {kind!r} is not 'parameter', 'gradient' or 'buffer'")
        return found

    # -- instructions ---------------------------------------------------------------------------------------------

    def _run(self, batch: Batch, *, backward: bool, update: bool) -> Tensor | None:
        """Run the instructions of one step, or only its forwards."""
        self._backward.clear()
        self._kept.clear()
        self._updated.clear()
        self._mail.clear()
        losses: dict[int, Kept] = {}  # by stage
        with (
            precision_of_run(self.precision, self._asks),
            autocast_on(self.device.type),
            torch.autograd.set_multithreading_enabled(False),  # communication in backward belongs to this thread
        ):
            if self._resting:
                with self._working("the gathering of parameters"):
                    gather(self._resting, self.communicator)
            prepared = {index: self._prepare(stage, batch) for index, stage in self.stages.items()}
            for instruction in self._step:
                stage = self.stages[instruction.stage]
                self._enter(stage, instruction, backward)
                if instruction.kind == "F":
                    loss = self._forward(stage, instruction, prepared[stage.index], batch, keep=update)
                    if loss is not None:
                        losses.setdefault(stage.index, {})[instruction.at] = loss
                elif backward:
                    self._go_back(stage, instruction)
            for index, stage in self.stages.items() if update else ():
                self._update(stage, {**prepared[index], **self._updated.get(index, {})})
            total = None
            for index, values in losses.items():  # while gradients are on their way
                with self._working("the sum of the loss"):
                    total = total_loss(self.stages[index], values, self.communicator, self.precision)
            if backward:
                with self._working("the gradient sum"):
                    self._gradients.finish(self.loss_scale)
            self._backward.clear()
            self.communicator.finish()
        return total

    def _enter(self, stage: Stage, instruction: Instruction, backward: bool) -> None:
        """Go to the instruction's place in time. The rows that slices keep are freed with the last pass that needs
        them: the backward of the first slice, or the forward of the last one where there is none."""
        kept = None
        if stage.slices > 1:
            place, index = (stage.index, instruction.micro), instruction.at[1]
            kept = self._kept.setdefault(place, KeptRows(stage.slices))
            trained = backward and stage.index in self._trained
            if (instruction.kind == "B" and index == 0) if trained else index == stage.slices - 1:
                del self._kept[place]
        enter(stage, instruction.at, kept)

    def _prepare(self, stage: Stage, batch: Batch) -> Mapping[str, Any]:
        if not hasattr(stage, "prepare"):
            return {}
        with self._working(f"prepare of stage {stage.index}"), torch.no_grad():
            self._running = ("prepare", -1)
            enter(stage, (0,) * len(times_of(stage)), None)  # not the last one of the step before
            pieces = {name: self._piece(stage, source, batch) for name, source in stage.prepare_inputs.items()}
            return stage.prepare(**pieces)

    def _update(self, stage: Stage, outputs: Mapping[str, Any]) -> None:
        """Store new values of buffers, after the last instruction: what is computed again reads the old ones."""
        for key, attribute in stage.updates.items():
            if key in outputs:
                setattr(stage, attribute, outputs[key].detach())

    def _forward(
        self, stage: Stage, instruction: Instruction, prepared: Mapping[str, Any], batch: Batch, *, keep: bool
    ) -> Tensor | None:
        """Run the micro-batch, send what other stages read, and return the local loss if this stage has one.

        `keep`: what backward needs, and new values of buffers.
        """
        micro, trained = number_of(stage, instruction.at), stage.index in self._trained
        with self._working(str(instruction), stage):
            self._expect(instruction)
            self._running = ("forward", micro)
            arguments = {name: self._piece(stage, source, batch) for name, source in stage.inputs.items()}
            received: dict[str, Tensor] = {}
            for name, receive in stage.receives.items():
                with self.communicator.at(place_of(stage)):
                    value = self._mail.receive_value(stage, receive, dtype_named(receive.dtype, self.precision), micro)
                received[name] = value.requires_grad_(receive.needs_grad)
            arguments.update(received)
            if self._observe is not None:
                for name, value in arguments.items():
                    stage._observe(name, value)
            shared = {name: value for name, value in prepared.items() if name not in stage.updates}
            with (
                torch.set_grad_enabled(torch.is_grad_enabled() and trained),
                self._backward.recording(stage, instruction),
                self._reads.passing((stage.index, "F")),
            ):
                outputs = stage.forward(**arguments, **shared)
            check_outputs(stage, {**prepared, **outputs})
            outputs = self._results.collect(stage, outputs, instruction.at)
            for send in stage.sends:
                with self.communicator.at(place_of(stage)):
                    self._mail.send_value(stage, send, outputs[send.key], micro)
            if keep:
                self._updated[stage.index] = {key: outputs[key] for key in stage.updates if key in outputs}
            if keep and trained:
                self._backward.keep(stage, instruction, outputs, received)
            return outputs["loss"].detach() if stage.loss is not None else None

    def _go_back(self, stage: Stage, instruction: Instruction) -> None:
        """Run a backward of the micro-batch, or one of its halves."""
        with self._working(str(instruction), stage):
            self._expect(instruction)
            self._running = ("backward", number_of(stage, instruction.at))
            self._backward.run(stage, instruction, self.loss_scale)

    def _expect(self, instruction: Instruction) -> None:
        """Let go of what others have read, and begin to receive what comes next, while this instruction computes."""
        self.communicator.let_go()
        coming = self._next.get(instruction)
        if coming is None or (coming.kind != "F" and not torch.is_grad_enabled()):
            return
        stage, now = self.stages[coming.stage], self.communicator.context
        if stage.slices > 1:  # they have sizes of their own, which the stage knows of the present
            return
        self.communicator.context = str(coming)
        for receive in stage.receives.values() if coming.kind == "F" else ():
            with self.communicator.at(place_of(stage)):
                dtype = dtype_named(receive.dtype, self.precision)
                self._mail.expect_value(stage, receive, dtype, number_of(stage, coming.at))
        if coming.kind != "F":
            self._backward.expect(stage, coming)
        self.communicator.context = now

    # -- helpers --------------------------------------------------------------------------------------------------

    def _piece(self, stage: Stage, source: Input, batch: Batch) -> Tensor:
        piece = self._cutter.piece(stage, source, batch)
        return piece.to(self.device, in_precision(piece.dtype, self.precision))

    def _observer(self, stage: int) -> Callable[[str, Tensor], None] | None:
        if (observe := self._observe) is None:
            return None

        def observer(name: str, value: Tensor) -> None:
            phase, micro = self._running
            if phase == "backward":  # an activation that is computed again
                return
            observe(stage, micro, phase, name, value.detach())
            if value.requires_grad and phase == "forward":
                seen: list[str] = []  # the second half of a backward may come by again

                def note(gradient: Tensor) -> None:
                    if not seen:
                        seen.append(name)
                        observe(stage, micro, "backward", name, gradient)

                value.register_hook(note)

        return observer

    @contextmanager
    def _working(self, what: str, stage: Stage | None = None) -> Iterator[None]:
        """Communication inside is said to happen in `what`; other errors become ProgramErrors that say so."""
        self.communicator.context = what
        try:
            yield
        except CommunicationError:  # says all that itself
            raise
        except Exception as error:
            if str(error).startswith("DataLoader worker"):  # torch raises that wherever this process then is
                raise
            place = last_place(self.module, error.__traceback__, place_of(stage) if stage is not None else "")
            at = f" at {place}" if place else ""
            kind = "" if isinstance(error, ProgramError) else f"{type(error).__name__}: "
            raise ProgramError(f"rank {self.rank}, {what}{at}: {kind}{error}") from error
        finally:
            self.communicator.context = ""
