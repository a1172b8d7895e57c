"""`nnscaler schedule`, and --schedule with files and functions: what runs, and what is refused with its place."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import pytest

from nnscaler.cli.main import main
from nnscaler.planning.parallel_configurations import configurations
from nnscaler.scheduling import registry
from nnscaler.scheduling.registry import SCHEDULES
from nnscaler.scheduling.schedule import Schedule, ScheduleKind
from nnscaler.transform.plan import Plan

MODEL = """\
import torch


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(6, 6) for _ in range(4))

    def forward(self, x, y):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return torch.nn.functional.mse_loss(x, y)


def build_model():
    return Model()


def sample_inputs():
    return {"x": torch.randn(8, 6), "y": torch.randn(8, 6)}
"""
MINE = """\
def vee(devices, chunks, micro_batches):
    orders = []
    for first in range(devices):
        last = 2 * devices - 1 - first
        words = [f"F{stage}.{m}" for stage in (first, last) for m in range(micro_batches)]
        words += [f"B{stage}.{m}" for stage in (last, first) for m in range(micro_batches)]
        orders.append(" ".join(words))
    return orders


def raises(devices, chunks, micro_batches):
    return [1 / 0]


def stuck(devices, chunks, micro_batches):
    return ["F0.0 B0.0 F0.1 B0.1", "F1.0 F1.1 B1.0 B1.1"]


