"""Set the modes of a model's parts, training or evaluation, while it is traced for another batch, and restore them.

`eval()` of a user's class may do more than set them: layers of LoRA add their product to the weight beside it. The
parameters that a program trains lie on its ranks, where no such method reaches them, so that a program of the model
after it would be one of other parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from nnscaler.errors import NnscalerError
from nnscaler.runtime.nested_values import tensors_in
from nnscaler.tracing.export.user_source_locations import location_of_frames
from nnscaler.tracing.graph_builder import storage_of


def modes_of(module: nn.Module) -> dict[str, bool]:
    """Return of each part of a module whether it is in training mode."""
    return {name: part.training for name, part in module.named_modules()}


@contextmanager
def in_modes(module: nn.Module, modes: Mapping[str, bool], *, training: bool) -> Iterator[None]:
    """Put the parts of a module into `modes` inside, by name (without an entry: as they are), or all of it into
    evaluation mode; they go back to their own ones after it.

    Raises NnscalerError "trace_failed" where `eval()` writes to parameters or buffers, before it has.
    """
    own = {part: part.training for part in module.modules()}
    try:
        for name, part in module.named_modules():
            part.training = modes.get(name, part.training)
        if not training:
            with _Kept(module) if any(map(_overrides, own)) else nullcontext():
                module.eval()
        yield
    finally:
        for part, mode in own.items():
            part.training = mode


def _overrides(part: nn.Module) -> bool:
    return type(part).train is not nn.Module.train or type(part).eval is not nn.Module.eval


def _storages(module: nn.Module) -> dict[str, int]:
    named = (*module.named_parameters(), *module.named_buffers())
    return {name: storage_of(tensor) for name, tensor in named if tensor.layout == torch.strided}


class _Kept(TorchDispatchMode):
    """Refuses what writes to a module's parameters and buffers, and other tensors in their places."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._module, self._before = module, _storages(module)

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        super().__exit__(kind, error, trace)
        after = _storages(self._module)
        if kind is None and after != self._before:
            raise _changes(min(name for name, _ in self._before.items() ^ after.items()))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)}
        given.update(kwargs or {})
        for argument in func._schema.arguments:
            value = given.get(argument.name)
            for tensor in tensors_in(value) if argument.is_write else ():  # `torch._foreach_add_` writes to several
                if tensor.layout == torch.strided:
                    self._check(storage_of(tensor))
        return func(*args, **(kwargs or {}))

    def _check(self, written: int) -> None:
        for name, storage in self._before.items():
            if storage == written:
                raise _changes(name)


def _changes(name: str) -> NnscalerError:
    return NnscalerError(
        "trace_failed",
        f"`eval()` of the model changes {name!r}, whose values lie on the ranks of its program, where they stay",
        location_of_frames(),
        "let evaluation mode leave parameters and buffers as they are (in loralib: merge_weights=False), and compute "
        "what differs in forward",
    )
