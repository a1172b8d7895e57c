"""Layers that run several times, the last time alone with a gradient: every mistake is refuted, and by reading."""

from __future__ import annotations

import pytest

from tests.sampling import every
from verify.self_test.programs.judge_mutant import Execution, read_statically
from verify.self_test.programs.mutants.catalogue import TEXT_OPERATORS
from verify.self_test.programs.mutants.mutant import apply_edits
from verify.self_test.programs.right_programs import TINY, build

KINDS = (
    "a backward dropped on one stage",
    "last backward dropped",
    "gradient not sent back",
    "gradient where there is none",
    "sent on as it was received",
)


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Execution]:
    folders = {name: tmp_path_factory.mktemp("recycled") for name in ("recycled", "recycled, dp")}
    return {name: Execution(build(TINY[name], folder), folder, apart=False) for name, folder in folders.items()}


@pytest.mark.parametrize("kind", every(2, KINDS))
def test_mistake_is_refuted_by_reading_and_by_running(programs: dict[str, Execution], kind: str) -> None:
    right = programs["recycled"]
    subject = right.base.subject
    places = next(o for o in TEXT_OPERATORS if o.kind == kind).places(subject)
    assert places
    for edits in places:
        changed = {**subject.program.sources, **apply_edits(subject.program.sources, edits)}
        assert read_statically(changed, subject.program.graph).refuted, edits
        assert right.judge(changed).answer.refuted, edits


def test_gradient_that_flows_into_the_runs_without_one_is_refuted(programs: dict[str, Execution]) -> None:
    right = programs["recycled, dp"]
    sources = right.base.subject.program.sources
    changed = {
        file: text.replace("with torch.no_grad():", "with torch.enable_grad():") for file, text in sources.items()
    }
    assert changed != dict(sources)
    assert read_statically(changed, right.base.subject.program.graph).refuted
    assert "gradient_differs" in right.judge(changed).answer.codes


def with_gradient(text: str) -> str:
    return text.replace(", needs_grad=False", "")


def test_gradients_of_zeros_are_refuted_where_no_backward_sends_them(programs: dict[str, Execution]) -> None:
    """Both sides of `linear@2` agree that its gradient comes back; stage 2 runs no backward."""
    subject = programs["recycled"].base.subject
    lines = {file: text.split("\n") for file, text in subject.program.sources.items()}
    changed = {
        file: "\n".join(with_gradient(line) if '"linear@2"' in line else line for line in found)
        for file, found in lines.items()
    }
    assert changed != dict(subject.program.sources)
    found = read_statically(changed, subject.program.graph)
    assert found.refuted and "gradient_reduced_wrongly" in found.codes, found.said


def test_only_the_last_run_goes_backward(programs: dict[str, Execution]) -> None:
    text = "\n".join(programs["recycled"].base.subject.program.sources.values())
    assert [stage for stage in range(6) if f"B{stage}." in text] == [4, 5]
    assert text.count("needs_grad=False") == 2 * 5 and '"add_7@5", 5, peers=(1,)),' in text
