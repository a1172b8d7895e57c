"""Make the steps of a LightningModule a model that can be compiled: what it logs becomes results beside the loss."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torchmetrics import Metric

from nnscaler.errors import NnscalerError
from nnscaler.integrations.lightning_torchmetrics import MetricCall, MetricValue, metrics_recorded

LOSS, LOGGED, MEASURED, REST = "loss", "logged", "measured", "rest"
WEIGHT = "batch_size of "  # before the name under which a step logs with a batch size that is a tensor


@dataclass(frozen=True)
class TracedStep:
    """The doings of a step besides its computation.

    logs     options of `self.log`, by name; what is logged and is no tensor of the step has its `value` there: a
             number, a MetricValue, or a LoggedMetric
    metrics  calls of metrics, in order
    values   what of metrics the step returns, by name
    """

    logs: dict[str, dict[str, Any]] = field(default_factory=dict)
    metrics: list[MetricCall] = field(default_factory=list)
    values: dict[str, MetricValue] = field(default_factory=dict)


@dataclass(frozen=True)
class LoggedMetric:
    """A metric that is logged, by its path in the module."""

    path: str


class StepNotes:
    """Notes of what was seen when each step was traced last. No module's attribute: tracing puts those back."""

    def __init__(self) -> None:
        self.by_mode: dict[bool, TracedStep] = {}
        self._notes: dict[str, bool] = {}  # text -> whether it was told

    def note(self, text: str) -> None:
        """Keep what is to be told of the step: a warning while it is traced would not be shown."""
        self._notes.setdefault(text, False)

    def tell(self) -> None:
        """Warn of what was not told before."""
        for text, told in self._notes.items():
            self._notes[text] = True
            if not told:
                warnings.warn(text, stacklevel=2)


class StepModule(nn.Module):
    """Calls `training_step` of a LightningModule in training mode, else `validation_step`, on a batch.

    Returns a dict: `loss` in training, `logged` (what `self.log` is given, by name), `measured` (what metrics are
    given) and `rest` (what the step returns besides).

    around  opened around the step: the precision plugin's, such as autocast
    notes   by mode (True: training), where this rank has traced the step
    """

    def __init__(self, module: nn.Module, around: Callable[[], AbstractContextManager[None]]) -> None:
        super().__init__()
        self.module = module
        self._around = around
        self.notes = StepNotes()

    def forward(self, batch: Any) -> dict[str, Any]:
        module: Any = self.module
        step = module.training_step if self.training else module.validation_step
        names = list(inspect.signature(step).parameters)
        if "dataloader_iter" in names:
            raise _refused(f"{step.__name__}(dataloader_iter) reads the data itself", "take a batch")
        logged: dict[str, Tensor] = {}
        measured: dict[str, Tensor] = {}
        traced = self.notes.by_mode[self.training] = TracedStep()
        recording = _recording(self.module, logged, self.notes, traced)
        with self._around(), metrics_recorded(self.module, traced.metrics, measured), recording:
            found = step(*(batch, _BatchNumber(self.notes), 0)[: max(1, min(len(names), 3))])
        returned: dict[str, Any] = {LOGGED: logged, MEASURED: measured}
        loss = found.get(LOSS) if isinstance(found, Mapping) else found
        if self.training and isinstance(loss, MetricValue):
            raise loss.refused()
        if isinstance(found, Mapping):
            traced.values.update({name: value for name, value in found.items() if isinstance(value, MetricValue)})
            found = {name: value for name, value in found.items() if name not in traced.values}
        if not self.training:
            if found is None and not logged and not measured:
                message = f"validation_step of {type(self.module).__name__} returns nothing, and logs nothing"
                raise NnscalerError("trace_failed", message, help="leave it out, or log a tensor")
            return returned if found is None else {**returned, REST: found}
        if not isinstance(loss, Tensor):
            message = f"training_step of {type(self.module).__name__} returns {type(found).__name__}, and no loss"
            raise NnscalerError("no_loss", message, help='return the loss, or a dict with "loss"')
        rest = {name: value for name, value in found.items() if name != LOSS} if isinstance(found, Mapping) else {}
        return {LOSS: loss, **returned, REST: rest}


