"""Every call of every rank in one step, by the profile of a program and on the simulator, compared."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import jsonschema
import torch

from nnscaler.codegen.compiled_program import Program
from nnscaler.communication.communication_volume import StepCommunication, step_communication
from nnscaler.communication.insert_conversions import materialise
from nnscaler.compile import WantedPlan, compile_traced
from nnscaler.ir.operation_annotations import signatures
from nnscaler.records_as_json import encode
from nnscaler.runtime.communication.communicator import CommunicationCall, Communicator
from nnscaler.runtime.communication.simulator import Simulator
from nnscaler.runtime.program.import_role_and_user_files import load_role
from nnscaler.runtime.training.executor import RankExecutor
from nnscaler.runtime.training.executor_settings import ExecutorSettings
from nnscaler.scheduling.registry import schedule_of
from nnscaler.tracing import Traced
from nnscaler.transform.apply import apply_plan
from nnscaler.transform.plan import Plan

Made = tuple[int, str, tuple[int, ...], int, str, str]  # rank, kind, group, bytes, dtype, phase


def profile_of(traced: Traced, plan: Plan) -> StepCommunication:
    known = dict(signatures(traced.graph))
    communicated = materialise(apply_plan(traced.graph, known, plan), known)
    order = schedule_of(plan, communicated.without_gradient)
    return step_communication(communicated, order)


def said(profile: StepCommunication) -> Counter[Made]:
    """Every call of every rank in one step, by the profile."""
    found: Counter[Made] = Counter()
    for entry in profile.classes:
        call = entry.call
        for group in entry.members:
            if call.kind == "send/recv":
                source, target = group
                sends = f"{call.phase}{call.stage}"
                found[source, "send", group, call.bytes, call.dtype, sends] += entry.calls
                found[target, "recv", group, call.bytes, call.dtype, f"{call.phase}{call.to_stage}"] += entry.calls
                continue
            for rank in group:
                phase = f"{call.phase}{call.stage}" if call.phase in ("F", "B", "I", "W", "prepare") else call.phase
                found[rank, call.kind, group, call.bytes, call.dtype, phase] += entry.calls
    return found


def counted(program: Program, folder: Path) -> Counter[Made]:
    """Every call of every rank in one step, on the simulator."""
    path = program.save(folder / "program")
    roles = {r: load_role(path / role.file) for role in program.manifest.roles for r in role.ranks}

    def run(communicator: Communicator) -> list[CommunicationCall]:
        executor = RankExecutor(
            roles[communicator.rank], communicator.rank, communicator, program.state, ExecutorSettings(dropout=False)
        )
        made: list[CommunicationCall] = []
        communicator.listener = made.append
        executor.step(program.inputs)
        return made

    found: Counter[Made] = Counter()
    for rank, calls in enumerate(Simulator(program.manifest.ranks).run(run)):
        for call in calls:
            assert call.dtype is not None
            elements = handed_over(call)
            key = (rank, call.kind, call.ranks, elements * call.dtype.itemsize, str(call.dtype)[6:], phase_of(call))
            found[key] += 1
    return found


def handed_over(call: CommunicationCall) -> int:
    """Elements of what a rank gives; of the rank that gives most, where the call lists those of the whole group."""
    elements, ranks = [torch.Size(shape).numel() for shape in call.shapes], len(call.ranks)
    if call.kind in ("all_gather", "rotate") and len(elements) == ranks:
        return max(elements)
    if call.kind == "all_to_all" and len(elements) == ranks * ranks:
        return max(sum(elements[i * ranks : (i + 1) * ranks]) for i in range(ranks))
    return sum(elements)


def phase_of(call: CommunicationCall) -> str:
    if call.context.startswith("prepare of stage "):
        return "prepare" + call.context.rpartition(" ")[2]
    if call.context.startswith("the gradient sum"):
        return "gradient"
    if call.context == "the gathering of parameters":
        return "gather"
    return "loss" if call.context == "the sum of the loss" else call.context.partition(".")[0]


def check(traced: Traced, plan: Plan | str, ranks: int, folder: Path, **options: Any) -> Counter[Made]:
    program = compile_traced(traced, WantedPlan(ranks, plan, **options), model={"name": "model"})
    profile = profile_of(traced, program.plan)
    assert program.manifest.communication_profile == profile.record
    jsonschema.validate(json.loads(json.dumps(encode(profile.record))), schema())
    right, found = counted(program, folder), said(profile)
    assert right, "this plan communicates nothing, so nothing is tested"
    assert found == right, (
        f"only in the profile: {list((found - right).items())[:5]}, missing: {list((right - found).items())[:5]}"
    )
    return right


def schema() -> dict[str, Any]:
    file = Path(__file__).resolve().parents[1] / "docs" / "reports" / "comm-profile.schema.json"
    loaded: dict[str, Any] = json.loads(file.read_text())
    return loaded
