"""Describe a wrong statement: what it computes, why, and the changed line that computes the right thing."""

from __future__ import annotations

import time
from collections.abc import Sequence

from nnscaler.runtime.role import MICRO
from verify.programs.localise.culprit import Culprit, line_of
from verify.programs.localise.judge import Wrong, operation_of
from verify.programs.localise.numeric import explain
from verify.programs.localise.replay import Replay
from verify.programs.localise.rewrites import Rewrite, rewrites
from verify.programs.localise.statements import Statement, shown
from verify.programs.localise.teacher_forcing import Teacher


def culprit_of(replay: Replay, same: Sequence[Wrong], deadline: float) -> Culprit:
    """Describe the fault of one statement. Candidate repairs are tried until `deadline`, of `time.process_time`."""
    teacher, first = replay.run.teacher, same[0]
    statement = first.statement
    cause = cause_of(replay, first, deadline)
    code = "tensor_gradient_differs" if first.is_gradient else "tensor_differs"
    tensor = teacher.logical.name_of(first.variable.tensor)
    message = _message(teacher, first)
    return Culprit(
        code,
        message,
        tensor,
        line_of(statement),
        statement.model,
        cause,
        _advice(teacher, first),
        _facts(teacher, same),
    )


def _message(teacher: Teacher, wrong: Wrong) -> str:
    statement, text = wrong.statement, wrong.unequal.text
    if wrong.is_gradient:
        read = wrong.read.removeprefix("self.")
        subject = f"`{read}`{_module(teacher, wrong)}"
        if text.startswith("no gradient"):
            return f"{text} from `{wrong.result}` to {subject}"
        return f"the gradient of {subject} that `{wrong.result}` sends back differs while later ones agree: {text}"
    if statement.key:
        return f"`{wrong.variable.name}`{_module(teacher, wrong)} is right, and what is returned for it differs: {text}"
    return f"`{wrong.result}`{_module(teacher, wrong)} differs while what it is made of agrees: {text}"


def _module(teacher: Teacher, wrong: Wrong) -> str:
    producer = teacher.logical.graph.producers.get(teacher.logical.name_of(wrong.variable.tensor))
    return f" of `{producer.module}`" if producer is not None and producer.module else ""


def _facts(teacher: Teacher, same: Sequence[Wrong]) -> dict[str, str]:
    first = same[0]
    facts = {"variable": first.read.removeprefix("self.") or first.result, "stage": str(first.statement.stage)}
    if first.unequal.ranks:
        facts["ranks"] = ", ".join(map(str, first.unequal.ranks))
    if first.unequal.micro is not None:
        facts["micro-batch"] = str(first.unequal.micro)
    facts["layout"] = first.variable.layout or "whole and equal on every rank"
    facts["difference"] = first.unequal.text
    others = [w.read or w.result for w in same[1:]]
    if others:
        facts["also wrong"] = ", ".join(others)
    return {**facts, "step": str(teacher.logical.step)}


def _advice(teacher: Teacher, wrong: Wrong) -> str | None:
    """Return of the built-in operators the annotations are tested; nobody has tested the user's."""
    operation = operation_of(teacher, wrong.statement)
    if operation is None or operation.operator.startswith(("aten.", "nnscaler.")):
        return None
    return f"if the program is as it was generated, the annotation of `{operation.operator}` is wrong: verify-op tells"


def cause_of(replay: Replay, wrong: Wrong, deadline: float) -> str | None:
    """Return the simple repair of the numbers that fits, and the changed line that was tried and is right."""
    teacher, statement = replay.run.teacher, wrong.statement
    operands = {}
    for read in statement.reads:
        name = teacher.tensor_of(statement.stage, read)
        if name is not None and name in teacher.logical.values:
            operands[read.removeprefix("self.")] = teacher.logical.values[name]
    mechanism = explain(wrong, {} if wrong.is_gradient else operands) or wrong.unequal.cause
    rewrite = _first_repair(replay, statement, deadline)
    if rewrite is None:
        return mechanism or (_of_ranks(wrong) if wrong.unequal.ranks else None)
    changed = f"`{_text(rewrite.statement)}` repairs it"
    if rewrite.missing:
        return f"{mechanism or rewrite.missing + ' is missing'}; {changed}"
    return f"{rewrite.why}; {changed}" if mechanism is None else f"{mechanism}; {rewrite.why}; {changed}"


def _first_repair(replay: Replay, statement: Statement, deadline: float) -> Rewrite | None:
    if statement.compound:
        return None
    for rewrite in rewrites(replay.run.teacher, statement):
        if time.process_time() > deadline:
            return None
        if replay.repairs(statement, rewrite.statement):
            return rewrite
    return None


def _text(statement: Statement) -> str:
    left = ", ".join(statement.names)
    return (
        f"{left} = {shown(statement.function.body)}" if left else f'"{statement.key}": {shown(statement.function.body)}'
    )


def _of_ranks(wrong: Wrong) -> str | None:
    """Return where nothing else is known: that some ranks alone are wrong."""
    stage = wrong.variable.stage
    if set(wrong.unequal.ranks) == set(stage.ranks):
        return None
    over = f" ({MICRO}-batch {wrong.unequal.micro})" if wrong.unequal.micro is not None else ""
    return f"it is wrong on rank {', '.join(map(str, wrong.unequal.ranks))} alone{over}"
