"""Check that a program may run as a stream (PipeDream): stages update their parameters while other batches are on the
way.

What a step does once, before its first forward or after its last backward, a stream has no moment for.
"""

from __future__ import annotations

from nnscaler.communication.communicated_graph import CommunicatedGraph, StageProgram
from nnscaler.errors import NnscalerError
from nnscaler.ir.graph import Graph
from nnscaler.scheduling.schedule import Schedule

HELP = "use a schedule that ends each step with one update: 1f1b, zb-h1"


def check_stream(communicated: CommunicatedGraph, schedule: Schedule) -> None:
    """Check a program whose schedule has updates in it; others pass.

    Raises NnscalerError("plan_illegal"), with the place in the model, where delayed updates would mean something else
    than for one device.
    """
    if not schedule.staleness:
        return
    graph = communicated.partitioned.graph
    if not graph.loss:
        message = f"schedule {schedule.name} updates parameters, and the model has no loss"
        raise NnscalerError("plan_illegal", message, help=HELP)
    for program in communicated.stages:
        if len(program.stage.devices) > 1:
            message = f"schedule {schedule.name} updates stage {program.stage.index} batch by batch, and the devices "
            message += f"{list(program.stage.devices)} run it together"
            raise NnscalerError("plan_illegal", message, help=HELP)
        _check_stage(graph, program, schedule)


def _check_stage(graph: Graph, program: StageProgram, schedule: Schedule) -> None:
    index, version = program.stage.index, "a stage has several versions of its parameters at a time"
    for stored in program.stored:
        tensor = graph.tensors[stored.tensor]
        if tensor.role != "parameter" or not tensor.needs_grad:
            continue
        name = tensor.fqns[0]
        place = next((op.where for op in graph.operations if stored.tensor in op.inputs), None)
        why = help = ""
        if len(stored.copies) > 1:
            delays = " and ".join(str(schedule.staleness[s]) for s in stored.copies)
            stages = " and ".join(map(str, stored.copies))
            why = f"the stages {stages} have copies of it, which would be {delays} updates behind: no longer one tensor"
            help = "untie it, or cut the model so that all of its uses are in one stage"
        elif stored.rest:
            why = f"it rests in shards (zero=1 or 2), which are gathered once a step, and {version}"
            help = "leave zero out of the plan, or use zero=3, which gathers shards where they are read"
        elif tensor.master:
            why = f"it rests in {tensor.master}, and is cast once a step; {version}"
            help = "leave the precision out, or build the model in it"
        if why:
            message = f"schedule {schedule.name}, stage {index}: `{name}` cannot be updated batch by batch: {why}"
            raise NnscalerError("plan_illegal", message, place, help)
    for buffer, _ in program.updates:
        tensor = graph.tensors[buffer]
        place = next((op.where for op in graph.operations if buffer in op.inputs), None)
        message = (
            f"schedule {schedule.name}, stage {index}: forward changes the buffer `{tensor.fqns[0]}`, and buffers are "
            "stored when a step ends"
        )
        raise NnscalerError("plan_illegal", message, place, HELP)
