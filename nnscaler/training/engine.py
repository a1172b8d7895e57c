"""The engine of a rank: it runs a compiled program on batches of this rank's data part.

    engine = nnscaler.start(program)
    optimizer = engine.optimizer(torch.optim.AdamW, lr=3e-4)
    for batch in engine.loader(dataset, batch_size=256):
        loss = engine.step(batch)
        engine.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()

Every rank runs the same loop, and all of them see the same loss.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from op_registry.annotation.splits import balanced

from nnscaler.codegen.compiled_program import Program
from nnscaler.errors import NnscalerError
from nnscaler.manifest import Manifest
from nnscaler.runtime.communication.communicator import Communicator
from nnscaler.runtime.communication.communicator_of_backend import torch_communicator
from nnscaler.runtime.communication.join_process_group import ProcessPlace, torchrun_place
from nnscaler.runtime.program.program_directory import groups_of, pairs_of
from nnscaler.runtime.stage_base_class import INPUT_GRADIENT, RunContext
from nnscaler.runtime.training.async_pipeline import StreamExecutor
from nnscaler.runtime.training.cut_batch import DataPart, data_part
from nnscaler.runtime.training.executor import RankExecutor
from nnscaler.runtime.training.saving.rank_tensors_as_boxes import (
    StoredTensor,
    gathered_state,
    held_by_one,
    stored_tensors,
    trained_tensors,
)
from nnscaler.tracing.trace import refuse_autocast_around
from nnscaler.training.check_replicas import check_replicas, check_same_model, check_same_stream
from nnscaler.training.data.sample_order_and_loader import Loader, SampleOrder, loader
from nnscaler.training.program_on_rank import (
    EngineSettings,
    Running,
    check_alike,
    joined,
    named_buffers,
    run_program,
    stages_of_roles,
)
from nnscaler.training.programs_by_batch_size import (
    SentProgram,
    SizeClass,
    agreed,
    as_inputs,
    carried_inputs,
    compile_size,
    constants_of,
    described,
    has_modes,
    sent,
    shapes_of,
    unsaved_buffers,
    valueless,
    whole_batch,
)
from nnscaler.training.splittable_optimizers_and_groups import build_optimizer
from nnscaler.training.user_loop.refuse_torch_calls_on_shards import watch
from nnscaler.training.user_loop.tell_unfollowed_module_changes import ModuleWatch

Batch = Mapping[str, Tensor] | Sequence[Tensor]


def start(program: Program, *, place: ProcessPlace | None = None, **settings: Any) -> Engine:
    """Start the program on this rank: under torchrun one of many, else alone. `settings`: fields of EngineSettings.

    `place`: of this rank, for what starts ranks in another way than torchrun and has joined them.
    Raises NnscalerError: `wrong_ranks` where another number of ranks runs than the program is for, and
    `replicas_differ` where ranks made other models.
    """
    return Engine(program, *connected(program, place or torchrun_place(), EngineSettings(**settings)))


def connected(
    program: Program, place: ProcessPlace | None, chosen: EngineSettings
) -> tuple[Communicator, EngineSettings]:
    """Return this rank's communicator for a program, and the settings with its device. Raises as `start`."""
    ranks, running = program.manifest.ranks, 1 if place is None else place.world_size
    if running != ranks:
        message = f"the program is for {ranks} ranks ({program.plan.describe()}), and {running} run"
        raise NnscalerError("wrong_ranks", message, help=f"torchrun --nproc-per-node {ranks} ..., or another plan")
    if place is None:
        return Communicator(0, 1), chosen
    backend, device = joined(place, chosen.device)
    stages = stages_of_roles(sent(program), chosen.cache)
    groups, pairs = groups_of(stages), pairs_of(stages)
    communicator = torch_communicator(backend, place.rank, place.world_size, device, groups=groups, pairs=pairs)
    check_same_model(program, communicator, device)
    return communicator, replace(chosen, device=str(device))


