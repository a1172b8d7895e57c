"""Slices of tokens in time: right programs are proved from their text, and wrong ones refuted, without a run."""
# ruff: noqa: E501 - a table of cases, one to a line

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache

import pytest

from nnscaler.codegen.compiled_program import Program
from nnscaler.compile import WantedPlan, compile_traced
from nnscaler.ir.operation_annotations import signatures
from nnscaler.planning.named_policies import coshard_steps
from nnscaler.planning.plan_from_axes import make_plan
from nnscaler.transform import apply
from tests.random_plans import SLICED, random_plan
from tests.traced_examples import traced
from verify.programs.typing import check_program


@cache
def program(spec: str, ranks: int = 2) -> Program:
    wanted = WantedPlan(ranks, spec, micro_batches=2)
    return compile_traced(traced("gpt"), wanted, model={"name": "gpt"})


def wrong(found: Program, sources: dict[str, str]) -> list[str]:
    result = check_program(sources, found.graph, "", found.manifest)
    return [f"{f.code}: {f.message}" for o in result.outcomes for f in o.findings]


@pytest.mark.parametrize(
    ("spec", "ranks"), [("pp=2,slices=4", 2), ("pp=2,slices=5:6:5", 2), ("dp=2,tp=2,zero=3,slices=3:5", 4)]
)
def test_right_programs_are_proved(spec: str, ranks: int) -> None:
    found = program(spec, ranks)
    result = check_program(found.sources, found.graph, "", found.manifest)
    assert result.proved, [f.message for o in result.outcomes for f in o.findings]
    assert "append" in result.rows
    assert any(choice.prefix for o in result.obligations for choice in o.choices if hasattr(choice, "prefix"))


@pytest.mark.long
@pytest.mark.parametrize("seed", range(3))
def test_random_plans_in_slices_are_proved(seed: int) -> None:
    found, mesh = traced("gpt"), SLICED[seed % len(SLICED)]
    plan = random_plan(found.graph, signatures(found.graph), mesh, 100 + seed)
    made = compile_traced(found, WantedPlan(plan.ranks, plan), model={"name": "gpt"})
    result = check_program(made.sources, made.graph, "", made.manifest)
    assert result.proved, [f.message for o in result.outcomes for f in o.findings]


APPEND = r'comm\.append\(transpose_1, self\.slice, "transpose_1_v1", dim=2\)'
CASES = [
    ("slices run forward in another order", r"F0\.0\.0 F0\.0\.1", "F0.0.1 F0.0.0", "runs F0.0.1 before F0.0.0: slices run forward"),
    ("slices run backward in forward order", r"B0\.0\.1((?:.|\n)*?)B0\.0\.0", r"B0.0.0\1B0.0.1", "runs B0.0.0 before B0.0.1: slices run backward"),
    ("a slice is left out", r"F0\.1\.3 ", "", "never runs F0.1.3"),
    ("a slice runs backward in halves", r"B0\.0\.3", "I0.0.3 W0.0.3", "runs I0.0.3: a slice adds"),
    ("the cache is not appended to", r"causal_rows\(transpose, transpose_1_v1,", "causal_rows(transpose, transpose_1,", "needs `transpose_1` Prefix(2)"),
    ("rows are given in place of what is before", APPEND, "comm.invariant(transpose_1, self.slice)", "starts from Replicated"),
    ("the adjoint is missing", APPEND, "comm.append(transpose_1.detach(), self.slice, \"transpose_1_v1\", dim=2)", "program_unreadable"),
    ("rows are appended along another dim", APPEND, "comm.append(transpose_1, self.slice, \"transpose_1_v1\", dim=3)", "is told dim=3"),
    ("rows are appended over micro-batches", APPEND, "comm.append(transpose_1, self.micro, \"transpose_1_v1\", dim=2)", "layouts_disagree"),
    ("two tensors are kept under one name", r'"transpose_2_v1"', '"transpose_1_v1"', "where others are kept"),
    ("queries do not know their places", r"4 \* self\.slice\.index, None", "0, None", "`first` is 0"),
    ("queries count from another place", r"4 \* self\.slice\.index, None", "2 * self.slice.index, None", "`first` is"),
    ("positions are those of the first slice", r"comm\.shard_replicated\(embedding_1, self\.slice, dim=0\)", "embedding_1[0:4]", "program_unreadable"),
    ("positions are cut by another axis", r"embedding_1, self\.slice, dim=0", "embedding_1, self.micro, dim=0", "layouts_disagree"),
    ("tokens are cut as samples are", r'"ids": Input\("ids", \{"slice": Sharded\(1\), ', '"ids": Input("ids", {"slice": Sharded(0), ', ""),
    ("there are fewer slices", r"slices = 4", "slices = 2", "micro-batches"),
]  # fmt: skip


@pytest.mark.parametrize(("what", "pattern", "instead", "told"), CASES, ids=[c[0] for c in CASES])
def test_wrong_programs_are_refuted(what: str, pattern: str, instead: str, told: str) -> None:
    found = program("pp=2,slices=4")
    changed, count = re.subn(pattern, instead, found.sources["role_0.py"], count=1)
    assert count == 1, what
    findings = wrong(found, {**found.sources, "role_0.py": changed})
    assert findings and any(told in text for text in findings), findings


def test_unequal_slices_are_not_other_unequal_ones() -> None:
    found = program("pp=2,slices=5:6:5")
    text = found.sources["role_0.py"]
    for pattern, instead in (
        (r'"transpose_1_v1", dim=2, sizes=\(5, 6, 5\)', '"transpose_1_v1", dim=2, sizes=(6, 5, 5)'),
        (r"\(0, 5, 11\)\[self\.slice\.index\]", "(0, 6, 11)[self.slice.index]"),
        (r'"slice": Sharded\(1, sizes=\(5, 6, 5\)\)', '"slice": Sharded(1, sizes=(6, 5, 5))'),
    ):
        changed, count = re.subn(pattern, instead, text, count=1)
        assert count == 1, pattern
        assert wrong(found, {**found.sources, "role_0.py": changed}), pattern


def test_pieces_keep_no_rows_for_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler refuses a region in pieces beside slices; its text is refuted all the same."""
    monkeypatch.setattr(apply, "_check_slices", lambda plan: None)
    found = traced("gpt")
    known = signatures(found.graph)
    plan = make_plan(found.graph, known, {"pp": 1}, micro_batches=2, slices=(1, 1))
    steps = (*plan.steps, *coshard_steps(found.graph, known, plan, 2))
    made = compile_traced(found, WantedPlan(1, replace(plan, steps=steps)), model={"name": "gpt"})
    assert any("in a region that runs in pieces" in text for text in wrong(made, made.sources))
