"""The recipe by which both sides train: batches of each optimizer step, the optimizer, its rate and gradients.

Five steps by default: different batches in each, two of them in one step (gradient accumulation), and a short one at
the end. Then an evaluation, on a batch of that other size.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from nnscaler.errors import NnscalerError
from nnscaler.model_file import find_target, import_user_file

Batch = Mapping[str, Tensor]
KNOWN: Mapping[str, Mapping[str, Any]] = {
    "adamw": {"eps": 1e-6, "weight_decay": 0.1},
    "sgd": {"momentum": 0.9, "weight_decay": 0.1},
}
OTHERS = {"eps": 1e-6, "weight_decay": 0.1}  # of another optimizer that takes them: no eps makes much of rounding
ACCUMULATED = 2  # the step that has two batches


@dataclass(frozen=True)
class Course:
    """The training that is compared.

    steps          the batches of each optimizer step, by input
    evaluation     the batch for the model in evaluation mode; None: not evaluated
    carried        inputs whose dim 0 is the batch
    optimizer      "adamw", "sgd" or `module::Class`
    learning_rate  of the first step
    max_norm       to which gradients are clipped; None: they are not
    undecayed      parameters without weight decay
    seed           of random numbers
    draws          random numbers are drawn; False: nothing is dropped
    precision      of every floating tensor; None: the program's own dtypes
    compiled       the forward of each stage is compiled with torch.compile
    saved_before   the step before which the run is saved, and goes on from what is read; 0: never
    delays         of a stream, by parameter: the updates that a batch goes without; None: there is no stream
    """

    steps: tuple[tuple[Batch, ...], ...]
    evaluation: Batch | None
    carried: frozenset[str]
    optimizer: str
    learning_rate: float
    max_norm: float | None
    undecayed: frozenset[str]
    seed: int = 0
    draws: bool = True
    precision: str | None = "float64"
    compiled: bool = False
    saved_before: int = 0
    delays: Mapping[str, int] | None = None

    def batches(self) -> list[Batch]:
        """Return the batches of all steps, in order."""
        return [batch for step in self.steps for batch in step]

    def first_batch(self, step: int) -> int:
        """Return the number of the first batch of a step, among all batches."""
        return sum(len(batches) for batches in self.steps[:step])

    def rows(self, batch: Batch, index: int, count: int) -> dict[str, Tensor]:
        """Return the rows of one of `count` data parts: contiguous, the larger ones first."""
        found = dict(batch)
        for name in self.carried & batch.keys():
            each, more = divmod(batch[name].shape[0], count)
            start = index * each + min(index, more)
            found[name] = batch[name][start : start + each + (index < more)]
        return found


def rate_at(step: int) -> float:
    """Return the factor of the learning rate at an optimizer step; it differs at each."""
    return 1.0 / (1.0 + 0.3 * step)


def class_of(name: str) -> type[Any]:
    """Return the optimizer's class. Raises NnscalerError where the name leads to none."""
    if name in KNOWN:
        return {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[name]
    if "::" not in name:
        message = f"the optimizer {name!r} is none of {', '.join(KNOWN)}"
        raise NnscalerError("usage", message, help="or name a class: package.module::Class, file.py::Class")
    module, _, attribute = name.partition("::")
    found: Any = getattr(torch.optim, attribute, None) if module == "torch.optim" else None
    if found is None:
        file, _ = find_target(module, "--optimizer package.module::Class")
        found = getattr(import_user_file(file), attribute, None)
    if not (inspect.isclass(found) and issubclass(found, torch.optim.Optimizer)):
        message = f"{name} is no optimizer: {attribute} is not a class that derives from torch.optim.Optimizer"
        raise NnscalerError("usage", message)
    return found


def options_of(name: str) -> dict[str, Any]:
    """Return the hyper-parameters besides the learning rate."""
    if name in KNOWN:
        return dict(KNOWN[name])
    taken = inspect.signature(class_of(name)).parameters
    return {key: value for key, value in OTHERS.items() if key in taken and isinstance(taken[key].default, int | float)}


def groups_of(course: Course, undecayed: frozenset[str]) -> dict[str, dict[str, Any]]:
    """Return the hyper-parameters of single parameters, by name: those without weight decay."""
    if "weight_decay" not in options_of(course.optimizer):
        return {}
    return {name: {"weight_decay": 0.0} for name in sorted(undecayed)}


def make_optimizer(
    parameters: Mapping[str, Tensor], course: Course, undecayed: frozenset[str] | None = None
) -> torch.optim.Optimizer:
    """Make the optimizer of these parameters, by name: a group for each that is not decayed, and one for the rest."""
    single = groups_of(course, course.undecayed if undecayed is None else undecayed & parameters.keys())
    groups: list[dict[str, Any]] = [{"params": [parameters[n]], **more} for n, more in single.items()]
    rest = [p for n, p in parameters.items() if n not in single]
    groups += [{"params": rest}] if rest else []
    made: torch.optim.Optimizer = class_of(course.optimizer)(
        groups, lr=course.learning_rate, **options_of(course.optimizer)
    )
    return made


def make_scheduler(optimizer: torch.optim.Optimizer) -> LambdaLR:
    """Make the schedule of its learning rate."""
    return LambdaLR(optimizer, rate_at)


# -- batches ----------------------------------------------------------------------------------------------------------


def carried_by(tensors: Batch) -> frozenset[str]:
    """Return the inputs whose dim 0 is the batch: that of the first input that has dims."""
    with_dims = [tensor for tensor in tensors.values() if tensor.dim()]
    return frozenset(n for n, t in tensors.items() if t.dim() and t.shape[0] == with_dims[0].shape[0])


def drawn(sample: Batch, carried: frozenset[str], seed: int) -> dict[str, Tensor]:
    """Return another batch like the sample: integers that occur in it, floats between those that do.

    What is the same in every row (positions, a table) stays.
    """
    generator = torch.Generator().manual_seed(seed)
    return {n: _drawn(t, generator) if n in carried else t for n, t in sample.items()}


def _drawn(tensor: Tensor, generator: torch.Generator) -> Tensor:
    flat = tensor.reshape(-1)
    if not tensor.numel() or tensor.is_complex():
        return tensor[torch.randperm(tensor.shape[0], generator=generator)]
    if tensor.shape[0] > 1 and bool((tensor == tensor[:1]).all()):
        return tensor
    one, other = (flat[torch.randint(len(flat), (len(flat),), generator=generator)] for _ in range(2))
    if tensor.is_floating_point() and bool(torch.isfinite(tensor).all()) and len(flat.unique()) > 4:
        share = torch.rand(len(flat), generator=generator, dtype=torch.float64).to(tensor.dtype)
        one = one * share + other * (1 - share)
    return one.view(tensor.shape)


def reordered(sample: Batch, carried: frozenset[str], seed: int) -> dict[str, Tensor]:
    """Return the sample's rows, drawn anew: for a model that takes no other values."""
    generator = torch.Generator().manual_seed(seed)
    rows = sample[min(carried)].shape[0] if carried else 0
    order = torch.randint(max(rows, 1), (rows,), generator=generator)
    return {n: t[order] if n in carried else t for n, t in sample.items()}


def shortened(batch: Batch, carried: frozenset[str]) -> dict[str, Tensor] | None:
    """Return two thirds of the rows of a batch; None where it has but one."""
    rows = batch[min(carried)].shape[0] if carried else 1
    kept = max(1, rows * 2 // 3)
    return None if kept == rows else {n: t[:kept] if n in carried else t for n, t in batch.items()}


def in_steps(batches: Sequence[Batch], steps: int) -> tuple[tuple[Batch, ...], ...]:
    """Deal batches out to optimizer steps: one each, but two in the third, or in the first of fewer."""
    double = ACCUMULATED if steps > ACCUMULATED else 0
    found: list[tuple[Batch, ...]] = []
    rest = list(batches)
    for step in range(steps):
        count = 2 if step == double else 1
        found.append(tuple(rest[:count]))
        rest = rest[count:]
    return tuple(found)


def undecayed_of(parameters: Iterable[tuple[str, Tensor]]) -> frozenset[str]:
    """Return the parameters that are not decayed: biases, and what has one dim."""
    return frozenset(name for name, tensor in parameters if tensor.dim() < 2 or name.rpartition(".")[2] == "bias")
