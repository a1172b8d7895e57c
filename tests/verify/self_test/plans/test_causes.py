"""The cause that a finding names is the mechanism that was planted."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from nnscaler.runtime.communication.communicator import Communicator
from nnscaler.runtime.stage_base_class import Stage
from nnscaler.runtime.training import executor
from nnscaler.runtime.training.gradients import gradient_norm_and_clipping as clipping
from verify.programs.typing import check_program
from verify.results.finding import Finding
from verify.self_test.programs.judge_mutant import Execution
from verify.self_test.programs.mutants.runtime_faults import dummy_reduced, early_reducer
from verify.self_test.programs.right_programs import BASES, build

Get = Callable[[str], Execution]
Patch = Callable[[], AbstractContextManager[None]]


def _own_norm(stages: Sequence[Stage], _: Communicator, norm_type: float = 2.0) -> Tensor:
    own = [torch.linalg.vector_norm(g, norm_type, dtype=torch.float64) for g in clipping._counted(stages)]
    return torch.stack(own).norm() if own else torch.zeros((), dtype=torch.float64)


def _half_clipped(stages: Sequence[Stage], norm: Tensor, max_norm: float) -> None:
    clipping.clip_gradients(stages, norm * 2, max_norm)


def _unclipped(*_: object) -> None: ...


FAULTS: dict[str, tuple[Patch, str, str]] = {
    "norm of the own gradients": (
        lambda: patch.object(executor, "gradient_norm", _own_norm),
        "gradient_norm_differs",
        "each rank has the norm of its own gradients: their squares are not summed over the ranks",
    ),
    "clipping that does nothing": (
        lambda: patch.object(executor, "clip_gradients", _unclipped),
        "parameter_differs",
        "the gradients of the last step are not clipped",
    ),
    "clipping to half of the norm": (
        lambda: patch.object(executor, "clip_gradients", _half_clipped),
        "parameter_differs",
        "are clipped wrongly: they are scaled by",
    ),
    "a sum that nobody waits for": (
        dummy_reduced("blocks.0.up"),
        "gradient_differs",
        "has only its own part: the sum over ranks [0, 1] is missing, or nobody waits for it",
    ),
    "a sum that starts too early": (
        early_reducer("blocks.0.up.weight"),
        "gradient_differs",
        "it misses micro-batch 3: the sum over ranks does not wait for the last backward",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.long
def test_a_fault_of_the_runtime_is_named(name: str, execution: Get) -> None:
    fault, code, cause = FAULTS[name]
    right = execution("staged")
    answer = right.judge(right.base.subject.program.sources, fault, localised=True).answer
    assert answer.refuted and answer.codes[0] == code, answer.said
    assert cause in answer.said.partition(" | ")[0], answer.said


def findings(found: Execution, role: int, pattern: str, new: str) -> list[Finding]:
    program = found.base.subject.program
    file = f"role_{role}.py"
    changed, times = re.subn(pattern, new, program.sources[file], count=1, flags=re.MULTILINE)
    assert times == 1
    result = check_program({**program.sources, file: changed}, program.graph)
    return [f for outcome in result.outcomes for f in outcome.findings]


@pytest.mark.long
def test_a_line_that_cannot_be_read_is_all_that_is_said(execution: Get) -> None:
    """The results that the line would have made are not reported as missing."""
    for role in (0, 1):
        found = findings(execution("staged"), role, r"^( +)(linear\w* = )aten.linear\(.*$", r"\1\2{'a': 1}['a']")
        assert [f.code for f in found] == ["program_unreadable"], [f.message for f in found]
    found = findings(execution("sharded"), 0, r"^( +)linear = (.*)$", r"\1for linear in [\2]:\n\1    pass")
    assert [f.code for f in found] == ["program_unreadable"], [f.message for f in found]


def test_a_role_that_cannot_be_read_is_all_that_is_said(execution: Get) -> None:
    found = findings(execution("staged"), 0, r"^    axes = .*$", "    axes = 3")
    assert [f.code for f in found] == ["program_unreadable"], [f.message for f in found]


def test_a_name_that_nothing_makes_is_still_told(execution: Get) -> None:
    found = findings(execution("sharded"), 0, r"aten\.gelu\(linear_2\)", "aten.gelu(linear_none)")
    assert [f.message for f in found] == ["`linear_none` is read before it is made"]


@pytest.mark.parametrize("role", [0, 1])
def test_the_order_of_axes_is_named(role: int, tmp_path: Path) -> None:
    base = build(replace(BASES["sharded"], plan="dp=2,tp=2,pp=2", ranks=8, micro_batches=2), tmp_path)
    program = base.subject.program
    file, old, new = f"role_{role}.py", 'axes = {"dp": 2, "tp": 2}', 'axes = {"tp": 2, "dp": 2}'
    assert old in program.sources[file]
    changed = {**program.sources, file: program.sources[file].replace(old, new)}
    found = [f for o in check_program(changed, program.graph).outcomes for f in o.findings]
    assert found
    for finding in found:
        assert "stages 0 and 1 name the axes of their meshes in different orders" in str(finding.cause)
    both = {name: text.replace(old, new) for name, text in program.sources.items()}
    assert check_program(both, program.graph).proved  # a mesh with its axes in another order is a mesh


def test_casts(execution: Get) -> None:
    """To the same dtype nothing happens, and a cast that nobody reads rounds nothing."""
    gelu = r"^( +)(gelu = .*)$"
    right = execution("sharded")
    assert not findings(right, 0, gelu, r"\1\2\n\1gelu = aten.to.dtype(gelu, dtypes.float32)")
    assert not findings(right, 0, gelu, r"\1\2\n\1unused = aten.to.dtype(gelu, dtypes.float16)")
    wide = findings(right, 0, gelu, r"\1\2\n\1gelu = aten.to.dtype(gelu, dtypes.float64)")
    assert [f.code for f in wide] == ["operation_differs"]
    for dtype in ("float16", "bfloat16"):
        found = findings(right, 0, gelu, rf"\1\2\n\1gelu = aten.to.dtype(gelu, dtypes.{dtype})")
        assert [f.code for f in found] == ["precision_lost"]
        assert f"rounds `gelu` from float32 to {dtype}" in found[0].message
