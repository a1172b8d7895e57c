"""Trace a module with a sample batch into a graph."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_map

from op_registry.call import dtype_name

from nnscaler.errors import NnscalerError
from nnscaler.ir.graph import Graph, LogicalTensor, gradient_dtype
from nnscaler.ir.mixed_precision_dtypes import FLOATS, Precision
from nnscaler.runtime.kernel_threads import kernel_threads
from nnscaler.runtime.training.autocast_on_any_device import Regions, autocast_on
from nnscaler.tracing.compare_with_module import check_trace, forwards_of_draws, second_forward
from nnscaler.tracing.export.custom_gradients import (
    GradientHooks,
    OpaqueFunction,
    hooks_met,
    hooks_watched,
    refuse_stored_hooks,
)
from nnscaler.tracing.export.independent_module_copies import refuse_shared_memory
from nnscaler.tracing.export.loss_module import LossModule, is_meta, mode_note, result_notes
from nnscaler.tracing.export.mutated_attributes_and_draws import told_of_attributes, told_of_draws
from nnscaler.tracing.export.user_source_locations import location_of_frames
from nnscaler.tracing.float64_run import device_of
from nnscaler.tracing.models_with_added_loss import LossFunction, with_loss
from nnscaler.tracing.passes import run_passes
from nnscaler.tracing.repeated_layers.expand_equal_layers import Stitched, export_graph
from nnscaler.tracing.sample_inputs import SampleInputs, flatten_inputs


@dataclass(frozen=True)
class Traced:
    """A traced model.

    `state`      parameters, buffers and lifted constants ("_constants.0") by name in the model: the tensors themselves
    `inputs`     the sample batch by input name, in order
    `notes`      what the user should know: branches that were fixed, functions without annotation, checks not made
    `functions`  unregistered autograd.Functions by operator name
    `sample`     how the named inputs make the module's arguments
    `repeats`    how many calls of layers were copied from a traced one, in words; "" without
    """

    graph: Graph
    state: Mapping[str, Tensor]
    inputs: Mapping[str, Tensor]
    notes: tuple[str, ...] = ()
    functions: Mapping[str, OpaqueFunction] = field(default_factory=dict)
    sample: SampleInputs | None = None
    repeats: str = ""


def trace(
    module: nn.Module,
    sample_inputs: Any,
    *,
    self_check: bool = True,
    specialise: bool = False,
    repeat_layers: str = "auto",
    loss_fn: LossFunction | None = None,
    precision: Precision | None = None,
) -> Traced:
    """Trace the results of `module` on a sample batch, a mapping of keyword arguments or a tuple.

    They are its scalar loss, if it has one, and every further tensor that it returns.

    Every part of the module is traced in the mode, train or evaluation, that it is in, with the shapes of the sample.
    Parameters may be on the meta device.
    `self_check` compares loss, gradients and buffers of the graph with the module's own on the sample batch.
    `specialise` takes the branch that the sample batch takes where the model looks at data, with a note.
    `repeat_layers`: "auto" traces one of eight or more equal layers and copies it for the others, after a comparison
    of what each of them runs; "always" from two equal layers on; "off" traces every layer. The graph is the same.
    `loss_fn`: a function of the model's outputs and the batch that gives the loss (`with_loss`).
    `precision`: the dtypes in which the model runs; the state has the tensors as they rest.
    Raises NnscalerError "trace_failed", "no_loss" or "trace_unfaithful".
    """
    whole = module if loss_fn is None else with_loss(module, loss_fn)
    with kernel_threads(module), mixed(module, precision) as masters:
        traced = _trace(whole, sample_inputs, self_check, specialise, repeat_layers)
    return replace(traced, graph=with_masters(traced.graph, precision, masters))  # names are those of the module


def _trace(module: nn.Module, sample_inputs: Any, self_check: bool, specialise: bool, repeat_layers: str) -> Traced:
    _refuse_unready(module)
    refuse_autocast_around("the compilation", device_of(module))
    sample = flatten_inputs(module, sample_inputs)
    meta = is_meta(module)
    tensors = tuple(t.to("meta") if meta else t for t in sample.tensors.values())
    wrapper = LossModule(module, sample)
    refuse_stored_hooks(module)
    hooks = GradientHooks()
    with autocast_on(device_of(module)) as regions, hooks_met(hooks):
        stitched = export_graph(wrapper, tensors, specialise, repeat_layers)
    exported = stitched.exported
    if meta:
        _refuse_autocast(stitched.raw.graph)
    graph = run_passes(stitched.raw)
    state = _read_by(graph, stitched)
    refuse_shared_memory(state)
    changed, drawn = exported.changed, exported.drawn
    changes = told_of_attributes(
        module, changed, second_forward(module, sample) if changed and not meta else None, specialise
    ) + told_of_draws(drawn, forwards_of_draws(module, sample) if drawn and not meta else None, specialise)
    mode = mode_note(module)
    notes = (
        *(() if mode is None else (mode,)),
        *result_notes(wrapper.last.found),
        *_carried(regions),
        *stitched.notes,
        *exported.notes,
        *changes,
    )
    if self_check:
        notes = (*notes, *_checked(module, graph, state, sample, hooks))
    notes = (*notes, *hooks.notes())
    for note in notes:
        warnings.warn(note, stacklevel=2)
    if meta:
        notes = (*notes, "the trace is not checked: the module has no data (meta device)")
    return Traced(graph, state, sample.tensors, notes, exported.opaque, sample, stitched.repeats)


def _refuse_unready(module: nn.Module) -> None:
    """Refuse what divides the model over ranks by itself, and parameters that have no shape yet."""
    for name, part in module.named_modules():
        wrapper = next((kind.__name__ for kind in type(part).__mro__ if kind.__name__ in _WRAPPERS), None)
        if wrapper is not None:
            message = f"{f'`{name}`' if name else 'the model'} is under {wrapper}, which divides work over ranks itself"
            raise NnscalerError("trace_failed", message, help="give the plain module; the plan says how it is divided")
    lazy = next((name for name, parameter in module.named_parameters() if is_lazy(parameter)), None)
    if lazy is not None:
        help = "call the module on a batch first, and the same on every rank"
        raise NnscalerError("trace_failed", f"`{lazy}` is lazy, and has no shape and no values yet", help=help)


def refuse_autocast_around(what: str, device: str) -> None:
    """Raise NnscalerError("autocast_around") where autocast is on: torch would apply it to the lines of a program,
    whose text and messages have the dtypes that the regions of the model give them."""
    if torch.is_autocast_enabled(device):
        dtype = dtype_name(torch.get_autocast_dtype(device))
        message = f'torch.autocast("{device}", {dtype}) is on around {what}: a program has the regions in forward alone'
        help = f'open it in forward, or compile with precision="{dtype}", which casts parameters and inputs'
        raise NnscalerError("autocast_around", message, location_of_frames(), help)


_WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule")


def _read_by(graph: Graph, stitched: Stitched) -> Mapping[str, Tensor]:
    """Return the state without the constants that only removed operations read: no program has them."""
    known, left = ({n for t in g.with_role("constant") for n in t.fqns} for g in (stitched.raw.graph, graph))
    return {name: tensor for name, tensor in stitched.state.items() if name not in known - left}


def _carried(regions: Regions) -> tuple[str, ...]:
    """Return a note on each kind of autocast of another device than the one that the model is traced on, and on each
    that is switched off by a region of another device."""
    kept = "is kept, as autocast of the device that runs the program; by itself torch leaves it out here, on"
    named = [
        f'{file}:{line}: torch.autocast("{device}", {dtype}) {kept} the {regions.device}'
        for (device, dtype), (file, line) in regions.named.items()
    ]
    off = [
        f'{file}:{line}: torch.autocast("{device}", enabled=False) switches off torch.autocast("{around}") around it: '
        "any device is the one that runs the program; by itself torch keeps that region on"
        for (device, around), (file, line) in regions.switched_off.items()
    ]
    return (*named, *off)


def _refuse_autocast(graph: Graph) -> None:
    """Autocast casts no tensor without data, so that a trace of one has other dtypes than the program."""
    found = next((op for op in graph.operations if op.region.autocast not in (None, "off")), None)
    if found is not None:
        message = f"autocast to {found.region.autocast} in a model without data (meta device)"
        help_text = "torch does not apply it there, so the program's dtypes are not known; build the model on the CPU"
        raise NnscalerError("trace_failed", message, where=found.where, help=help_text)


def _checked(
    module: nn.Module, graph: Graph, state: Mapping[str, Tensor], sample: SampleInputs, hooks: GradientHooks
) -> tuple[str, ...]:
    """Return the notes of the self-check. Hooks come first: they explain what else differs."""
    if is_meta(module):
        hooks.refuse(hooks.met, "may change a gradient")
        return ()
    with hooks_watched(hooks):
        try:
            return check_trace(module, graph, state, sample)
        finally:
            hooks.refuse(hooks.changing, "changes a gradient")


# Run a model in mixed precision, as FSDP2's policy does: for a trace, and for the eager model beside it.


@contextmanager
def mixed(module: nn.Module, precision: Precision | None) -> Iterator[Mapping[str, str]]:
    """While open, the module's floating parameters, inputs and outputs have the dtypes of `precision`.

    Yields the dtypes that parameters had, by every name, of those that were cast. Afterwards each has the very data
    that it had before.
    """
    if precision is None:
        yield {}
        return
    kept: dict[nn.Parameter, Tensor] = {}
    masters: dict[str, str] = {}
    handles = [
        module.register_forward_pre_hook(_casting_inputs(precision), with_kwargs=True, prepend=True),
        module.register_forward_hook(_casting_outputs(precision)),
    ]
    try:
        dtype = None if precision.param is None else getattr(torch, precision.param)
        for name, parameter in module.named_parameters(remove_duplicate=False):
            if dtype is not None and parameter.is_floating_point() and (parameter.dtype != dtype or parameter in kept):
                masters[name] = dtype_name(kept.get(parameter, parameter).dtype)
                if parameter not in kept:
                    kept[parameter] = parameter.data
                    parameter.data = parameter.data.to(dtype)
        yield masters
    finally:
        for parameter, data in kept.items():
            parameter.data = data
        for handle in handles:
            handle.remove()


def with_masters(graph: Graph, precision: Precision | None, masters: Mapping[str, str]) -> Graph:
    """Return the graph whose parameters say in which dtypes they rest, and their gradients are summed.

    `masters`: dtypes at rest by name.
    """
    if precision is None:
        return graph
    tensors = {
        name: replace(tensor, master=masters.get(tensor.fqns[0], ""), sums=_sums(tensor, precision))
        if tensor.role == "parameter"
        else tensor
        for name, tensor in graph.tensors.items()
    }
    return graph.replace(tensors=tensors)


def _sums(tensor: LogicalTensor, precision: Precision) -> str:
    wanted = precision.reduce or ""
    floating = tensor.dtype in FLOATS and tensor.needs_grad
    return wanted if floating and wanted != gradient_dtype(tensor.dtype) else ""


def _casting_inputs(precision: Precision) -> Any:
    dtype = None if precision.param is None or not precision.cast_inputs else getattr(torch, precision.param)

    def cast(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return _cast(args, dtype), _cast(kwargs, dtype)

    return cast


def _casting_outputs(precision: Precision) -> Any:
    dtype = None if precision.output is None else getattr(torch, precision.output)

    def cast(_: nn.Module, _args: tuple[Any, ...], output: Any) -> Any:
        return _cast(output, dtype)

    return cast


def _cast(value: Any, dtype: torch.dtype | None) -> Any:
    if dtype is None:
        return value
    return tree_map(lambda t: t.to(dtype) if isinstance(t, Tensor) and t.is_floating_point() else t, value)
