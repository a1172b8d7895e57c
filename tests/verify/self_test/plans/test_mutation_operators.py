"""Every mutation operator makes mutants: programs that are Python, that differ, and that a seed chooses."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.sampling import every
from verify.self_test.programs.decide_mutant_equivalence import compare_programs
from verify.self_test.programs.judge_mutant import Execution, read_folder, read_statically
from verify.self_test.programs.mutants.catalogue import TEXT_OPERATORS, mutants_of, provable_mutants, text_mutants
from verify.self_test.programs.mutants.compiler_mistakes import GRAPH
from verify.self_test.programs.mutants.cuts_copies_constants import COPIES, FAMILIES, LAYOUT, STATE, state_edits
from verify.self_test.programs.mutants.editable_program_and_edits import (
    MutationOperator,
    RightProgram,
    read_role_source,
)
from verify.self_test.programs.mutants.mutant import STATE_EDITS, Edit, Mutant, apply_edits, edits_between
from verify.self_test.programs.right_programs import TINY, Spec, build

BASES = ("sharded", "staged", "sharded stages", "experts")
SMALL = ("packed", "strided", "uneven", "rested", "cube", "normed", "adapted", "recycled", "stream")


@pytest.fixture(scope="module")
def subjects(execution: Callable[[str], Execution], tmp_path_factory: pytest.TempPathFactory) -> list[RightProgram]:
    """Programs that have, together, something for every operator."""
    dropped = build(Spec("gpt", "dp=2,tp=2", 4, 1, 0.25), tmp_path_factory.mktemp("dropout"))
    small = [build(TINY[name], tmp_path_factory.mktemp("small")).subject for name in SMALL]
    return [*(execution(name).base.subject for name in BASES), dropped.subject, *small]


@pytest.mark.parametrize("operator", TEXT_OPERATORS, ids=lambda o: o.kind)
def test_operator_finds_places(subjects: list[RightProgram], operator: MutationOperator) -> None:
    found = [(subject, edits) for subject in subjects for edits in operator.places(subject)]
    assert found
    for subject, edits in found[:: max(1, len(found) // 20)]:
        changed = apply_edits(subject.program.sources, edits)
        for file, text in changed.items():
            ast.parse(text)
            assert text != subject.program.sources[file]


def test_no_operator_twice() -> None:
    kinds = [o.kind for o in TEXT_OPERATORS] + [kind for _, kind, _ in GRAPH]
    assert len(set(kinds)) == len(kinds)


@pytest.mark.long
def test_seed_chooses(execution: Callable[[str], Execution]) -> None:
    subject = execution("sharded").base.subject

    def edits(seed: int) -> list[str]:
        return [str(e) for m in text_mutants(subject, seed, 1) for e in m.edits]

    assert edits(3) == edits(3)
    assert edits(3) != edits(4)


def test_mutants_of_graph_and_annotations(execution: Callable[[str], Execution]) -> None:
    base = execution("sharded").base
    found = [m for m in mutants_of(base, 0, 1) if m.family in ("communicated graph", "partitioned graph", "annotation")]
    assert {"conversion left out", "splits a frozen identifier", "annotation: mark"} <= {m.kind for m in found}
    for mutant in found:
        assert mutant.edits
        assert all(base.subject.program.sources[file] != text for file, text in mutant.changed.items())
        assert mutant.place.startswith("role_0.py:")


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_reading_refutes_the_family(subjects: list[RightProgram], family: str) -> None:
    """Every mutant of a few programs: of cuts, copies and constants nothing is left to the run."""
    found = [
        (operator.kind, [str(e) for e in edits], apply_edits(subject.program.sources, edits), subject)
        for subject in subjects[-len(SMALL) :]
        for operator in TEXT_OPERATORS
        if operator.family == family
        for edits in operator.places(subject)
    ]
    step = max(1, len(found) // 60)
    alive = [
        (kind, said)
        for kind, said, changed, subject in found[::step]
        if not read_statically({**subject.program.sources, **changed}, subject.program.graph).refuted
    ]
    assert len(found[::step]) > 8 and not alive


@pytest.mark.parametrize("kind", every(2, STATE_EDITS))
def test_other_tensors_in_the_folder(execution: Callable[[str], Execution], tmp_path: Path, kind: str) -> None:
    """They are found by reading, and training from them is not training the model."""
    right = Execution(build(TINY["adapted"], tmp_path), tmp_path)
    base = right.base
    edit = next(e for e in state_edits(base.subject) if e.kind == kind)
    assert str(edit).startswith(f"state.pt: {kind}: `")
    mutant = Mutant("adapted", "dp=2,tp=2", STATE, kind, (), {}, state=edit)
    assert read_folder(base, mutant).codes == ("state_differs",)
    assert not read_folder(base, replace(mutant, state=None)).refuted
    executed = right.judge(base.subject.program.sources, state=edit)
    same_in_float64 = kind == "of another dtype"
    assert executed.answer.refuted or same_in_float64 or not compare_programs(right, {}, edit).same


def test_provable_mutants(execution: Callable[[str], Execution], tmp_path: Path) -> None:
    mutants = list(provable_mutants(build(TINY["cube"], tmp_path), 0, 2))
    assert {m.family for m in mutants} == {LAYOUT, COPIES, STATE}
    assert all(m.model == "cube" and (m.edits or m.state) for m in mutants)
    assert {m.place for m in mutants if m.state} == {"state.pt"}


def test_edits_between_texts() -> None:
    before, after = {"a.py": "one\ntwo\nthree"}, {"a.py": "one\n2\nthree"}
    assert edits_between(before, after) == (Edit("a.py", 2, "two", "2"),)
    assert apply_edits(before, edits_between(before, after)) == after


def test_edits_of_several_lines() -> None:
    sources, edits = {"a.py": "one\ntwo\nthree\nfour"}, (Edit("a.py", 1, "one\ntwo", "1"), Edit("a.py", 4, "four", "4"))
    assert apply_edits(sources, edits) == {"a.py": "1\nthree\n4"}
    assert edits[0].places == {("a.py", 1), ("a.py", 2)}
    with pytest.raises(ValueError, match="2 is not 'two'"):
        apply_edits(sources, (edits[0], Edit("a.py", 2, "two", "2")))


def test_edit_of_another_line_is_refused() -> None:
    with pytest.raises(ValueError, match="is not 'three'"):
        apply_edits({"a.py": "one\ntwo"}, (Edit("a.py", 2, "three", "3"),))


def test_an_order_of_several_lines(tmp_path: Path) -> None:
    """Orders are searched, and longer than a line: all of one is read, and all of it is changed."""
    base = build(TINY["searched"], tmp_path)
    program = base.subject.program
    assert program.plan.orders == tuple(" ".join(role.order) for role in base.subject.roles)
    for role in base.subject.roles:
        assert "\n" in role.written
        assert role.reordered(role.order).after == role.written, "the same order changes nothing"
        turned = apply_edits(program.sources, (role.reordered(role.order[::-1]),))[role.file]
        assert read_role_source(role.file, turned).order == role.order[::-1]


def test_examples_are_needed(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="no example model 'nothing'"):
        build(Spec("nothing", "dp=2", 2), tmp_path)
