"""Bugs to plant in generated programs, each with the mechanism that its cause must name."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

import nnscaler
from nnscaler.compile import PlanSource
from nnscaler.transform.plan import AssignStep, Plan, SplitStep
from tests.broken import models
from tests.broken.planting import Edit, plant
from verify.programs.eager_reference import logical_state
from verify.programs.execution.record_rank_steps import Task
from verify.programs.loaded_model_and_plan import PlanSubject
from verify.programs.localise import localise_all
from verify.programs.opened_program import open_program
from verify.programs.prepare_verification import Prepared, prepare
from verify.programs.request import PlanRequest
from verify.programs.source_map import SourceMap
from verify.results.finding import Finding

Localiser = Callable[..., Finding | tuple[Finding, ...] | None]


@dataclass(frozen=True)
class Planted:
    """`cause`: words of which one must be in the cause; `program`: which program of `programs` it is planted in."""

    name: str
    program: str
    old: str
    new: str
    cause: tuple[str, ...]
    role: int = 0
    line: str = ""
    others: tuple[Edit, ...] = ()

    @property
    def edits(self) -> tuple[Edit, ...]:
        return (Edit(self.old, self.new, self.role, self.line), *self.others)


@dataclass(frozen=True)
class Bench:
    """A compiled program, and what running it needs."""

    folder: Path
    prepared: Prepared
    task: Task

    def broken(self, folder: Path, edits: Sequence[Edit]) -> tuple[Prepared, Task]:
        """With a copy of the program that has the edits."""
        shutil.copytree(self.folder, folder)
        for edit in edits:
            plant(folder / f"role_{edit.role}.py", edit)
        program = open_program(folder)
        task = Task(str(folder), self.task.state, self.task.batch, 2, self.task.learning_rate, "float64")
        return Prepared(self.prepared.model, self.prepared.sample, program, self.prepared.graph, ()), task

    def changed_lines(self, folder: Path) -> set[tuple[str, int]]:
        """(file name, line) of what differs from the original."""
        found: set[tuple[str, int]] = set()
        for file in sorted(self.folder.glob("role_*.py")):
            before = file.read_text(encoding="utf-8").splitlines()
            after = (folder / file.name).read_text(encoding="utf-8").splitlines()
            kept = set(before)
            found |= {(file.name, i + 1) for i, text in enumerate(after) if text not in kept}
        return found


def bench(
    folder: Path,
    factory: Callable[[], nn.Module],
    inputs: Mapping[str, Tensor],
    ranks: int,
    plan: PlanSource,
    micro: int,
) -> Bench:
    request = PlanRequest(ranks=ranks, micro_batches=micro)
    prepared = prepare(request, PlanSubject(factory, dict(inputs), plan), folder / "program")
    torch.save({**prepared.program.state(), **logical_state(prepared.model)}, folder / "state.pt")
    torch.save(dict(prepared.sample.tensors), folder / "batch.pt")
    task = Task(str(folder / "program"), str(folder / "state.pt"), str(folder / "batch.pt"), 2, 0.01, "float64")
    return Bench(folder / "program", prepared, task)


def looked_up_plan() -> Plan:
    plan = nnscaler.parallelize(models.transformer(), models.text(), ranks=2, plan="tp=2").plan
    return Plan(plan.mesh, (*plan.steps, SplitStep(("embedding",), "tp", "v")))


def unlike_plan() -> Plan:
    steps = (AssignStep(("layers.0", "tanh"), (0,)), AssignStep(("layers.1", "sub", "square", "mean"), (1,)))
    return Plan((("pp", 2),), steps, stage_axes=((("dp", 2),), (("dp", 3),)))


def programs(folder: Path) -> dict[str, Callable[[], Bench]]:
    """How each program is made: sharded, staged, with a split vocabulary, on 3 ranks, and between unlike meshes."""

    def made(name: str, *arguments: object) -> Callable[[], Bench]:
        def make() -> Bench:
            (folder / name).mkdir()
            given = [a() if a in (looked_up_plan, unlike_plan) else a for a in arguments]  # type: ignore[operator]
            return bench(folder / name, *given)  # type: ignore[arg-type]

        return make

    text, points = models.text(), models.points()
    return {
        "sharded": made("sharded", models.transformer, text, 4, "dp=2,tp=2", 1),
        "staged": made("staged", models.transformer, text, 4, "dp=2,pp=2", 4),
        "looked_up": made("looked_up", models.transformer, text, 2, looked_up_plan, 1),
        "three": made("three", models.perceptron, points, 3, "dp=3", 2),
        "unlike": made("unlike", models.perceptron, points, 5, unlike_plan, 1),
    }


@dataclass(frozen=True)
class Score:
    """The score of a localisation.

    line      the first finding names an edited line
    cause     the first finding names the mechanism
    edited    number of edited lines that some finding names, and number of edited lines
    """

    line: bool
    cause: bool
    edited: tuple[int, int]
    findings: tuple[Finding, ...]


def score(bench: Bench, bugs: Sequence[Planted], folder: Path, localiser: Localiser = localise_all) -> Score:
    """Plants the bugs, and asks where they are."""
    prepared, task = bench.broken(folder, [edit for bug in bugs for edit in bug.edits])
    found = localiser(task, prepared.graph, prepared.program, SourceMap(prepared.graph), 60.0)
    findings = found if isinstance(found, tuple) else () if found is None else (found,)
    edited = bench.changed_lines(folder)
    named = [_named(finding) for finding in findings]
    line = bool(findings) and (named[0] in edited or any(_removed(bug, findings[0]) for bug in bugs))
    cause = bool(findings) and any(words in str(findings[0].cause) for bug in bugs for words in bug.cause)
    return Score(line, cause, (len(edited & set(named)), len(edited)), findings)


def _named(finding: Finding) -> tuple[str, int]:
    """The line of the program that a finding names."""
    places = [place for what, place in finding.related if what == "generated program"]
    return (Path(places[0].file).name, places[0].line) if places else ("", 0)


def _removed(bug: Planted, finding: Finding) -> bool:
    """Where an instruction of the schedule is gone, the schedule is the line."""
    return bug.old.startswith(" B") and any("SCHEDULE" in place.text for _, place in finding.related)
