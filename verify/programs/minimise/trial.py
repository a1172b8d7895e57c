"""Test cheaply whether a plan fails: compile, run one step on the simulator, compare loss and gradients."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from nnscaler.compile import WantedPlan, compile_traced
from nnscaler.files import save_tensors
from nnscaler.runtime.program.loader import load_role
from nnscaler.tracing import Traced
from nnscaler.transform.plan import Plan
from verify.programs.checks.logical import by_rank, holdings_of, put_together
from verify.programs.execution.backends import run_simulator
from verify.programs.execution.failure import Failure
from verify.programs.execution.rank_program import RankResult, Task
from verify.programs.program_directory import OpenedProgram, open_program
from verify.programs.reference.eager import Trajectory
from verify.results.tolerance import difference, family_scale
from verify.results.verdict import Verdict

BOUND = 1e-7


@dataclass(frozen=True)
class PlanTrial:
    """Compiles and runs plans of one model. `task`: with the files of state and batch; its program is not used."""

    traced: Traced
    task: Task
    reference: Trajectory
    timeout: float = 30.0

    def fails(self, plan: Plan) -> bool:
        """Return whether the plan's program computes a different loss or different gradients, or does not end.

        Raises NnscalerError for a plan that is not legal.
        """
        with tempfile.TemporaryDirectory(prefix="nnscaler-minimise-") as folder:
            compiled = compile_traced(self.traced, WantedPlan(plan.ranks, plan), model={"name": "model"})
            program = open_program(compiled.save(Path(folder) / "program"))
            constants = {n: t for n, t in self.traced.state.items() if n.startswith("_constants.")}
            state = {**torch.load(self.task.state, weights_only=True), **constants}
            save_tensors(state, Path(folder) / "state.pt")
            task = Task(
                str(program.path),
                str(Path(folder) / "state.pt"),
                self.task.batch,
                1,
                self.task.learning_rate,
                "float64",
            )
            outcome = run_simulator(task, plan.ranks, self.timeout)
            if isinstance(outcome, Failure):
                return outcome.verdict is Verdict.REFUTED
            return self._differs(program, outcome)

    def _differs(self, program: OpenedProgram, results: tuple[RankResult, ...]) -> bool:
        losses = [loss for result in results for loss in result.losses if loss is not None]
        if not losses or any(difference(loss, self.reference.losses[0]).relative > BOUND for loss in losses):
            return True
        expected = self.reference.gradients[0]
        scale = family_scale(expected.values())
        parameters, _ = holdings_of([load_role(program.path / file) for file in program.role_files])
        entries = by_rank(results, "gradient")
        for holding in parameters.values():
            found = put_together(holding, entries)
            right = expected.get(holding.name)
            if found.problem or found.unequal or (found.value is None) != (right is None):
                return True
            if right is None or found.value is None:
                continue
            if difference(found.value, right, scale).relative > BOUND:
                return True
        return False
