"""Decide whether a mutant that nothing refutes computes the same as the right program.

Neither the model nor the checks are asked: the right program and the mutant run side by side, from other parameters
and with the batch in another order, once in float64 and once in the dtypes that the program says, with random numbers
on. Everything that both assign is compared bit by bit, and so is its gradient.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from nnscaler.manifest import read_manifest
from nnscaler.runtime.communication.communicator import Communicator
from nnscaler.runtime.communication.simulator import Simulator
from nnscaler.runtime.program.import_role_and_user_files import load_role
from nnscaler.runtime.tensor_bits_and_differences import difference
from nnscaler.runtime.training.executor import RankExecutor
from nnscaler.runtime.training.executor_settings import ExecutorSettings
from verify.programs.execution.record_rank_steps import role_file
from verify.self_test.programs.judge_mutant import Execution
from verify.self_test.programs.mutants.mutant import StateEdit

RUNS = ((11, "float64"), (12, None))  # (seed, precision)
ROUNDING = 1e-11
State = dict[str, Tensor]
Key = tuple[object, ...]


@dataclass(frozen=True)
class OracleAnswer:
    """`same` everything: `reason` says how far the comparison went; else the first thing that differs."""

    same: bool
    reason: str


@dataclass
class _Seen:
    """Everything that a run computes, by rank and name."""

    results: dict[Key, Tensor | None] = field(default_factory=dict)
    variables: dict[Key, Tensor] = field(default_factory=dict)


def compare_programs(execution: Execution, wrong: Mapping[str, str], edit: StateEdit | None = None) -> OracleAnswer:
    """Run both programs.

    A mutant that raises where the right program does not is not the same. `edit`: what the mutant has changed in the
    tensors that it starts from.
    """
    subject = execution.base.subject
    right_path = execution.write(subject.program.sources)
    wrong_path = execution.write(wrong)
    variables = 0
    differing: set[str] = set()
    for seed, precision in RUNS:
        state, batch = _state(execution, seed), _batch(execution, seed)
        right = _run(right_path, subject.program.plan.ranks, state, batch, precision)
        try:
            other = state if edit is None else edit.apply(state)
            found = _run(wrong_path, subject.program.plan.ranks, other, batch, precision)
        except Exception as error:  # noqa: BLE001 - whatever it raises, the right program does not
            return OracleAnswer(False, f"raises {type(error).__name__}: {str(error)[:120]}")
        tolerance = ROUNDING if precision == "float64" else 0.0
        problem = _unequal(right.results, found.results, tolerance)
        if problem:
            return OracleAnswer(False, f"seed {seed}, {precision or 'as written'}: {problem}")
        common = right.variables.keys() & found.variables.keys()
        variables += len(common)
        differing |= {str(k[-1]) for k in common if _differ(right.variables[k], found.variables[k], 0.0)}
    if differing:
        return OracleAnswer(True, f"same results from other values of {', '.join(sorted(differing)[:4])}")
    return OracleAnswer(True, f"{variables} values and gradients are bitwise the same on {len(RUNS)} more seeds")


def _state(execution: Execution, seed: int) -> State:
    """Parameters that nobody has seen; buffers and integers as they are."""
    generator = torch.Generator().manual_seed(seed)
    state: State = torch.load(execution.task.state, weights_only=True)
    moved: dict[int, Tensor] = {}
    trained = {name for name, _ in execution.base.prepared.model.named_parameters(remove_duplicate=False)}
    for name, tensor in state.items():
        if name in trained and tensor.is_floating_point() and tensor.data_ptr() not in moved:
            noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
            moved[tensor.data_ptr()] = (tensor.double() + 0.2 * noise * tensor.double().std(correction=0)).to(tensor)
    return {n: moved.get(t.data_ptr(), t) if n in trained else t for n, t in state.items()}


def _batch(execution: Execution, seed: int) -> State:
    """Return the samples of the batch in another order."""
    batch: State = torch.load(execution.task.batch, weights_only=True)
    count = max(len(t) for t in batch.values() if t.dim())
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    return {name: t[order] if t.dim() and len(t) == count else t for name, t in batch.items()}


def _run(path: Path, ranks: int, state: State, batch: State, precision: str | None) -> _Seen:
    seen = _Seen()
    Simulator(ranks).run(_rank(path, seen, state, batch, precision))
    return seen


def _rank(path: Path, seen: _Seen, state: State, batch: State, precision: str | None) -> Callable[[Communicator], None]:
    building = threading.Lock()  # observation parses the text, and `ast` is not safe in several threads at once
    modules = {file: load_role(file) for file in {role_file(path, r) for r in _ranks(path)}}

    def work(communicator: Communicator) -> None:
        rank = communicator.rank

        def observe(stage: int, micro: int, phase: str, name: str, tensor: Tensor) -> None:
            seen.variables[rank, stage, micro, phase, name] = tensor.detach().clone()

        with building:
            executor = RankExecutor(
                modules[role_file(path, rank)],
                rank,
                communicator,
                state,
                ExecutorSettings(precision=precision, seed=5),
                observe=observe,
            )
        loss = executor.step(batch)
        seen.results[rank, "loss"] = None if loss is None else loss.clone()
        for kind in ("gradient", "buffer", "parameter"):
            for stage, _, name, tensor in executor.local_tensors(kind):
                seen.results[rank, stage, kind, name] = None if tensor is None else tensor.clone()

    return work


def _ranks(path: Path) -> list[int]:
    return [rank for role in read_manifest(path).roles for rank in role.ranks]


def _unequal(right: Mapping[Key, Tensor | None], found: Mapping[Key, Tensor | None], tolerance: float) -> str:
    if right.keys() != found.keys():
        return f"other tensors: {sorted(map(str, right.keys() ^ found.keys()))[:3]}"
    for key, expected in right.items():
        actual = found[key]
        if (expected is None) != (actual is None):
            return f"{key} is missing on one side"
        if expected is not None and actual is not None and _differ(expected, actual, tolerance):
            return f"{key} differs by {difference(actual, expected).relative:.2g}"
    return ""


def _differ(one: Tensor, two: Tensor, tolerance: float) -> bool:
    if one.shape != two.shape or one.dtype != two.dtype:
        return True
    if torch.equal(one, two):
        return False
    return tolerance == 0.0 or difference(two, one).relative > tolerance
