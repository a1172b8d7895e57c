"""Where a wrong program goes wrong first.

The program runs once more on the simulator, with every variable of every rank observed, and the graph is interpreted
on the whole batch. The manifest says which logical tensor each variable is, and in which layout, so that every
variable can be put together and compared: first values in the order of the program (the first that differs is made
from inputs that agree), then, if all values agree, gradients in the reverse order.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from op_registry.spec import SourceLocation

from nnscaler.ir.graph import Graph
from nnscaler.runtime.loader import load_role
from nnscaler.runtime.role import Stage
from nnscaler.tracing.interpret import run_graph
from verify.backends import run_simulator
from verify.compare import family_scale
from verify.finding import Finding
from verify.observed import Observed, Variable, compare_variable, variables_of
from verify.places import Places
from verify.program_directory import ProgramDirectory
from verify.rank_program import Task
from verify.role_text import Assignment, assignments_of

BOUND = 1e-8


@dataclass(frozen=True)
class Logical:
    """What every logical tensor, and its gradient, should be."""

    values: Mapping[str, Tensor]
    gradients: Mapping[str, Tensor]


def localise(task: Task, graph: Graph, program: ProgramDirectory, places: Places, timeout: float) -> Finding | None:
    """The finding on the first tensor that differs in the first step; None if all that is observed agrees."""
    observed = _observe(task, program, timeout)
    logical = _interpret(task, graph)
    stages = _stages(program)
    variables = variables_of(program.manifest, stages)
    lines = [a for file in program.role_files for a in assignments_of(str(program.path / file))]
    order = sorted(range(len(lines)), key=lambda i: (lines[i].phase != "prepare", lines[i].stage, lines[i].line))
    ordered = [lines[i] for i in order]
    found = _first_value(ordered, variables, observed, logical)
    if found is not None:
        return _finding("tensor_differs", found, graph, places, ordered)
    found = _last_gradient(ordered, variables, observed, logical, graph)
    return None if found is None else _finding("tensor_gradient_differs", found, graph, places, ordered)


@dataclass(frozen=True)
class _Found:
    variable: Variable
    line: Assignment
    what: str  # how it differs
    ranks: tuple[int, ...]
    micro: int | None
    cause: str | None


def _observe(task: Task, program: ProgramDirectory, timeout: float) -> Observed:
    observed = Observed()
    lock = threading.Lock()

    def note(rank: int, stage: int, micro: int, phase: str, name: str, tensor: Tensor) -> None:
        with lock:
            observed.setdefault((stage, phase, name), {})[rank, micro] = tensor.detach().cpu().clone()

    run_simulator(replace(task, steps=1, precision="float64"), program.ranks, timeout, note)
    return observed  # also after a failure: what was seen until then


def _interpret(task: Task, graph: Graph) -> Logical:
    state = torch.load(task.state, weights_only=True)
    inputs = torch.load(task.batch, weights_only=True)
    trainable = {t.fqns[0] for t in graph.with_role("parameter") if t.needs_grad}
    leaves = {
        name: t.double().requires_grad_(name in trainable) if t.is_floating_point() else t for name, t in state.items()
    }
    with torch.enable_grad():
        values = run_graph(graph, leaves, inputs, precision="float64")
    wanted = {name: t for name, t in values.items() if t.requires_grad}
    loss = values[graph.loss]
    found = torch.autograd.grad(loss, list(wanted.values()), torch.ones_like(loss), allow_unused=True)
    gradients = {name: g for name, g in zip(wanted, found, strict=True) if g is not None}
    return Logical({name: t.detach() for name, t in values.items()}, gradients)


def _stages(program: ProgramDirectory) -> dict[int, type[Stage]]:
    found: dict[int, type[Stage]] = {}
    for file in program.role_files:
        for stage in load_role(program.path / file).STAGES:
            found[stage.index] = stage
    return found


def _first_value(
    lines: list[Assignment], variables: Mapping[tuple[int, str], Variable], observed: Observed, logical: Logical
) -> _Found | None:
    for line in lines:
        for name in line.names:
            variable = variables.get((line.stage, name))
            seen = observed.get((line.stage, line.phase, name))
            if variable is None or seen is None or variable.tensor not in logical.values:
                continue
            expected = logical.values[variable.tensor]
            unequal = compare_variable(variable, seen, expected, BOUND, is_gradient=False)
            if unequal is not None:
                return _Found(variable, line, unequal.text, unequal.ranks, unequal.micro, unequal.cause)
    return None


def _last_gradient(
    lines: list[Assignment],
    variables: Mapping[tuple[int, str], Variable],
    observed: Observed,
    logical: Logical,
    graph: Graph,
) -> _Found | None:
    """Only variables that the producing operation assigns: a converted copy carries a part of the gradient."""
    scale = family_scale(logical.gradients.values())
    for line in sorted(lines, key=lambda a: (a.stage, a.line), reverse=True):
        if line.phase != "forward" or "comm." in line.text:
            continue
        for name in line.names:
            variable = variables.get((line.stage, name))
            seen = observed.get((line.stage, "backward", name))
            if variable is None or seen is None or variable.tensor not in logical.gradients:
                continue
            if variable.tensor not in graph.producers:
                continue
            expected = logical.gradients[variable.tensor]
            unequal = compare_variable(variable, seen, expected, BOUND, is_gradient=True, scale=scale)
            if unequal is not None:
                return _Found(variable, line, unequal.text, unequal.ranks, unequal.micro, unequal.cause)
    return None


def _finding(code: str, found: _Found, graph: Graph, places: Places, lines: list[Assignment]) -> Finding:
    line, variable = found.line, found.variable
    producer = graph.producers.get(variable.tensor)
    where = places.of_tensor(variable.tensor) or places.of_line(line.model)
    facts = {"tensor": variable.tensor, "variable": line.names[0] if len(line.names) == 1 else variable.name}
    facts["stage"] = str(line.stage)
    if found.ranks:
        facts["ranks"] = ", ".join(map(str, found.ranks))
    if found.micro is not None:
        facts["micro-batch"] = str(found.micro)
    facts["layout"] = variable.layout or "whole and equal on every rank"
    facts["difference"] = found.what
    module = f" of `{producer.module}`" if producer is not None and producer.module else ""
    related = [("generated program", SourceLocation(line.file, line.line, line.text))]
    if code == "tensor_differs":
        message = (
            f"`{variable.name}`{module} is the first tensor that differs while what it is made of agrees: {found.what}"
        )
        return Finding(code, message, where, facts, found.cause, related=tuple(related))
    related += [("used here", SourceLocation(u.file, u.line, u.text)) for u in _users(variable, line, lines)]
    message = f"the gradient of `{variable.name}`{module} is the last that differs while later ones agree: {found.what}"
    cause = found.cause or "one of the lines that use it sends back a wrong gradient; communication comes first"
    return Finding(code, message, where, facts, cause, related=tuple(related))


def _users(variable: Variable, line: Assignment, lines: list[Assignment]) -> list[Assignment]:
    """The lines of the stage that read the variable, conversions first, and what reads a conversion's result."""
    users = [a for a in lines if a.stage == line.stage and variable.name in a.reads]
    return sorted(users, key=lambda a: ("comm." not in a.text, a.line))[:4]
