"""A strategy of Lightning's Trainer, which trains with the engine.

    trainer = lightning.Trainer(devices=4, accelerator="cpu", strategy=NnscalerStrategy("dp=2,tp=2"))
    trainer.fit(module, loader)

`training_step` is compiled with what it logs, and `validation_step` likewise; optimizers, schedules, callbacks, loggers
and loops stay Lightning's. During `fit` the engine has the weights, and the module gets them back at its end. What is
not `fit` runs as under Lightning's DDP.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.overrides.distributed import _sync_module_states
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.optim import Optimizer

from nnscaler.compile import parallelize
from nnscaler.errors import NnscalerError
from nnscaler.integrations.lightning_checks import Fixed, Switches, check_module, read_first, with_tensors_of
from nnscaler.integrations.lightning_steps import (
    LOGGED,
    LOSS,
    MEASURED,
    REST,
    WEIGHT,
    LoggedMetric,
    StepModule,
    TracedStep,
    beside_tensors,
)
from nnscaler.integrations.lightning_torchmetrics import Metrics, MetricValue
from nnscaler.planning.parse_axes import parse_spec
from nnscaler.runtime.communication.join_process_group import ProcessPlace
from nnscaler.runtime.training.cut_batch import DataPart
from nnscaler.runtime.training.saving.checkpoint import load_checkpoint
from nnscaler.runtime.training.saving.dcp import Folder
from nnscaler.tracing.sample_inputs import flatten_inputs
from nnscaler.training.compile_on_first_rank import compile_once
from nnscaler.training.engine import Engine, start
from nnscaler.training.programs_by_batch_size import SizeClass
from nnscaler.training.saving.checkpoint_rotation import RunFolder
from nnscaler.training.saving.checkpoints import Checkpoints
from nnscaler.training.saving.weights import as_user_error
from nnscaler.transform.plan import DP, SHARD, Plan

PREFIX = "module."  # of the module's names in the program
_PARTS = "lightning"  # under which a checkpoint has what Lightning saves


class NnscalerStrategy(DDPStrategy):
    """Trains a LightningModule as a compiled program under a plan.

    plan     a specification such as `dp=2,tp=2,zero=1`, or a `Plan`
    options  of `nnscaler.parallelize`: micro_batches, schedule, replicate, ...
    seed     of dropout
    others   of DDPStrategy

    A loader's batch is that of one data part, as under DDP; ranks of one part get the same samples.
    """

    def __init__(
        self, plan: str | Plan, *, options: Mapping[str, Any] | None = None, seed: int = 0, **others: Any
    ) -> None:
        super().__init__(**others)
        self._plan, self._options, self._seed = plan, dict(options or {}), seed
        self._path: Path | None = None  # of the folder that was opened last
        self._end = _TrainingEnds(self)
        self._engine: Engine | None = None
        self._part = DataPart(0, 1)
        self._gradients: dict[nn.Parameter, Tensor | None] = {}
        self._accumulating = False
        self._traced: dict[SizeClass, TracedStep] = {}  # of the program for batches of a size

    @property
    def engine(self) -> Engine:
        """The engine of this rank, during `fit`. Raises NnscalerError before."""
        if self._engine is None:
            raise NnscalerError("usage", "the strategy has an engine during `fit` alone")
        return self._engine

    # -- set up ---------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer) -> None:
        """Compile the steps and start the engine for `fit`; else do as DDP does."""
        self._part = DataPart(self.global_rank, self.world_size)
        if trainer.state.fn != TrainerFn.FITTING:
            super().setup(trainer)
            return
        module = self.lightning_module
        assert isinstance(module, LightningModule)
        check_module(module, trainer, self.precision_plugin)
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        self.precision_plugin.convert_module(module)
        _sync_module_states(module)  # as DDP begins: with the values of rank 0
        self.model = module
        self._steps = StepModule(module, self.precision_plugin.forward_context)
        self._switches = Switches(module)
        if isinstance(self._plan, Plan):
            parts = self._plan.data_parts
        else:
            sizes = parse_spec(self._plan, self.world_size)
            parts = sizes.get(DP, 1) * sizes.get(SHARD, 1)
        first = self._first_batch(trainer, module)
        self._fixed: Fixed = self.broadcast(Fixed.of(first, self._steps))
        batch = (_repeated(first, parts),)
        described = {"name": type(module).__name__}
        options = {"micro_batches": None, **self._options}
        program = compile_once(
            lambda: parallelize(self._steps, batch, ranks=self.world_size, plan=self._plan, model=described, **options),
            self._steps,
            batch,
        )
        place = ProcessPlace(self.global_rank, self.world_size, self.local_rank, self.num_processes)
        self._engine = start(program, place=place, device=self.root_device.type, seed=self._seed)
        self._part = self._engine.data_part
        self._metrics = Metrics(module)
        self._traced = {self._engine.size: self._step_that_was_traced(training=True)}
        self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        trainer.callbacks.insert(0, self._end)  # type: ignore[attr-defined]
        vars(self.precision_plugin)["clip_grad_by_norm"] = self._clip_grad_by_norm

    def _first_batch(self, trainer: Trainer, module: LightningModule) -> Any:
        """Return a batch as `training_step` gets it; training reads as if it had not been read."""
        batch = read_first(trainer.fit_loop._data_source)
        if batch is None:
            raise NnscalerError("bad_data", "the training data has no batch")
        batch = self.precision_plugin.convert_input(batch)
        batch = module._on_before_batch_transfer(batch, dataloader_idx=0)
        return self.batch_to_device(batch, torch.device("cpu"), dataloader_idx=0)

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Let the module make its optimizer, and give it this rank's tensors in the places of the module's."""
        super().setup_optimizers(trainer)
        if self._engine is None:
            return
        if len(self.optimizers) != 1:
            message = f"configure_optimizers returns {len(self.optimizers)} optimizers"
            raise NnscalerError("bad_settings", message, help="return one, with parameter groups")
        self._optimizer = with_tensors_of(self.optimizers[0], self._steps, self._engine)
        self.optimizers = self.optimizers  # Lightning wraps what is in it

    def _get_process_group_backend(self) -> str:
        cpu = self.root_device.type == "cpu"
        return self._process_group_backend or ("gloo" if cpu else "cpu:gloo,cuda:nccl")

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        """Return the share of the data that this rank loads: ranks of one data part load the same."""
        return {"num_replicas": self._part.count, "rank": self._part.index}

    # -- a step ---------------------------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run forward and backward; `backward` hands the gradients over, in the place where Lightning expects them."""
        engine = self.engine
        self._switches.check()
        before = {parameter: parameter.grad for parameter in engine.parameters.values()}
        engine.zero_grad()
        found = engine.step_outputs(self._named(args, kwargs), last=not self._accumulating)
        self._gradients = {parameter: parameter.grad for parameter in before}
        for parameter, gradient in before.items():
            parameter.grad = gradient
        rest = {**found[REST], **self._told(found, training=True)}
        loss = found[LOSS].detach()
        return {LOSS: loss, **rest} if rest else loss

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Add the gradients of the last step to those before it, for what the optimizer updates: nothing takes back
        those of others, and Lightning clips without them."""
        module = self.lightning_module
        assert module is not None
        closure_loss = self.precision_plugin.pre_backward(closure_loss, module)
        batches = module.trainer.accumulate_grad_batches
        updated = {id(parameter) for group in self._optimizer.param_groups for parameter in group["params"]}
        for parameter, gradient in self._gradients.items():
            if gradient is not None and id(parameter) in updated:
                gradient = gradient / batches if batches > 1 else gradient
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        self._gradients = {}
        return self.precision_plugin.post_backward(closure_loss, module)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Inside, a batch is not the last one of an optimizer step."""
        self._accumulating = True
        try:
            yield
        finally:
            self._accumulating = False

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run `validation_step` of the module with the weights that are being trained."""
        if self._engine is None:
            return super().validation_step(*args, **kwargs)
        if len(args) + len(kwargs) > 2:
            raise NnscalerError("bad_settings", "several loaders for validation", help="one, or trainer.validate")
        named = self._named(args, kwargs)
        with self._fixed.explained(named):
            found = self._engine.predict(named)
        values = self._told(found, training=False)
        return {**found[REST], **values} if values else found.get(REST)

    def _named(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Tensor]:
        batch = args[0] if args else next(iter(kwargs.values()))
        self._fixed.check(batch)
        return dict(flatten_inputs(self._steps, (batch,)).tensors)

    def _told(self, found: Mapping[str, Any], *, training: bool) -> dict[str, Any]:
        """Measure and log the values of the global batch as the step did, which ran as it was traced on rank 0; return
        what of metrics it returns."""
        size = self.engine.size
        if size not in self._traced:  # it was compiled for this batch
            self._traced[size] = self._step_that_was_traced(training=training)
        module, traced, logged = self.lightning_module, self._traced[size], found[LOGGED]
        assert module is not None
        values = self._metrics.run(traced.metrics, found[MEASURED])
        for name, options in traced.logs.items():
            value = logged[name] if name in logged else options["value"]
            if isinstance(value, LoggedMetric):
                value = module.get_submodule(value.path)
            elif isinstance(value, MetricValue):
                value = value.function(values)
            kept = {key: item for key, item in options.items() if key != "value"}
            if WEIGHT + name in logged:
                kept["batch_size"] = logged[WEIGHT + name].item()
            with warnings.catch_warnings():  # every rank has the global value already
                warnings.filterwarnings("ignore", message=".*sync_dist=True.*")
                module.log(name, value, **{**kept, "sync_dist": False})
        return {name: value.function(values) for name, value in traced.values.items()}

    def _step_that_was_traced(self, *, training: bool) -> TracedStep:
        """Return what the step does that was compiled last, from rank 0. Every rank calls this."""
        self._steps.notes.tell()
        found: TracedStep = self.broadcast(self._steps.notes.by_mode.get(training, TracedStep()))
        return found

    def _clip_grad_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        self.engine.clip_grad_norm_(clip_val)

    # -- checkpoints: a folder each, which any plan reads -----------------------------------------------------------

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Return True: the engine reads the checkpoint."""
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return what is no tensor of the engine during `fit`: that writes the weights."""
        module = self.lightning_module
        assert module is not None
        return beside_tensors(module) if self._engine is not None else super().lightning_module_state_dict()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return nothing during `fit`: the engine writes the optimizer's state."""
        return {} if self._engine is not None else super().optimizer_state(optimizer)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a folder: weights and optimizer in shards, and what Lightning gives."""
        if self._engine is None:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        folder = Checkpoints(self.broadcast(str(filepath)), keep=1)
        folder.register(_PARTS, _Saved(checkpoint))
        folder.request()
        folder.save(0, self._engine, self._optimizer if "optimizer_states" in checkpoint else None)
        folder.finish()

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return what Lightning saved; the weights follow in `load_model_state_dict`."""
        path = Path(checkpoint_path)
        self._path = path if path.is_dir() else None
        if self._path is None:
            if self._engine is None:
                return super().load_checkpoint(checkpoint_path, *args, **kwargs)
            if not path.exists():
                raise NnscalerError("no_checkpoint", f"the checkpoint {path} does not exist")
            help = "load its weights into the module before fit: module.load_state_dict(torch.load(...)['state_dict'])"
            raise NnscalerError("cannot_read", f"{path} is no checkpoint that this strategy wrote", help=help)
        saved = _Saved({})
        with as_user_error("cannot_read"):
            if not RunFolder(path).steps():
                raise NnscalerError("cannot_read", f"{path} has no whole checkpoint: its save was ended early")
            folder = Folder(RunFolder(path).at(0))
            saved.load_state_dict(folder.read([], [_PARTS])[_PARTS])
        return saved.held

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Read the weights, and during `fit` the optimizer's state with them."""
        module = self.lightning_module
        assert module is not None
        if self._engine is None:
            if self._path is not None:
                state = _without_prefix(load_checkpoint(RunFolder(self._path).at(0)).state, module)
                checkpoint = {**checkpoint, "state_dict": {**state, **checkpoint["state_dict"]}}
            super().load_model_state_dict(checkpoint, strict)
            return
        optimizer = self._optimizer if "optimizer_states" in checkpoint else None
        assert self._path is not None, "another file is refused when it is opened"
        Checkpoints(self._path).load(self._engine, optimizer, step=0)
        self.copy_to_module(checkpoint["state_dict"])  # a later run, and hooks, begin from there

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Do nothing during `fit`: the optimizer's state came with the weights."""
        if self._engine is None:
            super().load_optimizer_state_dict(checkpoint)

    # -- the end --------------------------------------------------------------------------------------------------

    def copy_to_module(self, beside: Mapping[str, Any] | None = None) -> None:
        """Give the LightningModule the weights as they are now, whole, on every rank. Every rank calls it.

        `beside`: what its state dict has besides tensors, where that is not to stay.
        """
        module = self.lightning_module
        assert module is not None
        weights = _without_prefix(self.engine.state_dict(), module)
        module.load_state_dict({**beside_tensors(module), **(beside or {}), **weights})
        self.engine.watch_module()

    def teardown(self) -> None:
        """Let the engine go."""
        if self._engine is not None:
            vars(self.precision_plugin).pop("clip_grad_by_norm", None)
            callbacks = self.lightning_module.trainer.callbacks  # type: ignore[union-attr]
            callbacks[:] = [callback for callback in callbacks if callback is not self._end]
            self._metrics.release()
        self._engine, self._gradients = None, {}
        super().teardown()


class _TrainingEnds(Callback):
    """Gives the module its weights back, before other callbacks and the module are told that training ends."""

    def __init__(self, strategy: NnscalerStrategy) -> None:
        self._strategy = strategy

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._strategy.copy_to_module()


class _Saved:
    """The state that Lightning saves, as a part of a checkpoint."""

    def __init__(self, held: dict[str, Any]) -> None:
        self.held = held

    def state_dict(self) -> dict[str, Any]:
        return self.held

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.held = state_dict


def _repeated(batch: Any, parts: int) -> Any:
    """Return a batch of as many rows for each of `parts`: those of one, over again."""
    rows: list[int] = []

    def repeat(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.dim():
            return value
        rows.append(value.shape[0])
        return torch.cat([value] * parts) if value.shape[0] == rows[0] else value

    return apply_to_collection(batch, Tensor, repeat)


def _without_prefix(state: Mapping[str, Tensor], module: nn.Module) -> dict[str, Tensor]:
    """Return a program's state as the module's: its own names, and no buffers that its state dict leaves out."""
    wanted = module.state_dict().keys()
    found = {name.removeprefix(PREFIX): tensor for name, tensor in state.items()}
    return {name: tensor for name, tensor in found.items() if name in wanted}
