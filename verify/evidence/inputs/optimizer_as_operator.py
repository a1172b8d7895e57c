"""An optimizer as an operator: its step, (parameter, gradient, state...) -> (parameter, state...), with an annotation.

The registry has those of torch's classes. Of any other one, shards of one parameter are tried against the whole, and
what that gives is the annotation that is verified.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import torch
from torch.optim import Optimizer

from op_registry.builtin.optimizers import elementwise_annotation, update_annotation
from op_registry.call import Call
from op_registry.source_location import SourceLocation
from op_registry.spec import OperatorSpec, SchemaParameter

from nnscaler.errors import NnscalerError
from nnscaler.training.functional_optimizer import AGES, SIZES, Update, drawn, make_update, optimizer_name
from nnscaler.training.splittable_optimizers_and_groups import UpdateSplit, split_of


def is_optimizer(value: Any) -> bool:
    """Return whether this is a class of optimizers."""
    return isinstance(value, type) and issubclass(value, Optimizer)


def torch_optimizer(text: str) -> type[Optimizer] | None:
    """Return the class that `torch.optim.AdamW` names; None for other texts. Raises NnscalerError."""
    module, _, name = text.rpartition(".")
    if module != "torch.optim":
        return None
    found = getattr(torch.optim, name, None)
    if not is_optimizer(found):
        classes = [n for n, value in vars(torch.optim).items() if is_optimizer(value)]
        close = get_close_matches(name, classes, n=3, cutoff=0.4) or classes
        help = f"did you mean {', '.join(f'torch.optim.{n}' for n in close[:6])}?"
        raise NnscalerError("unknown_operator", f"torch has no optimizer {text!r}", help=help)
    assert isinstance(found, type)
    return found


def optimizer_operator(
    cls: type[Optimizer], defaults: Mapping[str, Any], where: SourceLocation | None = None
) -> OperatorSpec:
    """Return the record of an optimizer's step. `where`: the place of a user's class.

    Raises NnscalerError for a class whose step is no function of one parameter, and for hyper-parameters that it does
    not take.
    """
    split = split_of(cls, defaults)
    given = f"({', '.join(f'{key}={value!r}' for key, value in defaults.items())})" if defaults else ""
    dims = 2 if 2 in split.free else min(split.free)
    update = make_update(cls, defaults, dims)
    name = optimizer_name(cls) if where is None else cls.__qualname__
    tensors = ("parameter", "gradient", *update.names)
    return OperatorSpec(
        f"{name}{given}",
        elementwise_annotation(len(update.paths)) if split.elementwise else _Annotation(split),
        detached=True,
        sample_inputs=_Samples(update, dims),
        target=update,
        where=where,
        qualname=None if where is None else f"{cls.__qualname__}{given}",
        parameters=(
            *(SchemaParameter(n, True) for n in tensors),
            *(SchemaParameter(n, False, default) for n, default in update.options.items()),
        ),
    )


@dataclass(frozen=True)
class _Annotation:
    split: UpdateSplit

    def __call__(self, call: Call) -> str:
        ndim = call.tensors()[0].ndim
        return update_annotation(call, [dim for dim in range(ndim) if self.split.may_cut(dim, ndim)])


@dataclass(frozen=True)
class _Samples:
    """Calls with the state that the optimizer has after some steps: none, one, many. Where numbers stand in its code,
    after more steps than these, and with gradients larger than these."""

    update: Update
    dims: int

    def __call__(self) -> list[dict[str, Any]]:
        generator = torch.Generator().manual_seed(0)
        plain = [self.call(steps, generator) for steps in (0, *self.update.pasts)]
        return [*plain, *({**self.call(AGES[-1], generator), "scale": scale} for scale in self.update.scales)]

    def call(self, steps: int, generator: torch.Generator) -> dict[str, Any]:
        """Return the arguments of one call, by name."""
        shape = SIZES[: self.dims]
        parameter = drawn(shape, generator)
        state = self.update.example(parameter, [drawn(shape, generator) for _ in range(AGES[-1])])
        named = dict(zip(self.update.names, state, strict=True))
        return {"parameter": parameter, "gradient": drawn(shape, generator), **named, "steps": steps}


def remarks(spec: OperatorSpec) -> tuple[str, ...]:
    """Return what is to be said of an optimizer that is not elementwise, beside the report; nothing for all others."""
    if not isinstance(spec.annotation, _Annotation):
        return ()
    split = spec.annotation.split
    found = [f"`{spec.name}` is not elementwise. Dims along which a parameter may be cut, of {split}"]
    if split.coupled:
        found.append(f"`{spec.name}` reads several parameters to step one: each rank must have all of them, whole")
    return tuple(found)
