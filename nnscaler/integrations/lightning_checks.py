"""Check that a LightningModule, its optimizer and its data fit a compiled step."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import lightning.pytorch.callbacks
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset

from nnscaler.errors import NnscalerError
from nnscaler.integrations.lightning_steps import StepModule
from nnscaler.tracing.sample_inputs import flatten_inputs, numbers_and_texts
from nnscaler.training.data.stream_read_ahead import ReadAhead, reading_first
from nnscaler.training.engine import Engine
from nnscaler.training.splittable_optimizers_and_groups import check_group, groups_checked

# Callbacks that read or change the module's weights, or unfreeze them: class, what it does, what to do instead.
_OF_THE_MODULE = (
    ("StochasticWeightAveraging", "averages the module's weights, which the engine has", "average checkpoints"),
    ("WeightAveraging", "averages the module's weights, which the engine has", "average checkpoints"),
    ("ModelPruning", "prunes the module's weights, which the engine has", "prune the module after fit"),
    ("BaseFinetuning", "unfreezes parameters, and the compiled step has no gradients of frozen ones", "fit twice"),
)
_OF_GRADIENTS = ("on_after_backward", "on_before_optimizer_step")  # hooks


def check_module(module: LightningModule, trainer: Trainer, precision: Any) -> None:
    """Raise NnscalerError for what a compiled step would leave out in silence."""
    name = type(module).__name__
    refused: list[tuple[bool, str, str]] = [
        (
            not module.automatic_optimization,
            f"{name} optimizes by hand",
            "automatic_optimization = True, or nnscaler's own engine in a loop of yours",
        ),
        (
            is_overridden("backward", module),
            f"{name} has a `backward` of its own",
            "the compiled step runs backward: change gradients in on_after_backward",
        ),
        (
            isinstance(precision, MixedPrecision) and precision.scaler is not None,
            f"precision {trainer.precision} scales the loss",
            'precision="bf16-mixed"',
        ),
        *_refused_callbacks(trainer),
    ]
    for holds, message, help in refused:
        if holds:
            raise NnscalerError("bad_settings", message, help=help)
    for owner, parent in ((module, LightningModule), *((c, Callback) for c in _callbacks_of(trainer))):
        hook = next((hook for hook in _OF_GRADIENTS if is_overridden(hook, owner, parent)), None)
        if hook is not None:
            warnings.warn(
                f"{type(owner).__name__}.{hook}: gradients are those of the parameters in the optimizer's groups, as "
                "they lie on this rank; `.grad` of the module's own parameters is None during fit",
                stacklevel=2,
            )


def _callbacks_of(trainer: Trainer) -> list[Callback]:
    return trainer.callbacks  # type: ignore[attr-defined]


def _refused_callbacks(trainer: Trainer) -> Iterator[tuple[bool, str, str]]:
    for name, does, instead in _OF_THE_MODULE:
        refused = getattr(lightning.pytorch.callbacks, name, ())  # some are newer than others
        for callback in _callbacks_of(trainer):
            if isinstance(callback, refused):
                yield True, f"{type(callback).__name__} {does} during fit", f"leave it out, and {instead}"


@dataclass(frozen=True)
class Fixed:
    """The constants of a compiled step, besides tensors: numbers and texts in a batch, names of its tensors."""

    numbers: Sequence[int | float]
    texts: Sequence[str | bytes]
    names: frozenset[str]

    @staticmethod
    def of(batch: Any, steps: StepModule) -> Fixed:
        return Fixed(*_numbers_and_texts(batch), frozenset(flatten_inputs(steps, (batch,)).tensors))

    def check(self, batch: Any) -> None:
        """Raise NnscalerError("batch_differs") for a batch with other numbers; warn of other texts."""
        numbers, texts = _numbers_and_texts(batch)
        if numbers != self.numbers:
            message = f"the batch has the numbers {numbers}, and the step was compiled with {self.numbers}"
            raise NnscalerError("batch_differs", message, help="let the collate function make tensors of them")
        if texts != self.texts:
            warnings.warn(
                "batches have texts in them: what the compiled step makes of a text is what it made of the first "
                "batch's; in hooks such as on_train_batch_end they are the batch's own",
                stacklevel=2,
            )

    @contextmanager
    def explained(self, named: Mapping[str, Tensor]) -> Iterator[None]:
        """Say of an error that the batch has other tensors than those of training, where it has."""
        try:
            yield
        except NnscalerError as error:
            if named.keys() == self.names:
                raise
            message = (
                f"the batch of validation has the tensors {sorted(named)}, and that of training {sorted(self.names)}"
            )
            help = "let both have the same, or leave validation out, and call trainer.validate after fit"
            raise NnscalerError("batch_differs", f"{message}: {error.message}", help=help) from error


def _numbers_and_texts(batch: Any) -> tuple[list[int | float], list[str | bytes]]:
    leaves = numbers_and_texts(batch)
    return [x for x in leaves if isinstance(x, int | float)], [x for x in leaves if isinstance(x, str | bytes)]


def read_first(source: Any) -> Any:
    """Return the first batch of the loaders that a source gives; None where there is none. Asked once more, the source
    gives the same loaders, which begin with that batch."""
    loaders = source.dataloader()  # one, or several in a dict or list
    combined = loaders if isinstance(loaders, CombinedLoader) else CombinedLoader(loaders, "max_size_cycle")
    for one in combined.flattened:
        if isinstance(one, DataLoader) and isinstance(one.dataset, IterableDataset) and not one.num_workers:
            vars(one)["dataset"] = ReadAhead(one.dataset)  # torch lets nobody set it
    datasets = [getattr(one, "dataset", None) for one in combined.flattened]

    def again() -> Any:
        del source.dataloader
        return loaders

    source.dataloader = again
    with reading_first(*datasets):
        batch, *_ = next(iter(combined), (None,))
    combined.reset()  # workers that stay would go on in what they have read: others begin
    return batch


class Switches:
    """Which modules are in training mode and which parameters require gradients, as a step was compiled with it."""

    def __init__(self, module: nn.Module) -> None:
        self._modules, self._parameters = dict(module.named_modules()), dict(module.named_parameters())
        self._were = self._now()

    def _now(self) -> list[bool]:
        modes = [module.training for module in self._modules.values()]
        return modes + [parameter.requires_grad for parameter in self._parameters.values()]

    def check(self) -> None:
        """Raise NnscalerError("bad_settings") where one has changed since."""
        now = self._now()
        if now == self._were:
            return
        names = [*self._modules, *self._parameters]
        place = next(place for place, (is_, was) in enumerate(zip(now, self._were, strict=True)) if is_ != was)
        states = ("in evaluation mode", "in training mode") if place < len(self._modules) else ("frozen", "trained")
        was, now_is = states[self._were[place]], states[now[place]]
        message = f"`{names[place] or 'the module'}` is {now_is}, and was {was} when the step was compiled"
        raise NnscalerError(
            "bad_settings", message, help="change it in __init__ or setup(), before the step is compiled, or fit twice"
        )


def with_tensors_of(optimizer: Optimizer, steps: StepModule, engine: Engine) -> Optimizer:
    """Give an optimizer of the module's parameters those of this rank in their places; return it.

    Raises NnscalerError as `check_group`, and for one that has a state already.
    """
    if optimizer.state:
        message = f"{type(optimizer).__name__} makes its state before the first step, for whole parameters"
        raise NnscalerError("bad_settings", message, help="an optimizer that makes it in step()")
    names = {id(parameter): name for name, parameter in steps.named_parameters()}
    here, held = engine.parameters, {entry.fqn: entry for entry in engine.stored() if entry.kind == "parameter"}
    trainable = {entry.fqns[0] for entry in engine.manifest.parameters if entry.trainable}
    for group in optimizer.param_groups:
        unknown = next((p for p in group["params"] if id(p) not in names), None)
        if unknown is not None:
            message = f"the optimizer has a parameter of shape {list(unknown.shape)} that is none of the module's"
            raise NnscalerError("no_such_parameter", message)
        wanted = [name for p in group["params"] if (name := names[id(p)]) in here]
        split = check_group(optimizer, group, [held[name] for name in wanted], complete=here.keys() >= trainable)
        if not split.elementwise:  # of a parameter that another rank owns, this one has nothing to update
            wanted = [name for name in wanted if here[name].numel()]
        group["params"] = [here[name] for name in wanted]
        if "param_names" in group:
            group["param_names"] = wanted
    groups_checked[optimizer] = len(optimizer.param_groups)
    return optimizer
