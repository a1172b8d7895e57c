"""Find the first tensor in which a run of a wrong program differs from the model.

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

from op_registry.source_location import SourceLocation

from nnscaler.ir.graph import Graph
from nnscaler.runtime.tensor_bits_and_differences import family_scale, largest
from verify.programs.execution.compare_variables import (
    Observed,
    Pieces,
    Variable,
    VariableDifference,
    compare_variable,
    facts_of,
    variables_of,
)
from verify.programs.execution.record_rank_steps import Task
from verify.programs.execution.run_on_backend import run_simulator
from verify.programs.localise.culprit_record import advice_on
from verify.programs.localise.interpret_graph_on_whole_batch import Logical, interpret
from verify.programs.localise.judge_taught_statements import BOUND
from verify.programs.opened_program import OpenedProgram
from verify.programs.source_map import Assignment, SourceMap, assignments_of
from verify.results.finding import Finding


def first_difference(
    task: Task, graph: Graph, program: OpenedProgram, places: SourceMap, timeout: float
) -> Finding | None:
    """Return the finding on the first tensor that differs in the first step; None if all that is observed agrees."""
    observed = _observe(task, program, timeout)
    state, inputs = (torch.load(file, weights_only=True) for file in (task.state, task.batch))
    logical = interpret(graph, state, inputs, dealer=None)
    variables = variables_of(program.manifest, {stage.index: stage for stage in program.stages()})
    lines = [a for file in program.role_files for a in assignments_of(str(program.path / file))]
    order = sorted(range(len(lines)), key=lambda i: (lines[i].phase != "prepare", lines[i].stage, lines[i].line))
    ordered = [lines[i] for i in order]
    found = _first_value(ordered, variables, observed, logical)
    if found is not None:
        return _value_finding(found, graph, places)
    found = _last_gradient(ordered, variables, observed, logical, graph)
    return None if found is None else _gradient_finding(found, graph, places, ordered)


@dataclass(frozen=True)
class _Found:
    variable: Variable
    line: Assignment
    unequal: VariableDifference

    @property
    def facts(self) -> dict[str, str]:
        shown = self.line.names[0] if len(self.line.names) == 1 else self.variable.name
        return {"tensor": self.variable.tensor, **facts_of(shown, self.variable, self.unequal)}


def _observe(task: Task, program: OpenedProgram, timeout: float) -> Observed:
    observed = Observed()
    lock = threading.Lock()

    def note(rank: int, stage: int, micro: int, phase: str, name: str, tensor: Tensor) -> None:
        with lock:
            observed.setdefault((stage, phase, name), {})[rank, micro] = tensor.detach().cpu().clone()

    run_simulator(replace(task, steps=1, precision="float64"), program.ranks, timeout, note)
    return observed  # also after a failure: what was seen until then


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
                return _Found(variable, line, unequal)
    return None


def _last_gradient(
    lines: list[Assignment],
    variables: Mapping[tuple[int, str], Variable],
    observed: Observed,
    logical: Logical,
    graph: Graph,
) -> _Found | None:
    """Find the last wrong gradient, among variables that the producing operation assigns.

    A converted or received copy carries only a part of the gradient.
    """
    scale = family_scale(logical.gradients.values())
    for line in sorted(lines, key=lambda a: (a.stage, a.line), reverse=True):
        if line.phase != "forward" or "comm." in line.text or line.is_arguments:
            continue
        for name in line.names:
            variable = variables.get((line.stage, name))
            if variable is None or variable.tensor not in logical.gradients or variable.tensor not in graph.producers:
                continue
            expected = logical.gradients[variable.tensor]
            seen = observed.get((line.stage, "backward", name), {})
            unequal = _absent(observed.get((line.stage, "forward", name), {}), seen, expected) or compare_variable(
                variable, seen, expected, BOUND, is_gradient=True, scale=scale
            )
            if unequal is not None:
                return _Found(variable, line, unequal)
    return None


def _absent(forward: Pieces, backward: Pieces, expected: Tensor) -> VariableDifference | None:
    """Return the ranks and micro-batches that computed the variable and got no gradient for it."""
    missing = sorted(set(forward) - set(backward))
    if not missing or not largest(expected) > 0:
        return None
    ranks, micros = sorted({rank for rank, _ in missing}), sorted({micro for _, micro in missing})
    every = {micro for _, micro in forward}
    batches = "" if set(micros) == every else f" for micro-batch {', '.join(map(str, micros))}"
    text = f"no gradient comes back{batches} on rank {', '.join(map(str, ranks))}"
    cause = "it is cut off here, or in what follows; or a backward pass is missing, or the gradient is not sent back"
    return VariableDifference(text, tuple(ranks), micros[0] if batches else None, cause)


def _subject(found: _Found, graph: Graph) -> str:
    producer = graph.producers.get(found.variable.tensor)
    module = f" of `{producer.module}`" if producer is not None and producer.module else ""
    return f"`{found.variable.name}`{module}"


def _where(found: _Found, places: SourceMap) -> SourceLocation | None:
    """Return the model's line: of a tensor, of a stored tensor's first use, or the one that the program quotes."""
    tensor = found.variable.tensor
    return places.of_tensor(tensor) or places.of_stored().get(tensor) or places.of_line(found.line.model)


def _in_program(line: Assignment) -> tuple[str, SourceLocation]:
    return "generated program", SourceLocation(line.file, line.line, line.text)


def _value_finding(found: _Found, graph: Graph, places: SourceMap) -> Finding:
    """Make the finding on a wrong value. A wrong argument of a stage was made wrong on its way."""
    line, variable, subject = found.line, found.variable, _subject(found, graph)
    cause, text = found.unequal.cause, found.unequal.text
    if not line.is_arguments:
        message = f"{subject} is the first tensor that differs while what it is made of agrees: {text}"
    elif variable.name in variable.stage.receives:
        message = f"{subject} agrees where it is computed, and differs where stage {line.stage} receives it: {text}"
        cause = cause or "the messages between the stages bring it to the wrong ranks or micro-batches"
    else:
        message = f"the pieces of the input `{variable.tensor}` that stage {line.stage} takes differ: {text}"
        cause = cause or f"the program cuts it otherwise than its layout says ({variable.layout})"
    where, related = _where(found, places), (_in_program(line),)
    producer = None if "comm." in line.text else graph.producers.get(variable.tensor)
    return Finding("tensor_differs", message, where, found.facts, cause, advice_on(producer), related=related)


def _gradient_finding(found: _Found, graph: Graph, places: SourceMap, lines: list[Assignment]) -> Finding:
    line, variable = found.line, found.variable
    used = [("used here", SourceLocation(u.file, u.line, u.text)) for u in _users(variable, line, lines)]
    subject = _subject(found, graph)
    message = f"the gradient of {subject} is the last that differs while later ones agree: {found.unequal.text}"
    cause = found.unequal.cause or "one of the lines that use it sends back a wrong gradient; communication comes first"
    related = (_in_program(line), *used)
    where = _where(found, places)
    return Finding("tensor_gradient_differs", message, where, found.facts, cause, related=related)


def _users(variable: Variable, line: Assignment, lines: list[Assignment]) -> list[Assignment]:
    """Return the lines of the stage that read the variable, conversions first, and what reads a conversion's result."""
    users = [a for a in lines if a.stage == line.stage and variable.name in a.reads]
    return sorted(users, key=lambda a: ("comm." not in a.text, a.line))[:4]
