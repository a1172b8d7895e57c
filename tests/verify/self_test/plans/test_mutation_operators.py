"""Every mutation operator makes mutants: programs that are Python, that differ, and that a seed chooses."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path

import pytest

from verify.self_test.plans.catalogue import TEXT_OPERATORS, mutants_of, text_mutants
from verify.self_test.plans.judge import Execution
from verify.self_test.plans.mutant import Edit, apply_edits, edits_between
from verify.self_test.plans.mutants_graph import GRAPH
from verify.self_test.plans.operator import MutationOperator
from verify.self_test.plans.role_source import Subject
from verify.self_test.plans.subjects import Spec, build

BASES = ("sharded", "staged", "sharded stages", "experts")


@pytest.fixture(scope="module")
def subjects(execution: Callable[[str], Execution], tmp_path_factory: pytest.TempPathFactory) -> list[Subject]:
    """Programs that have, together, something for every operator."""
    dropped = build(Spec("gpt", "dp=2,tp=2", 4, 1, 0.25), tmp_path_factory.mktemp("dropout"))
    return [*(execution(name).base.subject for name in BASES), dropped.subject]


@pytest.mark.parametrize("operator", TEXT_OPERATORS, ids=lambda o: o.kind)
def test_operator_finds_places(subjects: list[Subject], operator: MutationOperator) -> None:
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


def test_edits_between_texts() -> None:
    before, after = {"a.py": "one\ntwo\nthree"}, {"a.py": "one\n2\nthree"}
    assert edits_between(before, after) == (Edit("a.py", 2, "two", "2"),)
    assert apply_edits(before, edits_between(before, after)) == after


def test_edit_of_another_line_is_refused() -> None:
    with pytest.raises(ValueError, match="is not 'three'"):
        apply_edits({"a.py": "one\ntwo"}, (Edit("a.py", 2, "three", "3"),))


def test_examples_are_needed(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="no example model 'nothing'"):
        build(Spec("nothing", "dp=2", 2), tmp_path)
