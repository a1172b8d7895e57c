"""Run a changed statement again on what its ranks were taught: does that repair it?"""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from nnscaler.runtime.communication.axis import AxisGroup
from nnscaler.runtime.role import MICRO, Stage
from verify.programs.localise.forced_run import TaughtRun
from verify.programs.localise.judge import wrong_gradients, wrong_values
from verify.programs.localise.statements import ATTRIBUTE, Statement
from verify.programs.localise.teacher_forcing import At, Execution, results_of

Substitute = Callable[[Stage, str], Any]  # what an operand is instead, None: as it was


@dataclass(frozen=True)
class Replay:
    """Runs statements of a taught run again."""

    run: TaughtRun

    def repairs(self, original: Statement, changed: Statement, instead: Substitute | None = None) -> bool:
        """Return whether the changed statement computes the original's right results, and right gradients where no
        operand is substituted."""
        executions = self.execute(original, changed, instead)
        if executions is None:
            return False
        before = self.run.teacher.seen.executions[original.number]
        if any(set(results_of(original)) & set(e.outputs) - set(executions[at].outputs) for at, e in before.items()):
            return False  # something is no tensor any more
        teacher = self.run.teacher
        values = next(wrong_values(teacher, changed, executions), None)
        if values is not None or instead is not None:
            return values is None
        return next(wrong_gradients(teacher, changed, executions, {}), None) is None

    def execute(
        self, original: Statement, changed: Statement, instead: Substitute | None = None
    ) -> dict[At, Execution] | None:
        """Run the changed statement everywhere that the original ran; None if it raises."""
        before = self.run.teacher.seen.executions.get(original.number, {})
        found: dict[At, Execution] = {}

        def work(communicator: Any) -> None:
            mine = sorted((at, e) for at, e in before.items() if at[0] == communicator.rank)
            for at, execution in mine:
                found[at] = self._once(changed, execution, at, original, instead)

        try:
            self.run.together(work)
        except Exception:  # noqa: BLE001 - a change that raises repairs nothing
            return None
        return found

    def _once(
        self, changed: Statement, before: Execution, at: At, original: Statement, instead: Substitute | None
    ) -> Execution:
        stage = before.stage
        old = dict(zip(original.reads, before.operands, strict=True))
        operands = tuple(self._operand(stage, at, read, old, instead) for read in changed.reads)
        function = before.function if changed.function is original.function else _compiled(changed, stage)
        with torch.set_grad_enabled(before.recording):
            found, _, _ = self.run.teacher.execute(changed, stage, at, function, operands, recording=before.recording)
        return found

    def _operand(self, stage: Stage, at: At, read: str, old: Mapping[str, Any], instead: Substitute | None) -> Any:
        other = None if instead is None else instead(stage, read)
        if other is not None:
            return other
        if read in old:
            return old[read]
        if read == f"self.{MICRO}":
            return AxisGroup(MICRO, stage.micro_batches, max(at[1], 0))
        if read.startswith("self."):
            return getattr(stage, read.removeprefix("self."))
        variable = self.run.teacher.variables.get((stage.index, read))
        right = None if variable is None else self.run.teacher.right(variable, at)
        if right is None:
            raise KeyError(read)
        return right


def with_body(statement: Statement, body: ast.expr, variables: Collection[str] = ()) -> Statement:
    """Return the statement with another right-hand side; it may also read the `variables`."""
    known = {a.arg for a in statement.function.args.args} | set(variables)
    named = dict.fromkeys(n.id for n in ast.walk(body) if isinstance(n, ast.Name))
    parameters = [n for n in named if n in known or n.startswith(ATTRIBUTE)]
    function = ast.Lambda(ast.arguments([], [ast.arg(n) for n in parameters], None, [], [], None, []), body)
    return replace(statement, function=function, reads=tuple(n.replace(ATTRIBUTE, "self.") for n in parameters))


def _compiled(statement: Statement, stage: Stage) -> Callable[..., Any]:
    outer = ast.Lambda(ast.arguments([], [ast.arg("self")], None, [], [], None, []), statement.function)
    tree = ast.fix_missing_locations(ast.Expression(outer))
    names = type(stage).forward.__globals__
    made: Callable[[Stage], Callable[..., Any]] = eval(compile(tree, "<repair>", "eval"), names)
    return made(stage)
