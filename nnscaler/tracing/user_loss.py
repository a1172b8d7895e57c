"""A loss outside of the model: the model, and a function of its outputs and the batch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from nnscaler.errors import NnscalerError

LossFunction = Callable[[Any, Any], Any]  # (outputs of the model, batch) -> scalar loss
_LABELS = "labels"
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def with_loss(module: nn.Module, loss_fn: LossFunction) -> nn.Module:
    """`module` itself (its parameters, its state, its names) which returns `loss_fn(outputs, batch)` when called.

    `batch`: what it is called with, a dict or a tuple. To `loss_fn` alone goes what `forward` has no parameter for, and
    `labels`: from these a model of `transformers` would compute a loss of its own.
    """
    kind = type(module)
    takes = inspect.signature(module.forward)

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        own, named = _taken(takes, args, kwargs)
        outputs = kind.__call__(self, *own, **named)
        return loss_fn(outputs, {**_named(takes, args), **kwargs} if kwargs else args)

    loss_of_module: Any = type(kind.__name__, (kind,), {"__call__": call, "batch_signature": _open_ended(takes)})
    loss_of_module.__module__, loss_of_module.__qualname__ = kind.__module__, kind.__qualname__
    made = loss_of_module.__new__(loss_of_module)
    object.__setattr__(made, "__dict__", module.__dict__)
    assert isinstance(made, nn.Module)
    return made


def check_loss_function(loss_fn: Any, where: str) -> None:
    """Raises NnscalerError "usage" for what cannot be called with outputs and a batch."""
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
    """What `forward` is given. Tensors that its `**kwargs` alone would take are no arguments of it."""
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
    """The signature of `forward`, with room for what it does not take."""
    parameters = [p for p in takes.parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if not any(p.kind == p.KEYWORD_ONLY for p in parameters):
        parameters.append(inspect.Parameter("batch_rest", inspect.Parameter.VAR_POSITIONAL))
    parameters.append(inspect.Parameter("batch_named", inspect.Parameter.VAR_KEYWORD))
    return takes.replace(parameters=parameters)