class Engine:
    """A program on one rank, with what a training loop needs.

    parameters   name in the model -> this rank's trainable tensor between steps, which an optimizer updates
    data_part    the rows of a global batch that this rank is given
    loss_scale   from which backward starts: see LossScaler
    size         of the last global batch
    compilations what was compiled for batches of other sizes, in words
    """

    _current: Running

    def __init__(
        self,
        program: Program,
        communicator: Communicator | None = None,
        settings: EngineSettings | None = None,
        share: Engine | None = None,
    ) -> None:
        self.communicator = communicator or Communicator(0, 1)
        self.rank, self.world_size = self.communicator.rank, self.communicator.world_size
        self.settings = settings = settings or EngineSettings()
        self.device = torch.device("cpu" if settings.device == "auto" else settings.device)
        self.compilations: list[str] = []
        self.loss_scale = 1.0  # from which backward starts; it is taken out of the summed gradients
        self._first_size = self.size = SizeClass(shapes_of(program.manifest), True)
        self._carried, self._constants = carried_inputs(program), constants_of(program)
        self._has_modes, self._watch = has_modes(program), ModuleWatch(program)
        self._running: dict[SizeClass, Running] = {}
        self._family: list[Engine] = [] if share is None else share._family
        self._run = partial(run_program, communicator=self.communicator, settings=settings, device=self.device)
        for engine in self._family:
            check_alike(engine._current.stages, stages_of_roles(sent(program), settings.cache))
        running = self._run(sent(program), dict(program.state), share=[engine._current for engine in self._family])
        running.take({} if share is None else share._astray(running))  # what no program has read so far
        self._current = self._running[self._first_size] = replace(running, strays=frozenset())
        self._program, self._unsaved = valueless(program), unsaved_buffers(program)
        self._buffers: dict[str, Tensor] = {} if share is None else share._buffers  # as they are now, of all programs
        self._buffers |= {**named_buffers(self.executor), **self._buffers}
        self._family.append(self)
        self.data_part: DataPart = data_part(list(self.executor.stages.values()), self._current.program.data_axes)
        watch(self, None if program.origin is None else program.origin.module)

    def another(self, program: Program) -> Engine:
        """Start another program over the same parameters and buffers: a second loss of one model, with an optimizer of
        its own. Every rank calls it.

        `program` is of a module that has them under the same names, such as the two steps of a GAN; what is trained in
        one of them may be frozen in the other. Checkpoints of either engine have the tensors of both.
        Raises NnscalerError("layouts_differ") for a tensor that lies otherwise between steps, or is changed by one of
        them and on other ranks in the other one.
        """
        if (ranks := program.manifest.ranks) != self.world_size:
            raise NnscalerError("wrong_ranks", f"the program is for {ranks} ranks, and {self.world_size} run")
        check_same_model(program, self.communicator, self.device)
        for engine in self._family:  # programs for other sizes would not see what this one trains: they come again
            engine._current = engine._running[engine._first_size]
            engine._running = {engine._first_size: engine._current}
            engine.watch_module()  # what this one trains may be frozen for the other
        return Engine(program, self.communicator, self.settings, self)

    # -- what a loop calls ----------------------------------------------------------------------------------------

    def step(self, batch: Batch, *, last: bool = True) -> Tensor:
        """Run forward and backward of this data part's rows; return the loss of the global batch, on every rank.

        Gradients add up in `.grad` until they are set to None. Where those of several batches make one optimizer step,
        `last` is False for all but the last of them. Raises NnscalerError("batch_differs") for rows that do not fit
        those of other ranks, and what compiling for a new size raises.
        """
        return self._told(*self._trained(batch, last, keep=()))

    def step_outputs(self, batch: Batch, *, last: bool = True) -> Any:
        """Run `step`, and return what the model returns for the global batch, as `predict` does; the loss among it."""
        running, loss = self._trained(batch, last, keep=None)
        return running.executor.returned(loss)

    def stream(self, batches: Iterable[Batch], update: Callable[[], object]) -> Tensor:
        """Run a stream of batches, with an update after each; return the loss of each global batch at the parameters
        that it read, on every rank. This is delayed SGD, not what `step` does (docs/asynchronous-pipeline.md).

        `batches`: this data part's rows, of one size, as many on every rank. `update`: makes the optimizer's step from
        the gradients, which are forgotten then. Raises NnscalerError("no_stream") for a program that makes steps.
        """
        running = self._running[self._first_size]
        executor = running.executor
        if not isinstance(executor, StreamExecutor):
            message = f"schedule {self.manifest.schedule} ends each step with one update"
            raise NnscalerError("no_stream", message, help="compile with schedule pipedream, or call engine.step")
        executor.take_buffers(self._buffers)
        executor.loss_scale, before = self.loss_scale, self.context.passes
        losses = executor.stream(map(self._named, batches), update)
        self._current, count = running, self.context.passes - before
        own = torch.stack(losses).double() if losses else torch.zeros(count, dtype=torch.float64, device=self.device)
        return running.share_loss(own, self.communicator)

    def evaluate(self, batch: Batch) -> Tensor:
        """Return the loss of the global batch with the model in evaluation mode, on every rank; nothing changes."""
        running, rows = self._prepared(batch, training=False)
        return self._told(running, running.executor.forward_only(rows))

    def predict(self, batch: Batch, *, gather: bool = True) -> Any:
        """Return what the model returns for the global batch in evaluation mode, on every rank; nothing changes.

        Tensors are logical ones, in the model's own structure; the loss is among them where forward returns it.
        `gather` False: by name, this rank's part of each but the loss, as it is made, where this rank makes one.
        """
        running, rows = self._prepared(batch, training=False)
        if gather:
            return running.executor.predict(rows)
        running.executor.forward_only(rows, keep=None)
        return running.executor.results

    def loader(self, dataset: Any, batch_size: int, *, shuffle: bool = False, **options: Any) -> Loader:
        """Return a loader of this part's rows of each batch; `options`: of `SampleOrder` and `loader`."""
        order = SampleOrder(batch_size, shuffle, options.pop("seed", 0), options.pop("drop_last", False))
        made = loader(dataset, order, self.data_part, **options)
        made.agree = partial(check_same_stream, self.communicator)
        return made

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale all gradients so that the norm of the whole model's is at most `max_norm`; return the norm before."""
        return self.executor.clip_grad_norm(max_norm, norm_type)

    def optimizer(
        self,
        cls: type[Any],
        groups: Mapping[str, Mapping[str, Any]] | None = None,
        *,
        only: Callable[[str, tuple[int, ...]], bool] | None = None,
        **defaults: Any,
    ) -> torch.optim.Optimizer:
        """Return an optimizer of `cls` over this rank's tensors between steps.

        `groups`: pattern of names (`*.bias`) -> hyper-parameters of its own; the first that matches counts. `only`: of
        a name and a logical shape, whether this optimizer has the parameter; None: it has all. `defaults`: those of all
        others. Raises NnscalerError("update_needs_whole") for a parameter that rests in shards which the
        optimizer cannot update one by one.
        """
        entries = [e for e in self.manifest.parameters if not e.fqns[0].startswith(INPUT_GRADIENT)]
        names = {e.fqns[0]: e.fqns for e in entries if e.trainable and (not only or only(e.fqns[0], tuple(e.shape)))}
        untrained = {name for e in entries if not e.trainable for name in e.fqns}
        held = [tensor for tensor in self.stored() if tensor.kind == "parameter"]
        return build_optimizer(cls, names, held, groups or {}, defaults, untrained)

    def zero_grad(self) -> None:
        """Forget all gradients."""
        self.executor.zero_grad()

    def skip(self) -> None:
        """Count no optimizer step after the last batch. Every rank calls it."""
        self.executor.skip()

    def watch_module(self) -> None:
        """Tell of changes of the compiled module from now on: it was given what the engine has, say."""
        self._watch = ModuleWatch(self.program)

    # -- what the rank holds --------------------------------------------------------------------------------------

    @property
    def executor(self) -> RankExecutor:
        """The executor of the last step."""
        return self._current.executor

    @property
    def manifest(self) -> Manifest:
        """The manifest of the program that was started."""
        return self._running[self._first_size].program.manifest

    @property
    def program(self) -> Program:
        """The program that was started, without the values of its model: `state_dict` has them as they are now."""
        return self._program()

    @property
    def context(self) -> RunContext:
        """The counts of steps and batches, and the seed of random numbers."""
        return self.executor.context

    @property
    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """Return this rank's trainable tensors between steps, by name in the model."""
        own = trained_tensors(self._first.stages.values())
        others = self.stored() if self._family[1:] else ()
        read = {e.fqn: cast(torch.nn.Parameter, e.tensor) for e in others if e.kind == "parameter"}
        return {name: read.get(name, tensor) for name, tensor in own.items()}  # what another program reads goes first

    def stored(self) -> list[StoredTensor]:
        """Return every parameter and buffer of this rank between steps, those of `another` engine included."""
        return held_by_one(self._entries())

    def trained(self) -> dict[torch.nn.Parameter, StoredTensor]:
        """Return where each tensor that an optimizer of this engine, or of `another`, updates lies."""
        return {cast(torch.nn.Parameter, e.tensor): e for e in self._entries() if e.kind == "parameter"}

    def _entries(self) -> list[StoredTensor]:
        found: list[StoredTensor] = []
        for engine in self._family:
            engine.executor.take_buffers(self._buffers)
            found += stored_tensors(list(engine.executor.stages.values()), engine.manifest.tied)
        return found

    def state_dict(self) -> dict[str, Tensor]:
        """Return the logical tensors of the model's own `state_dict` by every name, whole, on each rank, which all call
        this: for models that fit a rank. `Checkpoints` writes shards."""
        found = gathered_state(self.stored(), self.communicator)
        return {name: tensor for name, tensor in found.items() if name not in self._unsaved}

    def check_replicas(self, optimizer: torch.optim.Optimizer | None = None) -> int:
        """Compare copies on several ranks by checksums, as `nnscaler.training.check_replicas.check_replicas`."""
        return check_replicas(self, optimizer)

    # -- sizes ----------------------------------------------------------------------------------------------------

    def add_size(self, size: SizeClass, program: SentProgram) -> None:
        """Take a program for batches of another size that was compiled before. Every rank calls it."""
        self._has_modes = self._has_modes or not size.training  # known by this alone where the model is not here
        self._running[size] = self._run(program, dict(program.constants), share=[self._current])

    @property
    def _first(self) -> RankExecutor:
        return self._running[self._first_size].executor

    @torch.inference_mode(False)  # in which nothing would be trained
    def _trained(self, batch: Batch, last: bool, keep: Collection[str] | None) -> tuple[Running, Tensor | None]:
        """Run forward and backward, and keep the results that are named; None: all."""
        if isinstance(self._first, StreamExecutor):
            message = f"schedule {self.manifest.schedule} makes an update after each batch, and has no step"
            raise NnscalerError("no_step", message, help="call engine.stream(batches, optimizer.step), or use 1f1b")
        if self.rank == 0 and (changed := self._watch.told()):
            warnings.warn(changed, stacklevel=4)
        running, rows = self._prepared(batch, training=True)
        running.executor.loss_scale = self.loss_scale
        loss = running.executor.step(rows, last=last, keep=keep)
        self._buffers.update(named_buffers(running.executor))
        if self.rank == 0:
            self._watch.stepped(self.trained)
        return running, loss

    def _prepared(self, batch: Batch, *, training: bool) -> tuple[Running, dict[str, Tensor]]:
        """Return the program for this batch, with the buffers as they are now, and the rows that it takes."""
        named = self._named(batch)
        shapes, rows = agreed(named, self.communicator, self._carried, self.data_part, self.context.passes < 2)
        size = self.size = SizeClass(shapes, training or not self._has_modes)
        running = self._running.get(size) or self._compiled(size, named)
        running.executor.take_buffers(self._buffers)
        if running.strays:
            running.take(self._astray(running))
        if training:
            self._current = running
        if running.cut:
            wanted = balanced(sum(rows), len(rows)) or (sum(rows) // len(rows),) * len(rows)
            if rows != wanted:
                message = f"the data parts have {list(rows)} rows, and the program takes {list(wanted)}"
                raise NnscalerError("batch_differs", message, help="engine.loader gives every part its rows")
        mixed = running.whole if running.cut else named.keys()
        whole = self._carried & mixed if self.data_part.count > 1 else frozenset()
        named |= {n: whole_batch(named[n], self.communicator, self.data_part) for n in named if n in whole}
        return running, named

    def _astray(self, running: Running) -> dict[str, Tensor]:
        """Return what a program reads and has from nowhere, as it is now, whole."""
        return gathered_state([entry for entry in self.stored() if entry.fqn in running.strays], self.communicator)

    def _named(self, batch: Batch) -> dict[str, Tensor]:
        refuse_autocast_around("the engine", self.device.type)
        self._constants.check(batch)
        return as_inputs(batch, self.manifest.inputs, self.settings.dtype)

    def _compiled(self, size: SizeClass, batch: Mapping[str, Tensor]) -> Running:
        made = compile_size(self.program, size, batch, self.communicator, self.settings.vouch, self._watch)
        self.compilations.append(described(size))
        running = self._running[size] = self._run(made, dict(made.constants), share=[self._current])
        if size.training:
            check_alike(self._running[self._first_size].stages, running.stages)
        return running

    def _told(self, running: Running, loss: Tensor | None) -> Tensor:
        """Return the loss on every rank, in float64."""
        if not running.has_loss:
            raise NnscalerError("no_loss", "the model returns no loss", help="engine.predict gives what it returns")
        value = torch.zeros((), dtype=torch.float64, device=self.device) if loss is None else loss.detach().double()
        return running.share_loss(value, self.communicator)
