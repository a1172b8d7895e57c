"""Add a loss to a model that returns none: a function of its outputs and the batch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nnscaler.errors import NnscalerError
from nnscaler.runtime.output_structure import describe
from nnscaler.runtime.program.import_role_and_user_files import load_user_module
from nnscaler.runtime.stage_base_class import INPUT_GRADIENT
from nnscaler.tracing.export.loss_module import WithOutputs, is_meta, loss_of
from nnscaler.tracing.sample_inputs import SampleInputs

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


# A part of a model as a module with a loss, whose gradients are those that the rest of the model asks for.
# The loss is the sum of each output times its cotangent, the gradient that backward gives it, which comes with the
# batch. To each input is added a parameter that is zero: its gradient is that of the input.

_ANY = inspect.Signature([inspect.Parameter("tensors", inspect.Parameter.VAR_KEYWORD)])


def part_of_model(module: nn.Module, sample: SampleInputs, wanted: Collection[str]) -> nn.Module:
    """Return `module` (its parameters, its state, its names) as a part: it takes the tensors of `sample` by name, and
    the cotangents of its outputs (`cotangent`), and returns its loss beside its outputs.

    `wanted`: the inputs that get a gradient. Without cotangents all of them are one.
    Raises NnscalerError("no_loss"), when it is called, where no output has a gradient.
    """
    kind = type(module)

    def call(self: nn.Module, **tensors: Tensor) -> Any:
        given = {name: tensors[name] for name in sample.tensors}
        for name in wanted:
            given[name] = given[name] + self.get_parameter(INPUT_GRADIENT + name)
        args, kwargs = sample.rebuild(given)
        outputs = kind.__call__(self, *args, **kwargs)
        return WithOutputs(_loss(describe(outputs).tensors, tensors, sample), outputs)

    made_class: Any = type(kind.__name__, (kind,), {"__call__": call, "batch_signature": _ANY})
    made_class.__module__, made_class.__qualname__ = kind.__module__, kind.__qualname__
    made = made_class.__new__(made_class)
    own = {**module.__dict__, "_parameters": dict(module._parameters)}
    object.__setattr__(made, "__dict__", own)
    assert isinstance(made, nn.Module)
    fit(made, {name: sample.tensors[name] for name in wanted})
    return made


def fit(part: nn.Module, inputs: Mapping[str, Tensor]) -> None:
    """Change the parameters that stand for gradients of inputs to the sizes of these inputs."""
    device = "meta" if is_meta(part) else "cpu"
    for name, tensor in inputs.items():
        known = part._parameters.get(INPUT_GRADIENT + name)
        dtype = tensor.dtype if known is None else known.dtype
        zeros = torch.zeros(tensor.shape, dtype=dtype, device=device)
        part.register_parameter(INPUT_GRADIENT + name, nn.Parameter(zeros))


def cotangent(output: str, sample: SampleInputs) -> str:
    """Return the name in the batch of the cotangent of an output."""
    name = f"cotangent_of_{output}"
    while name in sample.tensors:
        name += "_"
    return name


def _loss(outputs: Mapping[str, Tensor], batch: Mapping[str, Tensor], sample: SampleInputs) -> Tensor:
    known = {name: batch.get(cotangent(name, sample)) for name in outputs}
    if all(value is None for value in known.values()):
        floating = {name: output for name, output in outputs.items() if output.is_floating_point()}
        trained = {n: o for n, o in floating.items() if o.requires_grad or not torch.is_grad_enabled()}
        terms = [output.sum() for output in trained.values()]
    else:
        terms = [(outputs[name] * value).sum() for name, value in known.items() if value is not None]
    if not terms:
        message = f"the part returns {', '.join(outputs) or 'no tensors'}, and none of it has a gradient"
        raise NnscalerError("no_loss", message, help="leave it as it is: a module without gradients needs no part")
    total = terms[0]
    for term in terms[1:]:
        total = total + term.to(total.dtype)
    return total
