"""Join a model that returns no loss with a loss function of its outputs and the batch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from nnscaler.errors import NnscalerError
from nnscaler.runtime.program.load_python import load_user_module
from nnscaler.tracing.export.loss_module import WithOutputs, loss_of

LossFunction = Callable[[Any, Any], Any]  # (outputs of the model, batch) -> scalar loss
_LABELS = "labels"
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def with_loss(module: nn.Module, loss_fn: LossFunction) -> nn.Module:
    """`module` itself (its parameters, its state, its names) which returns `loss_fn(outputs, batch)` beside its outputs
    when called.

    `batch`: what it is called with, a dict or a tuple. To `loss_fn` alone goes what `forward` has no parameter for, and
    `labels`: from these a model of `transformers` would compute a loss of its own.
    """
    kind = type(module)
    takes = inspect.signature(module.forward)

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        own, named = _taken(takes, args, kwargs)
        outputs = kind.__call__(self, *own, **named)
        return WithOutputs(loss_of(loss_fn(outputs, {**_named(takes, args), **kwargs} if kwargs else args)), outputs)

    loss_of_module: Any = type(kind.__name__, (kind,), {"__call__": call, "batch_signature": _open_ended(takes)})
    loss_of_module.__module__, loss_of_module.__qualname__ = kind.__module__, kind.__qualname__
    made = loss_of_module.__new__(loss_of_module)
    object.__setattr__(made, "__dict__", module.__dict__)
    assert isinstance(made, nn.Module)
    return made


def origin_of_loss(loss_fn: LossFunction) -> str:
    """`/path/to/file.py::function`, for a program's record; the name alone where no file has it by name."""
    name = str(getattr(loss_fn, "__qualname__", type(loss_fn).__qualname__))
    try:
        file = inspect.getsourcefile(loss_fn)
    except TypeError:
        file = None
    return name if file is None or not name.isidentifier() else f"{Path(file).absolute()}::{name}"


def recorded_loss(origin: str) -> LossFunction:
    """Load the function that `origin_of_loss` described.

    Raises NnscalerError `no_such_file` where it cannot be found.
    """
    file, found, name = origin.partition("::")
    help_text = "give the loss function again: loss_fn=..., or --loss-fn path/to/file.py::function"
    message = f"the program was compiled with the loss function {origin!r}"
    if not found or not Path(file).is_file():
        raise NnscalerError("no_such_file", f"{message}, which is in no file", help=help_text)
    loss_fn: LossFunction | None = getattr(load_user_module(file), name, None)
    if loss_fn is None:
        raise NnscalerError("no_such_file", f"{message}, and the file has no {name} any more", help=help_text)
    check_loss_function(loss_fn, origin)
    return loss_fn


def check_loss_function(loss_fn: Any, where: str) -> None:
    """Check a loss function. Raises NnscalerError "usage" for what cannot be called with outputs and a batch."""
    try:
        inspect.signature(loss_fn).bind(None, None)
    except TypeError as error:
        help_text = (
            "def loss(outputs, batch): return torch.nn.functional.cross_entropy(outputs.logits, batch['labels'])"
        )
        raise NnscalerError("usage", f"{where} is no loss function: {error}", help=help_text) from None
    except ValueError:  # not written in Python: the call itself will tell
        return


def _taken(
    takes: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments that `forward` is given.

    Tensors that its `**kwargs` alone would take are no arguments of it.
    """
    kinds = [p.kind for p in takes.parameters.values()]
    own = args if inspect.Parameter.VAR_POSITIONAL in kinds else args[: sum(k in _POSITIONAL for k in kinds)]
    rest = inspect.Parameter.VAR_KEYWORD in kinds
    named = {k: v for k, v in kwargs.items() if k in takes.parameters or (rest and not isinstance(v, Tensor))}
    named.pop(_LABELS, None)
    return own, named


def _named(takes: inspect.Signature, args: tuple[Any, ...]) -> dict[str, Any]:
    names = [p.name for p in takes.parameters.values() if p.kind in _POSITIONAL]
    return dict(zip(names, args, strict=False))


def _open_ended(takes: inspect.Signature) -> inspect.Signature:
    """Return the signature of `forward`, with room for what it does not take."""
    parameters = [p for p in takes.parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if not any(p.kind == p.KEYWORD_ONLY for p in parameters):
        parameters.append(inspect.Parameter("batch_rest", inspect.Parameter.VAR_POSITIONAL))
    parameters.append(inspect.Parameter("batch_named", inspect.Parameter.VAR_KEYWORD))
    return takes.replace(parameters=parameters)
