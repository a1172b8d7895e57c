"""From a module and a sample batch to a graph."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from nnscaler.ir.graph import Graph
from nnscaler.tracing.autograd_functions import OpaqueFunction
from nnscaler.tracing.loss_module import LossModule, evaluating, is_meta, training
from nnscaler.tracing.passes import run_passes
from nnscaler.tracing.sample_inputs import SampleInputs, flatten_inputs
from nnscaler.tracing.self_check import check_trace
from nnscaler.tracing.stitched_export import export_graph


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
    evaluation: bool = False,
    repeat_layers: str = "auto",
) -> Traced:
    """Trace the scalar loss of `module` on a sample batch: a mapping of keyword arguments or a tuple.

    The module is traced in train mode, with the shapes of the sample. Parameters may be on the meta device.
    `evaluation`: in evaluation mode, without a self-check.
    `self_check` compares loss, gradients and buffers of the graph with the module's own on the sample batch.
    `specialise` takes the branch that the sample batch takes where the model looks at data, with a note.
    `repeat_layers`: "auto" traces one of eight or more equal layers and copies it for the others, after a comparison
    of what each of them runs; "always" from two equal layers on; "off" traces every layer. The graph is the same.
    Raises NnscalerError "trace_failed", "no_loss" or "trace_unfaithful".
    """
    sample = flatten_inputs(module, sample_inputs)
    meta = is_meta(module)
    tensors = tuple(t.to("meta") if meta else t for t in sample.tensors.values())
    wrapper = LossModule(module, sample)
    with evaluating(module) if evaluation else training(module):
        exported = export_graph(wrapper, tensors, specialise, repeat_layers)
        graph = run_passes(exported.raw)
    notes = exported.notes
    if self_check and not meta and not evaluation:
        notes = (*notes, *check_trace(module, graph, exported.state, sample))
    for note in notes:
        warnings.warn(note, stacklevel=2)
    if meta:
        notes = (*notes, "the trace is not checked: the module has no data (meta device)")
    return Traced(graph, exported.state, sample.tensors, notes, exported.functions, sample, exported.repeats)
