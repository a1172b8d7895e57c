"""Each planted bug is found at its line, and the cause names its mechanism; right programs have no culprits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.broken.planting import Edit
from tests.sampling import every, only
from tests.verify.localise.planted import Bench, Planted, programs, score
from tests.verify.localise.planted_gradients import BACKWARD
from tests.verify.localise.planted_values import FORWARD
from verify.programs.localise import localise_all
from verify.programs.localise.first_divergent import first_difference
from verify.programs.localise.localise import find_culprits
from verify.programs.source_map import SourceMap

EVERY = (*FORWARD, *BACKWARD)
Get = Callable[[str], Bench]


@pytest.fixture(scope="session")
def get(tmp_path_factory: pytest.TempPathFactory) -> Get:
    """The programs, each compiled once."""
    makers = programs(tmp_path_factory.mktemp("localise"))
    made: dict[str, Bench] = {}

    def found(name: str) -> Bench:
        if name not in made:
            made[name] = makers[name]()
        return made[name]

    return found


@pytest.mark.parametrize("bug", every(14, EVERY), ids=[bug.name for bug in EVERY])
def test_line_and_cause(get: Get, bug: Planted, tmp_path: Path) -> None:
    found = score(get(bug.program), [bug], tmp_path / "program")
    assert found.line, found.findings
    assert found.cause, found.findings
    assert found.findings[0].where is not None


@pytest.mark.long
@pytest.mark.parametrize("name", only((0, 4), ["sharded", "staged", "looked_up", "three", "unlike"]))
def test_right_programs_have_no_culprits(get: Get, name: str) -> None:
    """Every statement was compared, in both directions and in two steps."""
    bench = get(name)
    prepared = bench.prepared
    assert find_culprits(bench.task, prepared.graph, prepared.program, 60.0) == []
    assert localise_all(bench.task, prepared.graph, prepared.program, SourceMap(prepared.graph), 60.0) == ()


PAIRS = [
    ("all_reduce missing", "another function"),
    ("another operand", "gradient cut off"),
    ("backward all_reduce missing", "gradient not reduced"),
    ("epsilon of a norm", "declared unused"),
    ("bias on every rank", "gradient summed twice"),
    ("another tensor is reduced", "gradient reduced over tp as well"),
]


@pytest.mark.long
@pytest.mark.parametrize(("one", "other"), every(3, PAIRS))
def test_two_at_once(get: Get, one: str, other: str, tmp_path: Path) -> None:
    by_name = {bug.name: bug for bug in EVERY}
    found = score(get("sharded"), [by_name[one], by_name[other]], tmp_path / "program")
    assert found.edited == (2, 2), found.findings
    assert found.findings[0].counter_example["places"] == "2 lines are wrong by themselves"


def test_the_plain_run_names_the_first_alone(get: Get, tmp_path: Path) -> None:
    """Without teaching, two independent errors are one: a plain run names only the first."""
    by_name = {bug.name: bug for bug in EVERY}
    bugs = [by_name["all_reduce missing"], by_name["another function"]]
    found = score(get("sharded"), bugs, tmp_path / "program", first_difference)
    assert found.edited == (1, 2)


@pytest.mark.long
def test_more_than_five_are_counted(get: Get, tmp_path: Path) -> None:
    names = [f"linear_{i}" for i in (1, 3, 5, 7)] + ["cross_entropy_loss_sumexp", "cross_entropy_loss_pick"]
    bench = get("sharded")
    edits = [Edit(f"comm.all_reduce({name}, self.tp)", name) for name in names]
    prepared, task = bench.broken(tmp_path / "program", edits)
    culprits = find_culprits(task, prepared.graph, prepared.program, 60.0)
    assert [c.line.text.split(" = ")[0] for c in culprits if c.line] == [f"{name}_v1" for name in names]
    first, *_ = localise_all(task, prepared.graph, prepared.program, SourceMap(prepared.graph), 60.0)
    assert first.counter_example["places"] == "6 lines are wrong by themselves, the first 5 are shown"


@pytest.mark.long
def test_repair_is_the_line_that_was_there(get: Get, tmp_path: Path) -> None:
    bug = next(bug for bug in EVERY if bug.name == "backward all_reduce missing")
    found = score(get("sharded"), [bug], tmp_path / "program").findings[0]
    assert "`layer_norm_1_v1 = comm.replicate(layer_norm_1, self.tp)` repairs it" in str(found.cause)


def test_program_that_cannot_be_taught(get: Get, tmp_path: Path) -> None:
    """A statement that raises on right operands ends teaching; a plain run says what it saw until then."""
    bench = get("sharded")
    edits = [
        Edit("aten.gelu(linear_2)", "aten.relu(linear_2)"),
        Edit("aten.gelu(linear_6)", "aten.gelu(linear_6.reshape(7, 7))"),
    ]
    prepared, task = bench.broken(tmp_path / "program", edits)
    (found,) = localise_all(task, prepared.graph, prepared.program, SourceMap(prepared.graph), 60.0)
    assert found.code.startswith("tensor_")
    assert "first tensor that differs" in found.message or "last that differs" in found.message
