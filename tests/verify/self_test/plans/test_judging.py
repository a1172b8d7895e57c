"""Judgements of the levels and of the third oracle on programs that are right, wrong, and equal in another text."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest

from verify.self_test.programs.decide_mutant_equivalence import compare_programs
from verify.self_test.programs.judge_mutant import Execution, read_statically
from verify.self_test.programs.judge_mutants_and_known_bugs import JudgedMutant
from verify.self_test.programs.mutants.catalogue import text_mutants

Get = Callable[[str], Execution]


def _changed(execution: Execution, old: str, new: str, role: int = 0) -> dict[str, str]:
    sources = dict(execution.base.subject.program.sources)
    assert old in sources[f"role_{role}.py"]
    sources[f"role_{role}.py"] = sources[f"role_{role}.py"].replace(old, new, 1)
    return sources


@pytest.mark.long
@pytest.mark.parametrize("name", ["sharded", "staged", "losses"])
def test_right_program(execution: Get, name: str) -> None:
    right = execution(name)
    program = right.base.subject.program
    static = read_statically(program.sources, program.graph)
    running = right.judge(program.sources)
    assert (static.refuted, static.undecided) == (False, False), static.said
    assert (running.answer.refuted, running.answer.undecided) == (False, False), running.answer.said
    assert not running.first_loss and not running.losses
    assert compare_programs(right, program.sources).same


@pytest.mark.long
def test_wrong_value(execution: Get) -> None:
    wrong = _changed(execution("sharded"), "comm.all_reduce(linear_3, self.tp)", "linear_3")
    assert read_statically(wrong, execution("sharded").base.traced.graph).refuted
    running = execution("sharded").judge(wrong)
    assert running.answer.refuted and running.first_loss and running.losses


@pytest.mark.long
def test_wrong_gradient_leaves_the_first_loss(execution: Get) -> None:
    wrong = _changed(execution("sharded"), "comm.replicate(layer_norm_1, self.tp)", "layer_norm_1")
    running = execution("sharded").judge(wrong)
    assert running.answer.refuted and running.losses and not running.first_loss


def test_program_that_raises(execution: Get) -> None:
    running = execution("sharded").judge(_changed(execution("sharded"), "aten.gelu(linear_2)", "aten.gelu(nothing)"))
    assert running.answer.refuted and running.answer.codes == ("rank_raises",) and running.first_loss


@pytest.mark.long
@pytest.mark.apart
def test_program_that_kills_its_process(execution: Get) -> None:
    killed = "[__import__('os').abort(), aten.gelu(linear_2)][1]"
    running = execution("sharded").judge(_changed(execution("sharded"), "aten.gelu(linear_2)", killed))
    assert running.answer.refuted and running.answer.codes == ("rank_died",) and running.first_loss


def test_program_that_hangs(execution: Get) -> None:
    right = execution("staged")
    schedule = right.base.subject.roles[1]
    wrong = _changed(right, " ".join(schedule.order), " ".join(schedule.order[:-1]), 1)
    running = right.judge(wrong, nullcontext)
    assert running.answer.refuted, running.answer


@pytest.mark.long
def test_third_oracle_finds_the_same(execution: Get) -> None:
    same = _changed(execution("sharded"), "aten.gelu(linear_2)", "aten.gelu(linear_2.clone())")
    told = compare_programs(execution("sharded"), same)
    assert told.same and "bitwise the same" in told.reason


def test_third_oracle_finds_a_difference(execution: Get) -> None:
    other = _changed(execution("sharded"), "aten.gelu(linear_2)", "aten.gelu(linear_2 * 1.0000001)")
    told = compare_programs(execution("sharded"), other)
    assert not told.same and "differs by" in told.reason


def test_third_oracle_runs_the_dtypes_of_the_text(execution: Get) -> None:
    """In float64 there is nothing to see."""
    low = _changed(execution("adapted"), '"lora_a", (3, 16), "float32"', '"lora_a", (3, 16), "bfloat16"')
    assert not execution("adapted").judge(low).answer.refuted
    assert not compare_programs(execution("adapted"), low).same


@pytest.mark.long
def test_levels_of_a_mutant(execution: Get) -> None:
    right = execution("sharded")
    mutant = next(m for m in text_mutants(right.base.subject, 0, 1) if m.kind == "drop collective")
    sources = mutant.sources(right.base.subject.program.sources)
    static, executed = read_statically(sources, right.base.traced.graph), right.judge(sources)
    assert JudgedMutant(mutant, static, executed).first == "L0"
    assert JudgedMutant(mutant, None, executed).first == "L2"
    assert JudgedMutant(mutant, static, None).killed
    assert JudgedMutant(mutant, None, None).first == ""
