"""The trainer: the training loop of a run, as its settings describe it.

    Trainer(model="gpt.py", data={"source": "text.py::datasets"}, steps=1000).fit()

`nnscaler train run.toml` is this with a file's settings, on ranks that it starts; under torchrun every rank fits one.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed
from torch import nn

from nnscaler.errors import NnscalerError
from nnscaler.runtime.communication.join_process_group import ProcessPlace, leave, torchrun_place
from nnscaler.runtime.nested_values import tensors_in
from nnscaler.runtime.training.saving.checkpoint import check_writable
from nnscaler.training.build_from_settings import (
    Parts,
    flops_of_step,
    load_parts,
    make_optimizer,
    make_program,
    make_schedule,
    peak_flops,
    read_batches,
    step_schedule,
    training_order,
)
from nnscaler.training.check_replicas import check_replicas
from nnscaler.training.data.sample_order_and_loader import Loader, SampleOrder
from nnscaler.training.engine import Batch, Engine, start
from nnscaler.training.loggers import Logger, StepProfiler, StepReport, ValidationReport, make_loggers, memory_in_use
from nnscaler.training.loss_scaler import LossScaler, has_nonfinite, on_any_rank
from nnscaler.training.program_on_rank import joined
from nnscaler.training.programs_by_batch_size import Vouch
from nnscaler.training.read_settings import idle, ranks_of, settings_of
from nnscaler.training.saving.checkpoints import Checkpoints
from nnscaler.training.saving.settings_overridden_by_checkpoint import LoadedSchedule, MadeGroups
from nnscaler.training.saving.weights import as_user_error, load_weights
from nnscaler.training.train_settings import TrainSettings

Ended = Literal["finished", "stopped", "interrupted", "not finite"]


@dataclass(frozen=True)
class Result:
    """How a run ended.

    ended            all steps were made; a hook stopped it; a rank asked to; or a loss or a gradient was not finite,
                     and the optimizer did not use it
    steps            of the optimizer, those of earlier runs that this one went on from included
    loss             of the last step; None without one
    validation_loss  of the last validation; None without one
    """

    ended: Ended
    steps: int
    loss: float | None
    validation_loss: float | None


class Trainer:
    """A run on this rank. Hooks get it, and may read all of it.

    settings         of the run
    engine, optimizer, schedule, loader, checkpoints  as they are once `fit` has made them
    step             of the optimizer, the last that was made
    loss             of it
    validation_loss  of the last validation; None before the first
    running          steps are being made
    """

    engine: Engine
    optimizer: torch.optim.Optimizer
    schedule: Any
    loader: Loader
    checkpoints: Checkpoints | None
    step: int
    loss: float
    validation_loss: float | None

    def __init__(
        self,
        settings: TrainSettings | None = None,
        *,
        module: nn.Module | None = None,
        datasets: Any = None,
        write: Callable[[str], None] | None = None,
        progress: Callable[[str], None] | None = None,
        warn: Callable[[str], None] = warnings.warn,
        vouch: Vouch | None = None,
        **fields: Any,
    ) -> None:
        """Take the settings, or their fields by name, tables as dicts.

        `module`, `datasets`: in the places of `model` and `data.source`; (training, validation), or training alone.
        `write`: takes the console's lines. `progress`: is told what is being done before the first step. `vouch`: is
        called on rank 0 with each program before it runs, such as `verify.vouch`. `warn`: is told on rank 0 what the
        settings say and the run does not do.
        Raises NnscalerError `bad_settings`.
        """
        if settings is not None and fields:
            raise NnscalerError("bad_settings", "settings are given, and fields besides", help="dataclasses.replace")
        self.settings = settings_of(fields) if settings is None else settings
        there = {"model": (module, self.settings.model), "data": (datasets, self.settings.data.source)}
        for name, (given, said) in there.items():
            if given is None and not said:
                raise NnscalerError("bad_settings", f"the run has no {name}")
        self._module, self._datasets, self._write = module, datasets, write
        self._say, self._warn, self._vouch = progress or (lambda text: None), warn, vouch
        self._loggers: Sequence[Logger] = ()
        self._stopping = self._asked = self._interrupted = self._validated = self.running = False
        self.step, self.loss, self.validation_loss, self.schedule, self.checkpoints = 0, math.nan, None, None, None

    def stop(self) -> None:
        """End the run after this step, as hooks may want it, also those of one rank alone."""
        self._stopping = True

    def ask_to_stop(self) -> None:
        """End the run after this step, and save; one rank alone may call it, also from a handler of signals."""
        self._asked = True

    def fit(self) -> Result:
        """Make the program, and train to the end. Raises NnscalerError."""
        place = torchrun_place()
        joins = place is not None and not torch.distributed.is_initialized()
        if place is not None:
            joined(place, self.settings.device)
        try:
            self._prepare(place or ProcessPlace(0, 1, 0, 1))
            self.running = True
            ended = self._train()
        finally:
            self.running = False
            for logger in self._loggers:
                logger.close()
        if joins:
            self.engine.communicator.barrier(range(self.engine.world_size))  # who leaves early cuts connections
            leave()
        last = None if math.isnan(self.loss) and ended != "not finite" else self.loss
        return Result(ended, self.step, last, self.validation_loss)

    # -- before the first step ------------------------------------------------------------------------------------

    def _prepare(self, place: ProcessPlace) -> None:
        settings = self.settings
        wanted = ranks_of(settings)
        if wanted != place.world_size and (settings.ranks or place.world_size == 1 or "=" in settings.plan):
            message = f"the run is for {wanted} ranks, and {place.world_size} run"
            raise NnscalerError(
                "wrong_ranks", message, help=f"torchrun --nproc-per-node {wanted} ..., or nnscaler train"
            )
        if settings.checkpoints.folder:  # a run that cannot save is told before its first step
            with as_user_error("cannot_write"):
                check_writable(Path(settings.checkpoints.folder) / "step", place.rank)
        for text in idle(settings) if place.rank == 0 else ():
            self._warn(text)
        self._parts: Parts = load_parts(settings, self._module, self._datasets)
        say = self._say

        def told(phase: str, seconds: float, text: str) -> None:
            say(f"{phase:<12} {seconds:5.1f} s  {text}")

        program = make_program(settings, self._parts, place.world_size, told, self._vouch)
        self.engine = start(
            program,
            dtype=settings.precision.dtype or None,
            device=settings.device,
            seed=settings.seed,
            compiled=settings.compile,
            vouch=self._vouch,
        )
        self.optimizer = make_optimizer(settings.optimizer, self.engine)
        self._scaler = LossScaler(self.engine) if settings.precision.scale_loss else None
        self.loader = self._loader(self._parts.training, training_order(settings, self._parts.training))
        self._steps = self._count_steps()
        self.loader.ends_known = settings.schedule.per == "epoch" or not self._steps
        self.schedule = make_schedule(settings, self.optimizer, self._units())
        chosen = settings.checkpoints
        if chosen.folder:
            often, keep = chosen.every or None, chosen.keep or None
            self.checkpoints = Checkpoints(chosen.folder, often, keep, chosen.asynchronous, best=chosen.best)
            self.step = self._load(self.checkpoints)
            if self.step:
                self._steps = self._count_steps()  # those that were made may have had other sizes
                self._say(f"going on     after step {self.step} of {chosen.folder}")
        if settings.weights and not self.step:
            for name in load_weights(self.engine, settings.weights, settings.weights_prefix):
                self._say(f"weights      {name} is not among them, and stays as the model has it")
        self._flops = flops_of_step(program)
        param = settings.precision.param or settings.precision.dtype
        self._peak = peak_flops(self.engine.device, self.engine.world_size, param)
        if place.rank == 0:
            self._loggers = make_loggers(settings, self._write)

    def _load(self, checkpoints: Checkpoints) -> int:
        """Go on from the newest checkpoint, and tell what it has otherwise than settings say; return its step."""
        made = MadeGroups.of(self.optimizer)
        schedule = None if self.schedule is None else LoadedSchedule(self.schedule)
        step = checkpoints.load(self.engine, self.optimizer, schedule, self.loader, self._scaler)
        told = made.overridden(self.optimizer, schedule is not None)
        told += [] if schedule is None else schedule.overridden
        for text in told if self.engine.rank == 0 else ():
            self._warn(text)
        return step

    def _loader(self, dataset: Any, order: SampleOrder) -> Loader:
        data = self.settings.data
        how: dict[str, Any] = {"collate": self._parts.collate, "workers": data.workers, "packed": data.packed or None}
        return self.engine.loader(dataset, **asdict(order), **how)

    def _count_steps(self) -> int:
        """Return how many steps the run has; 0 where only the end of a stream tells."""
        settings, left = self.settings, self.loader.left(self.settings.epochs)
        return settings.steps or (0 if left is None else self.step - (-left // settings.accumulation))

    def _units(self) -> int:
        """Return how many times the schedule goes on; 0 where only the end of a stream tells."""
        settings = self.settings
        if settings.schedule.per == "step" or not self._steps:
            return self._steps
        try:
            return -(-self._steps * settings.accumulation // len(self.loader))
        except NnscalerError:
            return 0

    # -- the loop -------------------------------------------------------------------------------------------------

    def _train(self) -> Ended:
        """Make all steps that are left."""
        settings = self.settings
        self._call("on_start")
        batches = self._batches()
        self._validate_again()
        saved, ended = self.step, "stopped" if self._stopping else "finished"
        with StepProfiler(settings, self.engine.rank) as profiler:
            while not self._stopping and (not self._steps or self.step < self._steps):
                profiler.before(self.step + 1)
                begin, epochs = time.perf_counter(), self.loader.completed
                group = list(islice(batches, settings.accumulation))
                if not group:
                    break
                norm = self._step(group)
                if not math.isfinite(self.loss) or not math.isfinite(norm or 0.0):
                    return self._not_finite(norm)
                self._report(group, norm, time.perf_counter() - begin)
                step_schedule(self.schedule, 1 if settings.schedule.per == "step" else self.loader.completed - epochs)
                if settings.check_replicas_every and self.step % settings.check_replicas_every == 0:
                    check_replicas(self.engine, self.optimizer)
                self._call("on_step")
                if self._end_step():
                    saved = self.step
                if self._stopping or self._interrupted:
                    ended = "stopped" if self._stopping else "interrupted"
                    break
        if saved != self.step:
            self._save(request=True)
        if self.checkpoints is not None:
            self.checkpoints.finish()
        self._call("on_end")
        return ended  # type: ignore[return-value]

    def _end_step(self) -> bool:
        """Validate and save what is due after a step; return whether a checkpoint was written."""
        validates = self._validates(ending := self._stopping or self._at_end())
        # The first validation of a run may raise, or want too much: what is due is written before, and with its score.
        written = validates and not self._validated and self._save(request=ending or self._interrupted, ended=False)
        if validates:
            self._validate()
        done = self._save(request=written or ending or self._stopping or self._interrupted)
        if validates and not done and self.checkpoints is not None:
            self.checkpoints.score(None)  # it is that of other parameters than the next one has
        return done

    def _validates(self, ending: bool) -> bool:  # a run that goes on has no others
        return (every := self.settings.validation.every) > 0 and (self.step % every == 0 or ending)

    def _validate_again(self) -> None:
        """Make the validation of the checkpoint's step, where the run that wrote it ended in it."""
        if self.checkpoints and not self.checkpoints.scored and self._validates(self._at_end()):
            self._validate()
            self._save(request=True)

    def _at_end(self) -> bool:
        """Say if the step was the last one."""
        return self.step == self._steps if self._steps else self.loader.completed >= self.settings.epochs

    def _step(self, group: Sequence[Batch]) -> float | None:
        """Make a step of the optimizer, where the loss and all gradients are finite; return their norm, None where they
        are not clipped."""
        losses = [float(self.engine.step(b, last=b is group[-1])) for b in group]
        self.step, self.loss = self.step + 1, math.fsum(losses) / len(losses)
        if not math.isfinite(self.loss):
            return None
        if len(group) > 1:
            for parameter in self.engine.parameters.values():
                if parameter.grad is not None:
                    parameter.grad /= len(group)
        clip = self.settings.clip
        norm = float(self.engine.clip_grad_norm_(clip)) if clip else None
        checked = clip or self._scaler is not None
        wrong, self._interrupted = on_any_rank(self.engine, not checked and has_nonfinite(self.engine), self._asked)
        norm = math.nan if wrong else norm
        if self._scaler is not None:
            made = self._scaler.step(self.optimizer)
            self._scaler.update()
            norm = norm if made else None  # what overflows at this scale does not end the run
        elif math.isfinite(norm or 0.0):
            self.optimizer.step()
        self.engine.zero_grad()
        return norm

    def _not_finite(self, norm: float | None) -> Ended:
        """End the run: what is not finite is told and not used, and the newest checkpoint stays."""
        for logger in self._loggers:
            logger.step(self._described([], norm, 0.0))
        if self.checkpoints is not None:
            self.checkpoints.finish()
        return "not finite"

    def _batches(self) -> Iterator[Batch]:
        """Yield batches, epoch after epoch. Raises NnscalerError `data_raised` for what the dataset raises."""
        empty = 0  # epochs in a row without a batch
        while self.settings.steps or self.loader.epoch < self.settings.epochs:
            empty += 1
            for batch in read_batches(self.loader, self.settings, self.engine.manifest):
                empty = 0
                yield batch
            if empty == 2:
                raise NnscalerError("bad_data", "the training data has no batch")

    def _validate(self) -> None:
        settings = self.settings.validation
        begin = time.perf_counter()
        order = SampleOrder(settings.batch_size or self.settings.data.batch_size, seed=self.settings.seed)
        batches = self._loader(self._parts.validation, order)
        total, rows, count = 0.0, 0, 0
        read = read_batches(batches, self.settings, self.engine.manifest)
        for batch in islice(read, settings.batches or None):
            size = batches.samples - rows
            total, rows, count = total + float(self.engine.evaluate(batch)) * size, rows + size, count + 1
        if not rows:
            raise NnscalerError("bad_data", "the validation data has no batch")
        self.validation_loss = total / rows
        if self.checkpoints is not None:
            self.checkpoints.score(self.validation_loss)
        step_schedule(self.schedule, validation_loss=self.validation_loss)
        report = ValidationReport(self.step, self.validation_loss, count, time.perf_counter() - begin)
        for logger in self._loggers:
            logger.validation(report)
        self._validated = True
        self._call("on_validation")

    def _save(self, *, request: bool, ended: bool = True) -> bool:
        """Save, where it is due or requested; return whether it was. `ended`: all of the step has been done."""
        if self.checkpoints is None:
            return False
        if request:
            self.checkpoints.request()
        if not ended:
            self.checkpoints.score(None)
        done = self.checkpoints.save(self.step, self.engine, self.optimizer, self.schedule, self.loader, self._scaler)
        if done and ended:
            self._call("on_checkpoint")
        return done

    def _report(self, group: Sequence[Batch], norm: float | None, seconds: float) -> None:
        if self._loggers:
            report = self._described(group, norm, seconds)
            for logger in self._loggers:
                logger.step(report)

    def _described(self, group: Sequence[Batch], norm: float | None, seconds: float) -> StepReport:
        utilisation = self._flops * len(group) / seconds / self._peak if self._peak and seconds else None
        return StepReport(
            self.step,
            self._steps,
            self.loss,
            float(self.optimizer.param_groups[0]["lr"]),
            norm,
            seconds,
            sum(tensors_in(batch)[0].numel() for batch in group) * self.engine.data_part.count,
            utilisation,
            memory_in_use(self.engine.device),
        )

    def _call(self, point: str) -> None:
        for hook in self._parts.hooks[point]:
            hook(self)
            (self._stopping,) = on_any_rank(self.engine, self._stopping)
