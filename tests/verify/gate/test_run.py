"""Each item runs in a process of its own: whatever becomes of one, the others go on, and nothing passes by default."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

import pytest

from nnscaler.errors import NnscalerError, SourceLocation
from tests.verify.gate.results import finding, report
from verify.gate.items import Item, OpItem, OpSource, PlanItem
from verify.gate.outcome import ItemResult, judge
from verify.gate.run_items_within_budget import Clock, complete, find_operators, run_items
from verify.gate.run_order import (
    Last,
    Phase,
    State,
    batches,
    expected,
    first_units,
    other_units,
    read_state,
    state_file,
    write_state,
)
from verify.programs.request import PlanRequest
from verify.results.verdict import Verdict

Note = Callable[[str], None]
BUDGET = 60.0


def behave(item: Item, phase: Phase, note: Note) -> ItemResult:
    """Behave as the item's name says."""
    note(f"being {item.name}")
    word = item.name.rstrip("0123456789")
    if word == "segfault":
        ctypes.string_at(0)
    elif word == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif word == "exits":
        sys.exit(0)
    elif word == "hangs":
        time.sleep(600)
    elif word == "usage":
        raise NnscalerError("plan_illegal", "no such plan\nand more", SourceLocation("model.py", 3), "another plan")
    elif word == "bug":
        raise KeyError("view_3")
    elif word == "refuted":
        return ItemResult(item.name, report(finding()))
    elif word == "text" and phase == "static":
        return ItemResult(item.name, report(finding("layouts_disagree")))
    return ItemResult(item.name, report())


def ops(*names: str, timeout: float = 30.0) -> list[Item]:
    return [OpItem(name, name, timeout=timeout) for name in names]


def plan_item(name: str) -> PlanItem:
    return PlanItem(name, PlanRequest(model="m.py"))


class Told(Clock):
    """A clock that says what is left each time that it is asked, and the last of it from then on."""

    def __init__(self, *left: float) -> None:
        super().__init__(time.perf_counter(), BUDGET)
        object.__setattr__(self, "_left", list(left))

    def left(self) -> float:
        left: list[float] = self._left  # type: ignore[attr-defined]
        return left.pop(0) if len(left) > 1 else left[0]


def run(items: list[Item], clock: Clock | None = None, jobs: int = 2) -> dict[str, ItemResult]:
    clock = clock or Clock(time.perf_counter(), BUDGET)
    found = {unit.item.name: result for unit, result in run_items(items, State(), clock, behave, jobs)}
    return {result.name: result for result in complete(items, found, "budget")}


@pytest.mark.parametrize(
    ("name", "code", "message", "stop"),
    [
        ("segfault", "item_died", "the process that ran `segfault` was ended: killed by SIGSEGV", 0),
        ("killed", "item_died", "the process that ran `killed` was ended: killed by SIGKILL", 0),
        ("exits", "item_died", "the process that ran `exits` was ended: exited with code 0", 0),
        ("usage", "could_not_run", "`usage` could not be run: no such plan", 2),
        ("bug", "internal_error", "nnScaler failed on `bug`: KeyError: 'view_3'", 101),
    ],
)
def test_what_becomes_of_an_item_is_a_finding_of_that_item(name: str, code: str, message: str, stop: int) -> None:
    found = run(ops("good", name, "good2"))
    assert [found[n].report.verdict for n in ("good", "good2")] == [Verdict.TESTED_EXACT] * 2
    lost = found[name]
    assert (lost.report.verdict, lost.stop, lost.finished) == (Verdict.INCONCLUSIVE, stop, False)
    (told,) = lost.report.findings
    assert (told.code, told.message) == (code, message)
    outcome = judge(list(found.values()), [], set(found), date.today(), "")
    assert outcome.exit_code == (stop or 3)


