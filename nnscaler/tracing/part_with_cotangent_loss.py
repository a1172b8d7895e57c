"""A part of a model as a module with a loss, whose gradients are those that the rest of the model asks for.

The loss is the sum of each output times its cotangent, the gradient that backward gives it, which comes with the
batch. To each input is added a parameter that is zero: its gradient is that of the input.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from nnscaler.errors import NnscalerError
from nnscaler.runtime.output_structure import describe
from nnscaler.runtime.stage_base_class import INPUT_GRADIENT
from nnscaler.tracing.export.loss_module import WithOutputs, is_meta
from nnscaler.tracing.sample_inputs import SampleInputs

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