def beside_tensors(module: nn.Module) -> dict[str, Any]:
    """Return what a module's state dict has besides parameters and buffers (`get_extra_state`)."""
    tensors = set(dict(module.named_parameters(remove_duplicate=False)))
    tensors |= dict(module.named_buffers(remove_duplicate=False)).keys()
    return {name: value for name, value in module.state_dict().items() if name not in tensors}


@contextmanager
def _recording(module: nn.Module, logged: dict[str, Tensor], notes: StepNotes, traced: TracedStep) -> Iterator[None]:
    """Let `module.log` take down what it is given, and refuse or tell of what else a step asks the run."""

    def log(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        given = inspect.signature(LightningModule.log).bind(module, name, value, *args, **kwargs).arguments
        kept = {key: item for key, item in given.items() if key not in ("self", "name", "value", "enable_graph")}
        if isinstance(value, Tensor):
            logged[name] = value.detach()
            if isinstance(kept.get("batch_size"), Tensor):
                logged[WEIGHT + name] = kept.pop("batch_size").detach()
        elif isinstance(value, int | float):
            notes.note(
                f"`self.log({name!r}, {value!r})` logs a number that Python computed: the compiled step logs it as it "
                "was when the step was compiled; log a tensor, or log it in a hook such as on_train_batch_end"
            )
            kept["value"] = value
        elif isinstance(value, MetricValue):
            kept["value"] = value
        elif isinstance(value, Metric):
            kept["value"] = LoggedMetric(next((path for path, part in module.named_modules() if part is value), ""))
        else:
            message = f"self.log({name!r}, ...) of a {type(value).__name__}: its state is no part of a compiled step"
            raise _refused(message, "log the tensor that it is computed from")
        traced.logs[name] = kept

    def gathers(*_args: Any, **_kwargs: Any) -> None:
        message = "the step calls self.all_gather, and it is compiled for the global batch"
        raise _refused(message, "use the tensor itself: it has the rows of all ranks already")

    def optimizers(*_args: Any, **_kwargs: Any) -> None:
        message = "the step asks for optimizers or schedules, which a compiled step has no part of"
        raise _refused(message, "LearningRateMonitor logs the rate; or read it in a hook such as on_train_batch_end")

    own = {"log": log, "all_gather": gathers, "optimizers": optimizers, "lr_schedulers": optimizers}
    watched = [m for m in module.modules() if isinstance(m, LightningModule) and m._trainer is not None]
    vars(module).update(own)
    for part in watched:
        vars(part)["_trainer"] = _Watched(part._trainer, notes)
    try:
        yield
    finally:
        for part in watched:
            vars(part)["_trainer"] = part._trainer._watched  # type: ignore[union-attr]
        for name in own:
            del vars(module)[name]


class _BatchNumber(int):
    """The number of the batch for which a step is compiled, 0, which tells when the step computes with it."""

    def __new__(cls, notes: StepNotes) -> _BatchNumber:
        """Make it. `notes`: takes what is to be told."""
        made = super().__new__(cls)
        vars(made)["notes"] = notes
        return made


def _telling(name: str) -> Any:
    def tell(self: _BatchNumber, *others: Any) -> Any:
        vars(self)["notes"].note(
            "the step reads batch_idx, which stays 0 in the compiled step; what changes belongs, as a tensor, into "
            "the batch"
        )
        return getattr(int, name)(self, *others)

    return tell


_USES = "bool eq ne lt le gt ge hash index format str add radd sub rsub mul rmul mod rmod floordiv truediv divmod pow"
for _use in _USES.split():
    setattr(_BatchNumber, f"__{_use}__", _telling(f"__{_use}__"))


class _Watched:
    """A trainer, which tells when a step reads a count."""

    def __init__(self, trainer: Any, notes: StepNotes) -> None:
        self._watched, self._notes = trainer, notes

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._watched, name)
        if name in ("current_epoch", "global_step"):
            self._notes.note(
                f"the step reads {name}, which stays {found} in the compiled step; a schedule belongs into the "
                "optimizer's, and what else changes, as a tensor, into the batch"
            )
        return found


def _refused(message: str, help: str) -> NnscalerError:
    return NnscalerError("trace_failed", message, help=help)
