"""The program of a part of a model: forward, and backward from gradients of its outputs to those of its inputs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from nnscaler.codegen.compiled_program import Program
from nnscaler.compile import parallelize
from nnscaler.errors import NnscalerError
from nnscaler.ir.precision import Precision, parse_precision
from nnscaler.runtime.stage_base_class import INPUT_GRADIENT
from nnscaler.tracing import trace
from nnscaler.tracing.part_with_cotangent_loss import cotangent, fit, part_of_model
from nnscaler.tracing.sample_inputs import SampleInputs, flatten_inputs
from nnscaler.training.compile_once import compile_once
from nnscaler.training.model_part.call_inputs import CallInputs, call_inputs

Kinds = Mapping[str, tuple[tuple[int, ...], torch.dtype]]  # by name in the batch


@dataclass(frozen=True)
class PartProgram:
    """A part of a model, compiled.

    program     whose loss is the sum of each output times its cotangent
    inputs      of the module: which tensors a call of it has
    gradients   the inputs that get a gradient
    cotangents  output -> name of its cotangent in the batch, for outputs with a gradient
    kinds       of the cotangents, for inputs of any size: rank 0 asks it, and traces
    training    the mode of the module
    """

    program: Program
    inputs: CallInputs
    gradients: tuple[str, ...]
    cotangents: Mapping[str, str]
    kinds: Callable[[Mapping[str, Tensor]], Kinds]
    training: bool

    @property
    def trainable(self) -> bool:
        """Return whether it has a parameter that is trained, on whichever rank."""
        entries = self.program.manifest.parameters
        return any(e.trainable and not e.fqns[0].startswith(INPUT_GRADIENT) for e in entries)


def compile_part(
    module: nn.Module,
    sample_inputs: Mapping[str, Any] | Sequence[Any],
    *,
    input_gradients: Collection[str] | None = None,
    **options: Any,
) -> PartProgram:
    """Compile a part of a model for global batches such as `sample_inputs`, once for all ranks, which all call this.

    `input_gradients`: names of the inputs that get a gradient; None: all floating ones. `options`: of `parallelize`.
    Raises as that, and NnscalerError("inputs_differ") for a name that is no floating input, ("no_loss") for a part
    none of whose outputs has a gradient.
    """
    sample = flatten_inputs(module, sample_inputs)
    wanted = _with_gradient(sample, input_gradients)
    part = part_of_model(module, sample, wanted)

    def kinds(inputs: Mapping[str, Tensor]) -> Kinds:
        _resized(part, wanted, inputs)
        return _cotangents(part, sample, inputs, options)

    def compiled() -> Program:
        batch = {**sample.tensors, **_drawn(kinds(sample.tensors))}
        named = {"model": {"name": type(module).__name__}, **options}
        program = parallelize(part, batch, **named)
        assert program.origin is not None
        return replace(program, origin=replace(program.origin, resize=partial(_resized, part, wanted)))

    program = compile_once(compiled, part, dict(sample.tensors))
    lacking = [t for t in program.graph.with_role("input") if t.name not in program.inputs]  # where others compiled it
    others = _drawn({t.name: (t.shape, getattr(torch, t.dtype)) for t in lacking})
    program = replace(program, inputs={**program.inputs, **others})
    taken = {entry.name for entry in program.manifest.inputs}
    names = {result.name: cotangent(result.name, sample) for result in program.manifest.returns.results}
    cotangents = {output: name for output, name in names.items() if name in taken}
    return PartProgram(program, call_inputs(module, sample), wanted, cotangents, kinds, module.training)


def _drawn(kinds: Kinds) -> dict[str, Tensor]:
    """Return sample cotangents: of equal ones the loss of what ends in a norm is zero, and so are its gradients."""
    generator = torch.Generator().manual_seed(0)
    return {n: torch.randn(s, generator=generator, dtype=torch.float64).to(d) for n, (s, d) in sorted(kinds.items())}


def _cotangents(
    part: nn.Module, sample: SampleInputs, inputs: Mapping[str, Tensor], options: Mapping[str, Any]
) -> Kinds:
    """Return shape and dtype of each cotangent for inputs of these sizes: those of the outputs, which a trace tells."""
    precision = options.get("precision")
    if isinstance(precision, str):
        precision = parse_precision(precision)
    assert precision is None or isinstance(precision, Precision)
    with warnings.catch_warnings():  # the notes are told when the part is compiled
        warnings.simplefilter("ignore")
        graph = trace(
            part,
            dict(inputs),
            self_check=False,
            specialise=options.get("specialise", False),
            repeat_layers=options.get("repeat_layers", "auto"),
            precision=precision,
        ).graph
    found: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for name, tensor in graph.results[1:]:  # the first is the loss
        dtype = getattr(torch, graph.tensors[tensor].dtype)
        made = graph.producers[tensor]
        sources = made.inputs if made.operator == "aten.clone.default" else (tensor,)  # of a parameter: `own_results`
        if any(graph.tensors[source].needs_grad for source in sources) and dtype.is_floating_point:
            found[cotangent(name, sample)] = graph.tensors[tensor].shape, dtype
    return found


def _resized(part: nn.Module, wanted: Sequence[str], batch: Mapping[str, Tensor]) -> None:
    fit(part, {name: batch[name] for name in wanted})


def _with_gradient(sample: SampleInputs, named: Collection[str] | None) -> tuple[str, ...]:
    floating = [name for name, tensor in sample.tensors.items() if tensor.is_floating_point()]
    wrong = next((name for name in named or () if name not in floating), None)
    if wrong is not None:
        message = f"input_gradients names {wrong!r}, and the floating inputs are {floating}"
        raise NnscalerError("inputs_differ", message)
    return tuple(name for name in floating if named is None or name in named)
