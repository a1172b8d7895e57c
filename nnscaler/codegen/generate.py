"""Generate the text of every role, and the manifest, from a communicated graph and a schedule."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypedDict

import torch

import nnscaler
from nnscaler.codegen.compiled_program import sha256
from nnscaler.codegen.python_text_of_calls import Origin, written_origins
from nnscaler.codegen.role_writer import write_role
from nnscaler.communication.communicated_graph import CommunicatedGraph, StageProgram, chunk_of, writes
from nnscaler.ir.graph import LOSS, Graph
from nnscaler.ir.operation_annotations import Signature
from nnscaler.ir.operation_placement import Split
from nnscaler.layout import Layout, format_layout
from nnscaler.manifest import (
    FORMAT,
    AxisVolume,
    BufferRecord,
    InputRecord,
    Manifest,
    ParameterRecord,
    ResultRecord,
    Returns,
    RoleRecord,
)
from nnscaler.scheduling.schedule import Schedule
from nnscaler.transform.plan import Plan


def generate(
    communicated: CommunicatedGraph,
    schedule: Schedule,
    plan: Plan,
    title: str,
    origins: Mapping[str, Origin],
) -> dict[str, str]:
    """File name -> source, one per role (the ranks of one pipeline device). `origins`: where the operators that are
    not built in are found."""
    written = written_origins(origins)
    sources: dict[str, str] = {}
    for device, order in enumerate(schedule.orders):
        text = " ".join(str(i) for i in order)
        head = f"Rank program of {title}: {plan.describe()}, role {device} of {len(schedule.orders)}."
        sources[f"role_{device}.py"] = write_role(communicated, device, head, text, written, schedule.staleness)
    return sources


def manifest(
    communicated: CommunicatedGraph,
    schedule: Schedule,
    plan: Plan,
    sources: Mapping[str, str],
    signatures: Mapping[str, Signature],
    model: Mapping[str, str],
) -> Manifest:
    """Describe a program, but for what a step takes, its tensors and the files of its operators, which the caller
    adds."""
    partitioned = communicated.partitioned
    graph = partitioned.graph
    roles = []
    for device, (file, text) in enumerate(sources.items()):
        stages = tuple(program.stage.index for program in communicated.on(device))
        roles.append(RoleRecord(file, sha256(text), partitioned.devices[device], stages))
    missing = {op.operator for op in graph.operations if signatures[op.name].bound is None}
    return Manifest(
        format=FORMAT,
        nnscaler=nnscaler.__version__,
        torch=torch.__version__,
        model=dict(model),
        ranks=plan.ranks,
        plan=plan.describe(),
        plan_document=plan.to_json(),
        axes=plan.mesh,
        stage_axes=plan.stage_axes,
        micro_batches=plan.micro_batches,
        schedule=schedule.name,
        roles=tuple(roles),
        **listed(graph),
        returns=returns(communicated),
        tensors={p.stage.index: _variables(p) for p in communicated.stages},
        communication=tuple(
            AxisVolume(axis, kind, calls, sent) for (axis, kind), (calls, sent) in sorted(communicated.volumes.items())
        ),
        matmul_flops_divided=matmul_flops_divided(communicated, signatures),
        unannotated=tuple(sorted(missing)),
        state={},
        batch={},
    )


class Listed(TypedDict):
    """The model's inputs, parameters and buffers, as entries of a manifest."""

    inputs: tuple[InputRecord, ...]
    parameters: tuple[ParameterRecord, ...]
    buffers: tuple[BufferRecord, ...]


def listed(graph: Graph) -> Listed:
    """Return the model's inputs, parameters and buffers, as a manifest lists them."""
    return {
        "inputs": tuple(InputRecord(t.name, t.shape, t.dtype) for t in graph.with_role("input")),
        "parameters": tuple(
            ParameterRecord(t.fqns, t.shape, t.dtype, t.needs_grad, bool(graph.consumers[t.name]))
            for t in graph.with_role("parameter")
        ),
        "buffers": tuple(BufferRecord(t.fqns, t.shape, t.dtype) for t in graph.with_role("buffer")),
    }


def returns(communicated: CommunicatedGraph) -> Returns:
    """Return what the model returns, and the ranks that have it."""
    graph = communicated.partitioned.graph
    ranks = {name: tuple(p.stage.mesh.ranks) for p in communicated.stages for name in results_of(p)}
    results = tuple(
        ResultRecord(name, graph.tensors[tensor].shape, graph.result_dtype(name, tensor), ranks[name])
        for name, tensor in graph.results
    )
    return Returns(graph.structure, results)


def results_of(program: StageProgram) -> list[str]:
    """Return the names of the results that a stage makes, the loss first."""
    return [*([LOSS] if program.loss is not None else []), *(name for name, _ in program.results)]


def _variables(program: StageProgram) -> dict[str, tuple[str, str]]:
    """Return variable -> (logical tensor, layout), of everything that a stage computes, converts or receives."""
    found: dict[str, tuple[str, str]] = {}

    def add(variable: str, tensor: str, layout: Layout) -> None:
        found[variable] = (tensor, format_layout(layout, program.stage.names))

    for feed in (*program.prepare_feeds, *program.feeds):
        add(feed.version.variable, feed.version.tensor, feed.version.layout)
    for message in program.receives:
        add(message.target.variable, message.tensor, message.target.layout)
    for statement in (*program.prepare, *program.forward):
        if chunk_of(statement) is None:  # a variable of a piece is another tensor in each piece
            for version in writes(statement):
                add(version.variable, version.tensor, version.layout)
    return found


def matmul_flops_divided(communicated: CommunicatedGraph, signatures: Mapping[str, Signature]) -> dict[str, float]:
    """Mesh axis -> the fraction of the FLOPs of matmul-like operations that the axis divides."""
    partitioned = communicated.partitioned
    total, divided = 0, dict.fromkeys((a.name for s in partitioned.stages for a in s.mesh.axes), 0)
    for op in partitioned.graph.operations:
        flops, placement = signatures[op.name].flops, partitioned.placements[op.name]
        total += flops
        stage = placement.stages[0]
        for axis, choice in zip(partitioned.stages[stage].axes, placement.choices[stage], strict=True):
            if isinstance(choice, Split) and axis.name in divided:
                divided[axis.name] += flops
    return {name: (flops / total if total else 0.0) for name, flops in divided.items()}