def test_what_an_item_was_doing_is_told() -> None:
    assert run(ops("killed"))["killed"].report.findings[0].counter_example["running"] == "being killed"
    told = run(ops("usage"))["usage"].report.findings[0]
    assert (told.where, told.cause, told.help) == (SourceLocation("model.py", 3), "and more", "another plan")
    assert told.counter_example == {"error": "plan_illegal"}
    assert "Traceback" in run(ops("bug"))["bug"].report.findings[0].counter_example["traceback"]


def test_an_item_has_a_time_limit_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verify.gate.run_items_within_budget.GRACE", 0.5)
    found = run(ops("hangs", "good", timeout=1.0))
    assert found["hangs"].report.findings[0].code == "item_timed_out"
    assert found["hangs"].report.findings[0].counter_example["running"] == "being hangs"
    assert found["good"].report.verdict.passes


def test_what_does_not_fit_into_the_budget_is_not_run() -> None:
    found = run(ops("good", "hangs", "good2", "good3"), Told(60.0, 1.0, 0.0), jobs=1)
    assert found["good"].report.verdict.passes
    for name in ("hangs", "good2", "good3"):
        lost = found[name]
        assert (lost.report.verdict, lost.finished) == (Verdict.INCONCLUSIVE, False)
        (told,) = lost.report.findings
        assert (told.code, told.message) == ("not_run", f"`{name}` was not run: budget; nothing of it was checked")


def test_a_program_of_which_only_the_text_was_read_is_not_decided() -> None:
    items: list[Item] = [plan_item("good"), plan_item("text"), plan_item("hangs")]

    def texts(item: Item, phase: Phase, note: Note) -> ItemResult:
        if phase == "all":
            time.sleep(600)
        return behave(item, phase, note) if item.name == "text" else ItemResult(item.name, report())

    texts_alone = len(list(batches(first_units(items, State()), 1)))
    clock = Told(*[60.0] * texts_alone, 1.0, 0.0)
    seen = list(run_items(items, State(), clock, texts, 1))
    assert [unit.phase for unit, _ in seen] == ["static"] * 3
    found = {r.name: r for r in complete(items, {unit.item.name: result for unit, result in seen}, "budget")}
    assert found["good"].report.verdict is Verdict.INCONCLUSIVE
    assert "its program was read, and did not run" in found["good"].report.findings[-1].message
    assert found["text"].report.verdict is Verdict.REFUTED, "what its text shows is shown"
    assert not found["text"].finished


def test_the_whole_item_replaces_the_reading_of_its_text() -> None:
    found = run([plan_item("good"), plan_item("text")])
    assert found["good"].finished and found["good"].report.verdict.passes
    assert found["text"].report.verdict.passes, "the run, which reads the text as well, has the last word"


def test_an_item_whose_text_cannot_be_had_does_not_run_again() -> None:
    items: list[Item] = [plan_item("usage"), plan_item("killed"), plan_item("good")]
    seen = list(run_items(items, State(), Clock(time.perf_counter(), BUDGET), behave))
    assert [(unit.item.name, unit.phase) for unit, _ in seen] == [
        ("usage", "static"),
        ("killed", "static"),
        ("good", "static"),
        ("good", "all"),
    ]


def test_closing_a_run_leaves_no_process() -> None:
    def children() -> set[str]:
        """Those that other tests have started may still be there."""
        listed = subprocess.run(["ps", "--ppid", str(os.getpid()), "-o", "pid=,comm="], capture_output=True, text=True)
        return {pid for pid, name in map(str.split, listed.stdout.splitlines()) if name != "ps"}

    before = children()
    runs = run_items(ops("good", "hangs", "hangs2"), State(), Clock(time.perf_counter(), BUDGET), behave, 3)
    next(runs)
    assert children() - before, "something runs"
    runs.close()
    assert children() <= before


