"""Find every line of a program that is wrong by itself, with a tested cause.

The program is taught (`teacher`): each statement runs on right operands, so that one error does not make everything
after it differ. Where teaching shows nothing, or cannot run, the first tensor that differs in a plain run is what is
known (`first_divergent`).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from nnscaler.ir.graph import Graph
from verify.processes.subprocess_isolation import run_apart
from verify.programs.execution.rank_program import Task
from verify.programs.localise import first_divergent
from verify.programs.localise.culprit import SHOWN, Culprit, Line, findings_of
from verify.programs.localise.declarations import Key, declarations
from verify.programs.localise.forced_run import TaughtRun, prepare_run
from verify.programs.localise.judge import Wrong, judge
from verify.programs.localise.lines import culprit_of
from verify.programs.localise.parameters import Finals, changed, frozen, wrongly_accumulated, wrongly_summed
from verify.programs.localise.replay import Replay
from verify.programs.localise.stage_boundaries import wrong_ends
from verify.programs.localise.stored_tensors import wrongly_held
from verify.programs.program_directory import ProgramDirectory
from verify.programs.source_map import Places
from verify.results.finding import Finding

RUNS = 5  # so many times the time of one run are given to all of them
STEPS = 2  # the second shows what is left over from the first
REPAIR_SECONDS = 3.0  # of processor time, for the changes that are tried on one line


def localise(task: Task, graph: Graph, program: ProgramDirectory, places: Places, timeout: float) -> Finding | None:
    """Return the first of `localise_all`; None if all that is observed agrees."""
    return next(iter(localise_all(task, graph, program, places, timeout)), None)


def localise_all(
    task: Task, graph: Graph, program: ProgramDirectory, places: Places, timeout: float
) -> tuple[Finding, ...]:
    """Return a finding for each wrong line, five at most, in the order of the program."""
    try:
        culprits = find_culprits(task, graph, program, timeout)
    except Exception:  # noqa: BLE001 - a wrong program may raise anything; a plain run still says where it differs
        culprits = []
    if culprits:
        tensors = {fqn: t.name for t in graph.with_role("parameter", "buffer", "constant") for fqn in t.fqns}
        return findings_of(culprits, places, tensors)
    found = first_divergent.localise(task, graph, program, places, timeout)
    return () if found is None else (found,)


def localise_apart(
    task: Task, graph: Graph, program: ProgramDirectory, places: Places, timeout: float
) -> tuple[Finding, ...]:
    """Run `localise_all` in a child process; nothing is found where the program ends that process."""
    found = run_apart(lambda: localise_all(task, graph, program, places, timeout), RUNS * timeout)
    return found if isinstance(found, tuple) else ()


def find_culprits(task: Task, graph: Graph, program: ProgramDirectory, timeout: float) -> list[Culprit]:
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


def _lines(program: ProgramDirectory) -> tuple[dict[Key, Line], dict[int, Line]]:
    """Return the declarations of all stages, and the schedule of each."""
    lines: dict[Key, Line] = {}
    schedules: dict[int, Line] = {}
    for role in program.manifest["roles"]:
        found = declarations(program.path / role["file"])
        lines.update(found)
        if (-1, "SCHEDULE", "") in found:
            schedules.update(dict.fromkeys((int(s) for s in role["stages"]), found[-1, "SCHEDULE", ""]))
    return lines, schedules


def _culprits(
    run: TaughtRun, lines: Mapping[Key, Line], schedules: Mapping[int, Line], before: Finals
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
