"""Compile a part of a model into a program: forward, and backward from gradients of its outputs to those of its
inputs."""

from __future__ import annotations

import inspect
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
from nnscaler.ir.mixed_precision_dtypes import Precision, parse_precision
from nnscaler.runtime.nested_values import items_of
from nnscaler.runtime.stage_base_class import INPUT_GRADIENT
from nnscaler.tracing import trace
from nnscaler.tracing.graph_builder import TensorName
from nnscaler.tracing.models_with_added_loss import cotangent, fit, part_of_model
from nnscaler.tracing.sample_inputs import SampleInputs, flatten_inputs
from nnscaler.training.compile_on_first_rank import compile_once

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


# The tensors in a call of a module, by the names that they have in the sample batch.


@dataclass(frozen=True)
class CallInputs:
    """The form that every call of a module must have.

    name       of the module
    signature  of its forward
    wanted     by argument, with a `TensorName` where a tensor stood in the sample
    kinds      of these tensors: number of dims and dtype
    """

    name: str
    signature: inspect.Signature
    wanted: Mapping[str, Any]
    kinds: Mapping[str, tuple[int, torch.dtype]]

    def named(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return the tensors of a call by name. Raises NnscalerError("inputs_differ") for a call of another form."""
        try:
            given = _bound(self.signature, args, kwargs)
        except TypeError as error:
            raise self._differs(f"takes {self.signature}: {error}") from None
        found: dict[str, Tensor] = {}
        self._match(self.wanted, given, "", found)
        return {name: found[name] for name in self.kinds}

    def _match(self, wanted: Any, given: Any, path: str, found: dict[str, Tensor]) -> None:
        if isinstance(wanted, TensorName):
            if not isinstance(given, Tensor):
                raise self._differs(f"takes a tensor as {path}, and was given {type(given).__name__}")
            dims, dtype = self.kinds[wanted.name]
            if given.dim() != dims:
                raise self._differs(f"was compiled for {path} of {dims} dims, and was given {list(given.shape)}")
            if (given.is_floating_point(), given.is_complex()) != (dtype.is_floating_point, dtype.is_complex):
                raise self._differs(f"was compiled for {path} of {dtype}, and was given {given.dtype}")
            found[wanted.name] = given
            return
        pairs, others = items_of(wanted), items_of(given)
        if isinstance(given, Tensor) or (pairs is None) != (others is None):
            raise self._differs(f"was compiled for {path} = {_brief(wanted)}, and was given {_brief(given)}")
        if pairs is None or others is None:
            if type(wanted) is not type(given) or (wanted is not given and wanted != given):
                raise self._differs(f"was compiled for {path} = {wanted!r}, and was given {given!r}")
            return
        if pairs.keys() != others.keys():
            raise self._differs(f"was compiled for {path or 'arguments'} {_keys(pairs)}, and was given {_keys(others)}")
        for key, value in pairs.items():
            self._match(value, others[key], f"{path}[{key!r}]" if path else f"`{key}`", found)

    def _differs(self, why: str) -> NnscalerError:
        help_text = "call it as the sample inputs say; for another form parallelize another part"
        return NnscalerError("inputs_differ", f"the part {self.name} {why}", help=help_text)


def call_inputs(module: nn.Module, sample: SampleInputs) -> CallInputs:
    """Return what a call of the module looks like that has the tensors of the sample."""
    signature = inspect.signature(module.forward)
    kinds = {name: (tensor.dim(), tensor.dtype) for name, tensor in sample.tensors.items()}
    return CallInputs(type(module).__name__, signature, _bound(signature, sample.args, sample.kwargs), kinds)


def _bound(signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    return dict(bound.arguments)


def _keys(items: Mapping[Any, Any]) -> list[Any]:
    return sorted(items, key=str)


def _brief(value: Any) -> str:
    if isinstance(value, TensorName):
        return "a tensor"
    if isinstance(value, Tensor):
        return f"a tensor {list(value.shape)}"
    return type(value).__name__