def test_worst_first() -> None:
    items: list[Item] = [plan_item("p"), plan_item("q"), *ops("a", "b"), plan_item("r")]
    state = State({"q": Last(False, 9.0), "b": Last(False, 1.0), "p": Last(True, 50.0), "a": Last(True, 2.0)})
    first = [(unit.item.name, unit.phase) for unit in first_units(items, state)]
    assert first == [("b", "all"), ("q", "all"), ("p", "static"), ("r", "static")]
    others = other_units(items, state, refuted={"p"}, done={"b", "q"})
    assert [unit.item.name for unit in others] == ["p", "a", "r"]
    assert first_units(items[:1], State()) == [], "one item alone reads its text by itself"
    assert expected(items[4], state) > expected(ops("new")[0], state)


def test_operators_run_side_by_side_and_plans_alone() -> None:
    items: list[Item] = [
        *ops("a", "b", "c"),
        plan_item("p"),
        plan_item("q"),
        *ops("d", timeout=9),
        *ops("e"),
    ]
    units = other_units(items, State({i.name: Last(True, n) for n, i in enumerate(items)}), (), ())
    assert [[u.item.name for u in batch] for batch in batches(units, 2)] == [
        ["a", "b"],
        ["c"],
        ["p"],
        ["q"],
        ["d"],
        ["e"],
    ]


def test_operators_run_side_by_side(tmp_path: Path) -> None:
    """Each waits for the others."""
    names = ("one", "two", "three", "four")

    def meet(item: Item, phase: Phase, note: Note) -> ItemResult:
        (tmp_path / item.name).touch()
        while len(list(tmp_path.iterdir())) < len(names):
            time.sleep(0.01)
        return ItemResult(item.name, report())

    clock = Clock(time.perf_counter(), None)
    found = [result for _, result in run_items(ops(*names, timeout=240.0), State(), clock, meet, 4)]
    assert all(result.report.verdict.passes for result in found) and len(found) == 4


def test_listing_operators(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("gate_listed.py").write_text(
        "import nnscaler\nfrom torch import Tensor\n"
        '@nnscaler.register_op("a b -> a b", name="gate_one")\ndef one(x: Tensor) -> Tensor:\n    return x + 0\n'
        '@nnscaler.register_op("a b -> a b", name="gate_two")\ndef two(x: Tensor) -> Tensor:\n    return x * 2\n',
        encoding="utf-8",
    )
    Path("gate_dies.py").write_text("import os\nos.abort()\n", encoding="utf-8")
    Path("gate_empty.py").write_text("", encoding="utf-8")
    sources = [
        OpSource("file", "gate_listed.py"),
        OpSource("name", "gate_listed.py::two"),
        OpSource("name", "aten.gelu"),
        OpSource("file", "gate_dies.py"),
        OpSource("file", "gate_empty.py"),
        OpSource("user", "", ("gate_listed.py",)),
        OpSource("module", "gate_listed"),
    ]
    items, failed = find_operators(sources, tmp_path, Clock(time.perf_counter(), BUDGET))
    named = [
        i.name for i in items if not i.name.startswith(("..", "verify."))
    ]  # other tests register operators in this process
    assert named == ["gate_listed.py::one", "gate_listed.py::two", "aten.gelu.default"]
    assert [(r.name, r.report.findings[0].code, r.stop) for r in failed] == [
        ("gate_dies.py", "item_died", 0),
        ("gate_empty.py", "could_not_run", 2),
    ]
    assert "gate_listed" not in sys.modules, "the gate's own process never imports a user's file"


def test_the_state_survives_and_a_broken_one_is_none(tmp_path: Path) -> None:
    file = state_file(tmp_path)
    assert file is not None
    assert read_state(file) == State()
    write_state(file, State({"a": Last(True, 1.0), "b": Last(True, 2.0)}), {"b": Last(False, 3.0)})
    assert read_state(file) == State({"a": Last(True, 1.0), "b": Last(False, 3.0)})
    assert (file.parents[1] / ".gitignore").read_text(encoding="utf-8") == "*\n"
    for text in ("", "[]", '{"a": 1}', '{"a": {"passed": true}}'):
        file.write_text(text, encoding="utf-8")
        assert read_state(file) == State()
    write_state(file / "x", State(), {})  # cannot be written: no error