number = 3
"""
GOOD = "0F0,0F1,0B0,0B1\n,1F0,1B0,1F1,1B1\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "good.csv").write_text(GOOD)
    return tmp_path


def test_a_schedule_is_drawn_and_written(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schedule", "zb-h1", "--devices", "2", "--micro-batches", "2", "--csv", "out.csv"]) == 0
    assert capsys.readouterr().out == (
        "device 0 | F0.0 F0.1 .    I0.0 W0.0 I0.1 W0.1\n"
        "device 1 | .    F1.0 I1.0 F1.1 I1.1 W1.0 W1.1\n"
        "zb-h1: 2 devices, 2 stages, 2 micro-batches: 7 long, bubble 14.3%\n"
        "idle between the first and the last pass of a device: 1 0\n"
        "live at once, in micro-batches of a stage: 2 2\n"
        "wrote out.csv: 2 rows\n"
    )
    assert (folder / "out.csv").read_text() == "0F0,0F1,0I0,0W0,0I1,0W1\n1F0,1I0,1F1,1I1,1W0,1W1\n"
    assert main(["schedule", "out.csv", "-q"]) == 0
    assert capsys.readouterr().out.startswith("out.csv: 2 devices, 2 stages, 2 micro-batches: 7 long")


def test_times_are_those_of_the_passes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["schedule", "1f1b", "--devices", "2", "--micro-batches", "2", "--times", "10,20,10"]
    assert main(words) == 0
    picture, figures = capsys.readouterr().out.split("1f1b: ")
    assert picture.splitlines()[1] == "device 1 | .    F1.0 B1.0 ---- F1.1 B1.1 ---- .    ."
    assert "90 long, bubble 33.3%" in figures
    for times in ("1,2", "1,2,2", "0,2,1", "1,2,x"):
        assert main([*words[:-1], times]) == 2


def test_a_function_and_a_saved_plan_are_drawn(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schedule", "mine.py::vee", "--devices", "2", "--micro-batches", "3", "-q"]) == 0
    assert "mine.py::vee: 2 devices, 4 stages, 3 micro-batches" in capsys.readouterr().out
    plan = Plan((("pp", 2),), micro_batches=1, schedule="mine", orders=("F0.0 B0.0", "F1.0 B1.0"))
    (folder / "plan.json").write_text(plan.to_json())
    assert main(["schedule", "plan.json", "-q"]) == 0
    assert "mine: 2 devices, 2 stages, 1 micro-batches" in capsys.readouterr().out
    (folder / "plan.json").write_text(replace(plan, schedule="interleaved", chunks=3, orders=()).to_json())
    assert main(["schedule", "plan.json", "--devices", "2", "--micro-batches", "2", "-q"]) == 0
    assert "interleaved: 2 devices, 6 stages" in capsys.readouterr().out


def test_every_name_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "schedules"]) == 0
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert names == [*SCHEDULES, "interleaved:3", "search", "orders.csv", "mine.py::function", "plan.json"]


def refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(words) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("schedule", "said"),
    [
        ("zb-q", "did you mean 'zb-v'?"),
        ("interleaved:none", "no schedule 'interleaved:none'"),
        ("none.csv", "there is no file 'none.csv'"),
        ("none.py::f", "there is no file 'none.py'"),
        ("bad.csv", "bad.csv: row 2, column 3: '1BO' is no pass of a stage"),
        ("lacks.csv", "lacks.csv: row 2: runs I1.1 and never W1.1"),
        ("none.json", "there is no file 'none.json'"),
        ("broken.json", "broken.json: orders[1], word 2: 'X1.0' is not an instruction"),
    ],
)
@pytest.mark.parametrize("command", ["schedule", "compile", "verify-plan"])
def test_what_is_wrong_with_a_schedule_is_said_first(
    command: str, schedule: str, said: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before the model is looked at: there is none."""
    (folder / "bad.csv").write_text(GOOD.replace("1B0", "1BO"))
    (folder / "lacks.csv").write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1I1\n")
    plan = Plan((("pp", 2),), micro_batches=1, schedule="mine", orders=("F0.0 B0.0", "F1.0 X1.0"))
    (folder / "broken.json").write_text(plan.to_json())
    (folder / "model.py").write_text("raise SystemExit('this is loaded')")
    words = {
        "schedule": ["schedule", schedule, "--devices", "2", "--micro-batches", "2"],
        "compile": ["compile", "model.py", "--plan", "pp=2", "--schedule", schedule, "--out", "program"],
        "verify-plan": ["verify-plan", "model.py", "--plan", "pp=2", "--schedule", schedule],
    }
    text = refused(words[command], capsys)
    assert said in text and "help:" in text and "this is loaded" not in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["zb-v", "--devices", "2"], "--micro-batches is missing: zb-v is for any number"),
        (["zb-v", "--micro-batches", "2"], "--devices is missing"),
        (["good.csv", "--devices", "3"], "good.csv is for 2 devices and 2 micro-batches, and there are 3 and 2"),
        (["mine.py::raises", "--devices", "2", "--micro-batches", "2"], "raises ZeroDivisionError: division by zero"),
        (["mine.py::nothing", "--devices", "2", "--micro-batches", "2"], "mine.py has no function nothing"),
        (["mine.py::number", "--devices", "2", "--micro-batches", "2"], "mine.py has no function number"),
        (["mine.py::stuck", "--devices", "2", "--micro-batches", "2"], "device 0 is at B0.0 and waits for B1.0"),
    ],
)
def test_what_no_schedule_can_be_made_of(
    words: list[str], said: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in refused(["schedule", *words], capsys)


def test_orders_of_a_saved_plan_are_checked_before_the_model(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "model.py").write_text("raise SystemExit('this is loaded')")
    plan = Plan((("pp", 2),), micro_batches=1, schedule="mine", orders=("F0.0 B0.0", "F1.0 I1.0"))
    (folder / "plan.json").write_text(plan.to_json())
    text = refused(["verify-plan", "model.py", "--plan", "plan.json"], capsys)
    assert "orders of the plan (mine): device 1: runs I1.0 and never W1.0" in text
    text = refused(["verify-plan", "model.py", "--ranks", "2", "--plan", "auto", "--schedule", "mine.py::vee"], capsys)
    assert "schedule 'mine.py::vee': the planner has no figures" in text and "name the plan" in text


@pytest.mark.parametrize(("schedule", "stages"), [("search", 2), ("search:zb-v", 4)])
def test_orders_are_searched_for_the_stages_of_a_plan(
    schedule: str, stages: int, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The orders go into the plan, the same ones each time, with what is proved of them."""
    words = ["compile", "model.py", "--plan", "pp=2", "--micro-batches", "4", "--schedule", schedule, "--out"]
    assert main([*words, "first"]) == 0 and main([*words, "second"]) == 0
    assert "schedule searched, backward" in capsys.readouterr().err
    text = (folder / "first" / "plan.json").read_text()
    assert text == (folder / "second" / "plan.json").read_text()
    plan = Plan.from_json(text)
    assert (plan.schedule, plan.stages, len(plan.orders)) == ("search", stages, 2)
    assert "(gap 0.00%; proved by" in plan.notes[-1]
    verify = ["verify-plan", "model.py", "--backend", "simulator", "--quick", "--plan", "first"]
    assert main(verify) == 0
    assert "search, 4 micro-batches)" in capsys.readouterr().out


def test_orders_are_searched_within_a_limit_of_memory(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["compile", "model.py", "--plan", "pp=2", "--micro-batches", "4", "--schedule", "search", "--out"]
    assert main([*words, "free"]) == 0
    tight = [*words, "tight", "--memory"]
    text = refused([*tight, "100B"], capsys)
    assert "no order of passes fits into 100 bytes a rank: device 1 (stages [1]) holds" in text
    least = text.split("--memory ")[1].split(" ")[0]
    assert main([*tight, least]) == 0
    free, kept = (Plan.from_json((folder / n / "plan.json").read_text()) for n in ("free", "tight"))
    assert free.orders != kept.orders and f"within {int(least[:-1]):,} a rank" in kept.notes[-1]
    assert "--memory is for the search of a plan" in refused(
        [*words[:-3], "--schedule", "1f1b", *tight[-3:], "1GB"], capsys
    )
    assert "no schedule 'zb-q'" in refused([*words[:-2], "search:zb-q", "--out", "none"], capsys)


@pytest.mark.parametrize("schedule", ["mine.py::vee", "good.csv"])
def test_a_schedule_of_ones_own_is_compiled_and_verified(
    schedule: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["verify-plan", "model.py", "--plan", "pp=2", "--schedule", schedule, "--backend", "simulator", "--quick"]
    assert main(words) == 0
    assert f"(pp=2, {schedule}," in capsys.readouterr().out


def test_a_plan_is_run_under_another_schedule(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compile", "model.py", "--plan", "pp=2", "--schedule", "gpipe", "--out", "first"]) == 0
    again = ["compile", "model.py", "--plan", "first", "--out", "second", "--schedule"]
    assert main([*again, "1f1b"]) == 0
    plan = Plan.from_json((folder / "second" / "plan.json").read_text())
    assert (plan.schedule, plan.micro_batches) == ("1f1b", 4)
    capsys.readouterr()
    assert "schedule zb-v runs 2 stages on each device, not 1" in refused([*again, "zb-v"], capsys)
    assert "schedule interleaved is for 4 stages, and the plan has 2" in refused([*again, "interleaved:2"], capsys)
    assert "good.csv is for 2 devices and 2 micro-batches, and there are 2 and 4" in refused(
        [*again, "good.csv"], capsys
    )


def test_orders_that_deadlock_are_not_compiled(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["compile", "model.py", "--plan", "pp=2", "--micro-batches", "2", "--out", "program"]
    text = refused([*words, "--schedule", "mine.py::stuck"], capsys)
    assert "deadlocks: device 0 is at B0.0 and waits for B1.0 of device 1, which comes after F1.1 there" in text
    assert not (folder / "program").exists()


def test_one_more_schedule_is_a_function_and_its_name(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What its file holds is here, and what stands in the registry is one name: then every command has it."""

    def backwards(devices: int, chunks: int, micro_batches: int) -> Schedule:
        """GPipe on devices in the reverse order."""
        made = SCHEDULES["gpipe"](devices, chunks, micro_batches)
        return replace(made, name="backwards", devices=places(devices, chunks), orders=made.orders[::-1])

    def places(devices: int, chunks: int) -> tuple[tuple[int, ...], ...]:
        return tuple((devices - 1 - stage,) for stage in range(devices * chunks))

    kind = ScheduleKind(
        "backwards", "backwards", backwards, chunks=1, places=places, figures=SCHEDULES["gpipe"].figures
    )
    monkeypatch.setattr(registry, "SCHEDULES", MappingProxyType({**SCHEDULES, kind.name: kind}))
    assert {c.named for c in configurations(2, 4, 2, registry.planned_schedules()) if c.pp == 2} >= {
        "1f1b",
        "zb-h1",
        "backwards",
    }
    assert main(["list", "schedules"]) == 0
    assert "backwards          GPipe on devices in the reverse order." in capsys.readouterr().out
    assert main(["schedule", "backwards", "--devices", "2", "--micro-batches", "2"]) == 0
    words = [
        "verify-plan",
        "model.py",
        "--plan",
        "pp=2",
        "--schedule",
        "backwards",
        "--backend",
        "simulator",
        "--quick",
    ]
    assert main(words) == 0
    assert "(pp=2, backwards, 4 micro-batches)" in capsys.readouterr().out
    kept = "[[constraint]]\nkind = 'pipeline'\n"
    (folder / "kept.toml").write_text(kept)
    words = ["compile", "model.py", "--ranks", "2", "--cluster", "h100x8", "--constraints", "kept.toml"]
    assert main([*words, "--schedule", "backwards", "--out", "planned"]) == 0
    plan = Plan.from_json((folder / "planned" / "plan.json").read_text())
    assert (plan.schedule, plan.stage_devices) == ("backwards", ((1,), (0,)))
