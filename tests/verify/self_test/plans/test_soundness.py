"""Random edits of small programs: what is proved agrees with the model, and a wrong prover is found out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random
from typing import Any

import pytest

from nnscaler.cli.main import main
from nnscaler.ir import derive_operand_layouts
from tests.sampling import every
from verify.child_processes import Died
from verify.self_test.programs.judge_mutant import Execution, read_statically
from verify.self_test.programs.right_programs import TINY, build
from verify.self_test.programs.soundness.declaration_edits import DECLARED
from verify.self_test.programs.soundness.fuzz import (
    ASKED,
    INCONCLUSIVE,
    PROVED,
    REFUTED,
    VIOLATION,
    EditTally,
    Fuzz,
    Violation,
)
from verify.self_test.programs.soundness.line_edits import LINES, SAME
from verify.self_test.programs.soundness.program_under_random_edits import Draft
from verify.self_test.programs.soundness.run import (
    Job,
    Soundness,
    _without,
    run_soundness,
    save,
    soundness_lines,
)

Get = Callable[[str], Execution]
KINDS = {**DECLARED, **LINES}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Get:
    """The right program of this name."""
    known: dict[str, Execution] = {}

    def get(name: str) -> Execution:
        if name not in known:
            folder = tmp_path_factory.mktemp("tiny")
            known[name] = Execution(build(TINY[name], folder), folder, apart=False)
        return known[name]

    return get


def _draft(execution: Execution) -> Draft:
    return Draft(execution.base.subject, dict(execution.base.subject.program.sources))


@pytest.mark.parametrize("name", every(4, TINY))
def test_right_program_is_proved_and_agrees(tiny: Get, name: str) -> None:
    program = tiny(name).base.subject.program
    static = read_statically(program.sources, program.graph)
    assert (static.refuted, static.undecided) == (False, False), static.said
    answer = tiny(name).judge(program.sources).answer
    assert (answer.refuted, answer.undecided) == (False, False), answer.said


def test_programs_say_everything_that_one_can() -> None:
    """An edit cannot get wrong what no program has."""
    assert len(TINY) >= 20
    assert {base.ranks for base in TINY.values()} >= {2, 3, 4, 8}
    plans = " ".join(base.plan for base in TINY.values())
    assert all(word in plans for word in ("dp=3", "tp=3", "pp=2", "zero=3", "dp=2,tp=2,pp=2"))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("packed", ["sections=(8, 4, 4)"]),
        ("strided", ["outer=2"]),
        ("uneven", ["sizes=(3, 2, 2)"]),
        ("rested", ["comm.all_gather_replicated", "sizes=(4, 3)"]),
        ("cube", ["copies=((0, 1, 2, 3), (4, 5, 6, 7))", "micro_batches = 2", 'reduce=("dp",)']),
        ("unlike", ["Exchange("]),
        ("normed", ["Buffer(", "updates = "]),
        ("adapted", ["Constant(", "frozen = "]),
        ("dropped", ["ops.dropout"]),
        ("turned", ["user.self_test_turn"]),
        ("recomputed", ["recompute(recompute_0"]),
        ("averaged", ["def prepare("]),
        ("interlaced", ["of which 0, 3 with other ranks", "ranks = (0, 2, 1, 3)"]),
        ("sliced", ["comm.append(", "slices = 2", "B0.0.1"]),
    ],
)
def test_program_has_its_mechanism(tiny: Get, name: str, words: list[str]) -> None:
    text = "\n".join(tiny(name).base.subject.program.sources.values())
    assert [w for w in words if w not in text] == []


@pytest.mark.parametrize("kind", [k for k in KINDS if k != ASKED])
def test_every_kind_of_edit_changes_programs(tiny: Get, kind: str) -> None:
    changed = 0
    for name in ("cube", "packed", "unlike", "layers", "sliced", "searched"):
        draft = _draft(tiny(name))
        for seed in range(25):
            edits = KINDS[kind](draft, Random(seed)) or ()
            changed += bool(edits) and draft.changed(edits) != draft.sources
    assert changed > 10


@pytest.mark.parametrize("kind", [k for k in SAME if k != "by keyword"])
def test_the_same_in_other_words_is_not_refuted(tiny: Get, kind: str) -> None:
    """Names, order of declarations, comments and unused lines are no part of what a program means."""
    draft, proved = _draft(tiny("layers")), 0
    for seed in range(12):
        edits = KINDS[kind](draft, Random(seed)) or ()
        if edits:
            answer = read_statically(draft.changed(edits), tiny("layers").base.traced.graph)
            proved += not answer.refuted and not answer.undecided
    assert proved >= 6


@pytest.mark.long
def test_seed_chooses(tiny: Get) -> None:
    def tried(seed: int) -> Mapping[tuple[str, str], int]:
        return Fuzz("layers", tiny("layers"), Random(seed), 12, False).work().ends

    assert tried(1) == tried(1) != tried(2)


@pytest.mark.long  # `test_command` makes fewer edits
@pytest.mark.apart
def test_slice(tmp_path: Path) -> None:
    """Some of the twenty thousand."""
    said: list[str] = []
    found = run_soundness(said.append, count=160, seed=3, names=("shuffled", "tied"), processes=1, out=tmp_path / "out")
    assert found.good, soundness_lines(found)[-1].text
    tally = found.tally
    assert (tally.tried, sum(tally.total.values())) == (160, 160)
    assert tally.guided > 0 and tally.total[PROVED] > 2 and tally.total[REFUTED] > 50
    assert said[-1].startswith("160 of 160: ")
    assert not (tmp_path / "out").exists()


def _half_said_sections(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plant a defect that the rules once had: sections are legal where the dim becomes a factor of another one, and
    what cannot be said of the result is taken for whole."""
    cut, legal = derive_operand_layouts.shard_of, derive_operand_layouts.splittable

    def shard_of(*given: Any) -> Any:
        _, operand, identifier, _, _, sections = given
        dims = (dim.factors for dim in operand.dims)
        whole = any([f.identifier for f in factors] == [identifier] for factors in dims)
        return cut(*given) if whole or not sections else None

    def splittable(bound: Any, identifier: str, parts: int, outer: int, sizes: Any, sections: Any, *more: Any) -> Any:
        return legal(bound, identifier, 1, 1) if sections else legal(bound, identifier, parts, outer, sizes, (), *more)

    monkeypatch.setattr(derive_operand_layouts, "shard_of", shard_of)
    monkeypatch.setattr(derive_operand_layouts, "splittable", splittable)


