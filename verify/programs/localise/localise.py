"""Find every line of a program that is wrong by itself, with a tested cause.

The program is taught (`teacher`): each statement runs on right operands, so that one error does not make everything
after it differ. Where teaching shows nothing, or cannot run, the first tensor that differs in a plain run is what is
known (`first_divergent`).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from nnscaler.ir.graph import Graph
from verify.child_processes import run_apart
from verify.programs.causes.explain_wrong_values import cause_of
from verify.programs.checks.input_and_outcome import SHOWN
from verify.programs.execution.compare_variables import facts_of
from verify.programs.execution.record_rank_steps import Task
from verify.programs.localise.candidate_repairs import Replay, Rewrite, rewrites
from verify.programs.localise.culprit_record import (
    Culprit,
    Key,
    RoleLine,
    advice_on,
    declarations,
    findings_of,
    line_of,
)
from verify.programs.localise.first_divergent import first_difference
from verify.programs.localise.instrument_statements import Statement, shown
from verify.programs.localise.judge_inputs_messages_and_loss import wrong_ends
from verify.programs.localise.judge_taught_statements import CLOSE, Wrong, judge, operation_of
from verify.programs.localise.parameter_gradient_faults import (
    Finals,
    changed,
    frozen,
    wrongly_accumulated,
    wrongly_summed,
)
from verify.programs.localise.run_with_forced_values import TaughtRun, prepare_run
from verify.programs.localise.stored_state_faults import wrongly_held
from verify.programs.localise.teacher_forcing import Teacher
from verify.programs.opened_program import OpenedProgram
from verify.programs.source_map import SourceMap
from verify.results.finding import Finding

# Describe a wrong statement: what it computes, why, and the changed line that computes the right thing.


def culprit_of(replay: Replay, same: Sequence[Wrong], deadline: float) -> Culprit:
    """Describe the fault of one statement. Candidate repairs are tried until `deadline`, of `time.process_time`."""
    teacher, first = replay.run.teacher, same[0]
    statement = first.statement
    cause = repair_of(replay, first, deadline)
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
        advice_on(operation_of(teacher, statement)),
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
    facts = facts_of(first.read.removeprefix("self.") or first.result, first.variable, first.unequal)
    others = [w.read or w.result for w in same[1:]]
    if others:
        facts["also wrong"] = ", ".join(others)
    return {**facts, "step": str(teacher.logical.step)}


def repair_of(replay: Replay, wrong: Wrong, deadline: float) -> str | None:
    """Return the simple repair of the numbers that fits, and the changed line that was tried and is right."""
    teacher, statement = replay.run.teacher, wrong.statement
    operands = {}
    for read in statement.reads:
        name = teacher.tensor_of(statement.stage, read)
        if name is not None and name in teacher.logical.values:
            operands[read.removeprefix("self.")] = teacher.logical.values[name]
    evidence = wrong.unequal.evidence()
    if evidence is not None:
        evidence = replace(evidence, operands=None if wrong.is_gradient else operands, close=CLOSE)
    cause = cause_of(evidence)
    mechanism = wrong.unequal.known or cause.text or None
    rewrite = _first_repair(replay, statement, deadline)
    if rewrite is None:
        return mechanism
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


RUNS = 5  # so many times the time of one run are given to all of them
STEPS = 2  # the second shows what is left over from the first
REPAIR_SECONDS = 3.0  # of processor time, for the changes that are tried on one line


def localise_all(
    task: Task, graph: Graph, program: OpenedProgram, places: SourceMap, timeout: float
) -> tuple[Finding, ...]:
    """Return a finding for each wrong line, in the order of the program; none if all agrees."""
    try:
        culprits = find_culprits(task, graph, program, timeout)
    except Exception:  # noqa: BLE001 - a wrong program may raise anything; a plain run still says where it differs
        culprits = []
    if culprits:
        tensors = {fqn: t.name for t in graph.with_role("parameter", "buffer", "constant") for fqn in t.fqns}
        return findings_of(culprits, places, tensors)
    found = first_difference(task, graph, program, places, timeout)
    return () if found is None else (found,)


def localise_apart(
    task: Task, graph: Graph, program: OpenedProgram, places: SourceMap, timeout: float
) -> tuple[Finding, ...]:
    """Run `localise_all` in a child process; nothing is found where the program ends that process."""
    found = run_apart(lambda: localise_all(task, graph, program, places, timeout), RUNS * timeout)
    return found if isinstance(found, tuple) else ()


def find_culprits(task: Task, graph: Graph, program: OpenedProgram, timeout: float) -> list[Culprit]:
    """Teach the program for as many steps as it takes. Raises what the program raises."""
    run = prepare_run(task, graph, program, timeout)
    lines, schedules = _lines(program)
    before: Finals = {}
    for step in range(STEPS):
        run.step(step)
        culprits = _culprits(run, lines, schedules, before)
        if culprits:
            return culprits
        before = run.teacher.seen.gradients
    return []


def _lines(program: OpenedProgram) -> tuple[dict[Key, RoleLine], dict[int, RoleLine]]:
    """Return the declarations of all stages, and the schedule of each."""
    lines: dict[Key, RoleLine] = {}
    schedules: dict[int, RoleLine] = {}
    for role in program.manifest.roles:
        found = declarations(program.path / role.file)
        lines.update(found)
        if (-1, "SCHEDULE", "") in found:
            schedules.update(dict.fromkeys(role.stages, found[-1, "SCHEDULE", ""]))
    return lines, schedules


def _culprits(
    run: TaughtRun, lines: Mapping[Key, RoleLine], schedules: Mapping[int, RoleLine], before: Finals
) -> list[Culprit]:
    teacher = run.teacher
    judgement = judge(teacher)
    replay = Replay(run)
    held, explained = wrongly_held(replay, judgement.wrong, lines)
    ends = wrong_ends(teacher, lines, schedules)
    taken = [c for c in ends if c.code == "tensor_differs"]
    after = [c for c in ends if c.code != "tensor_differs"]
    statements = _statements(replay, [w for w in judgement.wrong if w.statement.number not in explained])
    parameters = [*frozen(teacher, run.graph, lines), *wrongly_summed(teacher, judgement.summed, lines)]
    if not any(c.code == "tensor_gradient_differs" for c in after):
        known = {c.tensor for c in held}
        parameters += [c for c in wrongly_accumulated(teacher, before, lines, run.foreign) if c.tensor not in known]
    parameters += changed(teacher, lines, run.foreign)
    return [*taken, *held, *statements, *after, *parameters]


def _statements(replay: Replay, wrong: Sequence[Wrong]) -> list[Culprit]:
    """Return one culprit for each statement; the causes of those that are shown are tried."""
    by_number: dict[int, list[Wrong]] = {}
    for one in wrong:
        by_number.setdefault(one.statement.number, []).append(one)
    found: list[Culprit] = []
    for same in by_number.values():
        seconds = REPAIR_SECONDS if len(found) < SHOWN else 0.0
        found.append(culprit_of(replay, same, time.process_time() + seconds))
    return found
