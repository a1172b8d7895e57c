"""Programs of the small model, run on the simulator as a caller of the level runs them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from nnscaler.compile import parallelize
from nnscaler.ir.graph import Graph
from nnscaler.runtime.communication.communicator import Communicator
from nnscaler.runtime.communication.simulator import Simulator
from nnscaler.runtime.program.import_role_and_user_files import load_role
from nnscaler.runtime.training.executor import RankExecutor
from nnscaler.runtime.training.executor_settings import ExecutorSettings
from nnscaler.tracing.sample_inputs import SampleInputs, flatten_inputs
from verify.programs.checks.assemble_logical_tensors import holdings_of
from verify.programs.checks.input_and_outcome import CheckOutcome, Comparison
from verify.programs.eager_reference import Trajectory, logical_state, names_of, randomise_parameters, run_reference
from verify.programs.execution.record_rank_steps import Entry, RankResult, role_file
from verify.programs.low_precision import NoiseRow, low_precision_outcomes
from verify.programs.opened_program import OpenedProgram, open_program
from verify.results.float64_tolerance import Tolerance


@dataclass(frozen=True)
class Case:
    """A model with random parameters and a program of it; also the request (`seed`), and who is told (`progress`)."""

    model: nn.Module
    sample: SampleInputs
    program: OpenedProgram
    graph: Graph
    reference: Trajectory
    seed: int = 0

    def progress(self, phase: str, seconds: float, text: str) -> None:
        assert phase == "low precision" and seconds >= 0 and "draws" in text

    def edited(self, old: str, new: str) -> Case:
        """With another text in every role that has it."""
        found = False
        for file in self.program.role_files:
            path = self.program.path / file
            source = path.read_text()
            found |= old in source
            path.write_text(source.replace(old, new))
        assert found, f"no role has {old}"
        return replace(self, program=open_program(self.program.path))

    def run(self, precision: str | None, loss_scale: float) -> Comparison:
        state = {**self.program.state(), **logical_state(self.model)}

        def rank(communicator: Communicator) -> RankResult:
            return _train(self, communicator, state, precision, loss_scale)

        results = Simulator(self.program.ranks).run(rank)
        parameters, buffers = holdings_of(load_role(self.program.path / f) for f in self.program.role_files)
        names, steps = names_of(self.model), len(self.reference.losses)
        return Comparison(self.reference, tuple(results), parameters, buffers, names, {}, Tolerance(), steps)

    def outcomes(self, *dtypes: str) -> tuple[list[CheckOutcome], tuple[NoiseRow, ...]]:
        return low_precision_outcomes(self.seed, self, self.reference, dtypes, self.run, self.progress)


def _train(
    case: Case, communicator: Communicator, state: Mapping[str, Tensor], precision: str | None, scale: float
) -> RankResult:
    module = load_role(role_file(case.program.path, communicator.rank))
    settings = ExecutorSettings(precision=precision, dropout=False, loss_scale=scale)
    executor = RankExecutor(module, communicator.rank, communicator, state, settings)

    def entries(kind: str) -> tuple[Entry, ...]:
        found = executor.local_tensors(kind)
        return tuple((s, a, n, None if t is None else t.detach().clone()) for s, a, n, t in found)

    losses, gradients = [], []
    for _ in case.reference.losses:
        executor.zero_grad()
        losses.append(executor.step(dict(case.sample.tensors)))
        gradients.append(entries("gradient"))
        with torch.no_grad():
            for parameter in {id(p): p for p in executor.parameters.values()}.values():
                if parameter.grad is not None:
                    parameter.add_(parameter.grad.to(parameter.dtype), alpha=-case.reference.learning_rate)
    return RankResult(communicator.rank, tuple(losses), tuple(gradients), entries("parameter"), entries("buffer"))


def make_case(
    model: nn.Module, inputs: Mapping[str, Tensor], folder: Path, *, ranks: int, plan: str, micro_batches: int = 1
) -> Case:
    randomise_parameters(model, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = parallelize(model, inputs, ranks=ranks, plan=plan, micro_batches=micro_batches)
    sample = flatten_inputs(model, inputs)
    reference = run_reference(model, sample, steps=2)
    return Case(model, sample, open_program(program.save(folder)), program.graph, reference)


@pytest.fixture
def case(tiny: Callable[[], nn.Module], batch: dict[str, Tensor], tmp_path: Path) -> Case:
    """Tiny on 6 ranks: dp=3, tp=2, 2 micro-batches."""
    return make_case(tiny(), batch, tmp_path / "program", ranks=6, plan="dp=3,tp=2", micro_batches=2)