def test_search_finds_a_wrong_rule(tiny: Get, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three edits have to fit each other: how the input is cut, over what the gradient is summed, and what is said of
    the loss. The search meets them in some hundred tries; four thousand are its limit here."""
    right = tiny("shuffled")
    with monkeypatch.context() as patch:
        _half_said_sections(patch)
        searches = (Fuzz("shuffled", right, Random(seed), 500, True).work() for seed in range(4, 12))
        found = next((search.violations[0] for search in searches if search.violations), None)
        assert found is not None, "the search does not find what is planted"
        assert read_statically(found.sources, right.base.traced.graph).refuted is False
    assert "sections=" in found.sources["role_0.py"] and len(found.steps) > 2
    assert read_statically(found.sources, right.base.traced.graph).refuted


def test_an_edited_program_that_ends_its_process_is_left_out_of_the_next_try() -> None:
    job = Job("layers", 3, 200, True, frozenset({4}))
    assert _without(job, Died(0, 6, "17")).fatal == {4, 17}
    with pytest.raises(RuntimeError, match="ended outside of a run: killed by SIGABRT"):
        _without(job, Died(0, 6, ""))
    with pytest.raises(RuntimeError, match="outside of a run"):
        _without(job, Died(0, 6, "4"))


def test_a_proved_program_that_ends_its_process_is_a_violation(tiny: Get, monkeypatch: pytest.MonkeyPatch) -> None:
    def work(fatal: frozenset[int]) -> EditTally:
        return Fuzz("shuffled", tiny("shuffled"), Random(5), 20, False, fatal).work()

    right = work(frozenset())
    assert right.total[PROVED] > 0
    dead = work(frozenset(range(30)))
    assert dead.total[VIOLATION] > 0 and dead.runs == 0
    assert dead.violations[0].said == "rank_died: it ends the process that runs it"


def test_violation_is_saved_as_a_program(tiny: Get, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sources = dict(tiny("shuffled").base.subject.program.sources)
    sources["role_0.py"] = sources["role_0.py"].replace("mul, 2)", "mul, 1)")
    path = save(Violation("shuffled", ("number",), sources, "loss_differs: it differs"), tiny("shuffled"), tmp_path)
    assert "number" in (path / "README.txt").read_text() and "loss_differs" in (path / "README.txt").read_text()
    command = ["verify-plan", str(path / "model.py"), "--program", str(path), "--level", "static", "-q"]
    assert main(command) == 1
    assert "role_0.py" in capsys.readouterr().out


def test_what_is_not_good() -> None:
    good = EditTally(tried=2)
    good.total.update({PROVED: 1, REFUTED: 1})
    assert Soundness(2, 0, good).good
    assert not Soundness(3, 0, good).good, "not all were tried"
    wrong = EditTally(tried=2, violations=[Violation("cube", ("reduce", "number"), {}, "loss_differs: off")])
    wrong.total.update({PROVED: 1, VIOLATION: 1})
    lines = [line.text for line in soundness_lines(Soundness(2, 0, wrong))]
    assert "VIOLATION cube: reduce, number: loss_differs: off" in lines
    assert lines[-1].startswith("FAILED  2 edited programs, 1 PROVED that agree, 1 that do not")
    nothing = EditTally(tried=2)
    nothing.total.update({INCONCLUSIVE: 2})
    assert not Soundness(2, 0, nothing).good, "nothing was proved, so nothing was tested"


@pytest.mark.apart
def test_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    options = ["--count", "40", "--model", "shuffled", "--processes", "1", "--out", str(tmp_path / "out"), "-q"]
    code = main(["self-test", "soundness-plans", *options])
    captured = capsys.readouterr()
    assert code == 0, captured.out
    assert "PASSED  40 edited programs" in captured.out and "state with sections" in captured.out


@pytest.mark.parametrize(
    ("options", "message"),
    [(["--model", "nothing"], "no programs are made of 'nothing'"), (["--count", "0"], "--count and --processes")],
)
def test_usage(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["self-test", "soundness-plans", *options]) == 2
    assert message in capsys.readouterr().err
