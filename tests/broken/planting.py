"""Planting a bug in a generated program, and what it means that the bug is caught."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

import nnscaler
from nnscaler.compile import PlanSource
from nnscaler.runtime.jobs.launcher import ForkServer
from tests.graph_text import parse_graph
from verify import Finding, Report
from verify.programs.loaded_model_and_plan import PlanSubject, RunContext
from verify.programs.request import PlanRequest
from verify.programs.typing import StaticResult, check_program
from verify.programs.verify_request import verify_request
from verify.results.finding_codes import CODES


@dataclass(frozen=True, slots=True)
class Edit:
    """`old` becomes `new` in a role's text. It must be there, once; with `line`, in every line that contains that."""

    old: str
    new: str
    role: int = 0
    line: str = ""


@dataclass(frozen=True, slots=True)
class Bug:
    """An edit, and the first finding that it must lead to.

    `code` and `tensor`: of the finding. `cause`: a part of its cause. `step`: the first whose loss is wrong, None where
    no loss is. `role` is that of the edit; further edits are in `others`.
    """

    name: str
    old: str
    new: str
    code: str
    tensor: str
    cause: str = ""
    step: int | None = 0
    role: int = 0
    line: str = ""
    others: tuple[Edit, ...] = ()

    @property
    def edits(self) -> tuple[Edit, ...]:
        return (Edit(self.old, self.new, self.role, self.line), *self.others)


@dataclass(frozen=True, slots=True)
class Original:
    """A compiled program, verified as it is, from which copies are made."""

    factory: Callable[[], nn.Module]
    inputs: dict[str, Tensor]
    ranks: int
    folder: Path

    def broken(self, folder: Path, edits: Sequence[Edit]) -> Path:
        """A copy with the edits in it."""
        program = folder / "program"
        shutil.copytree(self.folder, program)
        for edit in edits:
            plant(program / f"role_{edit.role}.py", edit)
        return program

    def verify(self, program: Path, server: ForkServer | None = None, **options: Any) -> Report:
        """Runs the program. What is found without running it is another matter: `read`."""
        asked = {"level": "run", "backend": "simulator", "timeout": 120.0, **options}
        request = PlanRequest(ranks=self.ranks, program=str(program), **asked)
        return verify_request(request, PlanSubject(self.factory, self.inputs), RunContext(server=server))

    def read(self, program: Path) -> StaticResult:
        """Reads the program's text against the graph, and runs nothing."""
        graph = parse_graph((self.folder / "graph.txt").read_text(encoding="utf-8"))
        sources = {file.name: file.read_text(encoding="utf-8") for file in sorted(program.glob("role_*.py"))}
        return check_program(sources, graph, str(program))


def compile_original(
    folder: Path,
    factory: Callable[[], nn.Module],
    inputs: dict[str, Tensor],
    ranks: int,
    plan: PlanSource,
    micro_batches: int = 1,
) -> Original:
    """Compiles, and makes sure that the program passes as long as nobody changes it."""
    program = nnscaler.parallelize(factory(), inputs, ranks=ranks, plan=plan, micro_batches=micro_batches)
    original = Original(factory, inputs, ranks, program.save(folder))
    report = original.verify(original.folder)
    assert report.exit_code == 0 and not report.findings, report.to_json()
    return original


def plant(file: Path, edit: Edit) -> None:
    """Edits one file. Fails where the program is not what the edit was written for."""
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    if edit.line:
        chosen = [i for i, line in enumerate(lines) if edit.line in line]
        assert chosen, f"no line of {file.name} contains {edit.line}"
        for i in chosen:
            assert lines[i].count(edit.old) == 1, f"not once {edit.old!r} in: {lines[i]}"
            lines[i] = lines[i].replace(edit.old, edit.new)
        text = "".join(lines)
    else:
        text = "".join(lines)
        assert text.count(edit.old) == 1, f"{text.count(edit.old)} times in {file.name}: {edit.old}"
        text = text.replace(edit.old, edit.new)
    file.write_text(text, encoding="utf-8")


def assert_refuted(report: Report, code: str, tensor: str) -> Finding:
    """The first finding, which has this code and names this tensor, and the line of the model that uses it."""
    assert report.exit_code == 1, report.to_json()
    assert {finding.code for finding in report.findings} <= set(CODES)
    first = report.findings[0]
    assert first.code == code, report.to_json()
    assert f"`{tensor}`" in first.message, first.message
    if code != "gradient_extra":  # no line uses it
        assert first.where is not None and Path(first.where.file).name in ("models.py", "operators.py"), first
    return first


def assert_caught(report: Report, bug: Bug) -> Finding:
    """The bug is caught as it says, and the loss is wrong from the step on from which it must be."""
    first = assert_refuted(report, bug.code, bug.tensor)
    assert bug.cause in str(first.cause), first.cause
    assert any("was changed after it was generated" in note for note in report.notes)
    steps = [int(f.counter_example["step"]) for f in report.findings if f.code == "loss_differs"]
    assert min(steps, default=None) == bug.step, report.to_json()
    return first


def names(bugs: Sequence[Bug]) -> list[str]:
    return [bug.name for bug in bugs]
