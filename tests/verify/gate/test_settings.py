"""`[tool.nnscaler.gate]`: what it may say, and which source of a setting counts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from nnscaler.cli.commands.verify_external import external_request
from nnscaler.cli.commands.verify_plan import plan_request
from nnscaler.cli.main import build_parser
from nnscaler.errors import NnscalerError
from nnscaler.ir.mixed_precision_dtypes import FLOATS
from nnscaler.plan_source import plan_source
from nnscaler.planning.auto_plan_request import AutoPlan
from tests.verify.gate.results import report
from verify.gate.items import OpItem, OpSource, check_names, select
from verify.gate.settings import EXAMPLE, GateSettings, read_settings
from verify.gate.verify_item import perform_item
from verify.operators.run.cache import Cache
from verify.programs.loaded_model_and_plan import RunContext
from verify.programs.request import BACKENDS, PlanRequest
from verify.results.report import Report

MODELS = """
[[tool.nnscaler.gate.models]]
model = "sub/model.py::tiny"
timeout = "40s"
plans = [
    { ranks = 4, plan = "dp=2,tp=2", micro-batches = 4, replicate = ["lm_head*", "a"], dtype = "float32" },
    { ranks = 2, plan = "plan.json", seed = 7, backend = "gloo", depth = "quick", timeout = 9 },
    { plan = "pp=2", name = "my name", specialise = true, schedule = "1f1b", steps = 3 },
]
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def settings(text: str, **asked: object) -> GateSettings:
    Path("pyproject.toml").write_text(text, encoding="utf-8")
    return read_settings(None, asked)


def refused(text: str) -> NnscalerError:
    with pytest.raises(NnscalerError) as caught:
        settings(text)
    return caught.value


def test_plans_are_items(folder: Path) -> None:
    first, second, third = settings(f'[tool.nnscaler.gate]\nplan-timeout = "50s"\n{MODELS}').plans
    assert first.name == (
        "sub/model.py::tiny ranks=4 plan=dp=2,tp=2 micro-batches=4 replicate=lm_head*,a dtype=float32"
    )
    assert (first.request.model, first.timeout, first.seed) == ("sub/model.py::tiny", 40.0, 0)
    assert second.name == "sub/model.py::tiny ranks=2 plan=plan.json backend=gloo depth=quick seed=7"
    assert (second.seed, second.timeout) == (7, 9.0)
    assert third.name == "my name"


def test_each_option_reaches_verify_plan(folder: Path) -> None:
    requests = [item.request for item in settings(f"[tool.nnscaler.gate]\n{MODELS}").plans]
    assert [r.ranks for r in requests] == [4, 2, None]
    assert [r.plan for r in requests] == ["dp=2,tp=2", "plan.json", "pp=2"]
    assert requests[0].micro_batches == 4
    assert [r.dtype for r in requests] == ["float32", "float64", "float64"]
    assert [r.seed for r in requests] == [0, 7, 0]
    assert [r.depth for r in requests] == ["default", "quick", "default"]
    assert [r.specialise for r in requests] == [False, False, True]
    assert requests[0].replicate == ("lm_head*", "a")
    assert [r.timeout for r in requests] == [32.0, pytest.approx(7.2), 32.0]


def test_an_item_is_what_the_command_line_says(folder: Path) -> None:
    lines = (
        "--ranks 4 --plan dp=2,tp=2 --micro-batches 4 --replicate lm_head* --replicate a --dtype float32 --timeout 32",
        "--ranks 2 --plan plan.json --seed 7 --backend gloo --quick --timeout 7.2",
        "--plan pp=2 --specialise --schedule 1f1b --steps 3 --timeout 32",
    )
    items = settings(f"[tool.nnscaler.gate]\n{MODELS}").plans
    for item, line in zip(items, lines, strict=True):
        options = build_parser().parse_args(["verify-plan", "sub/model.py::tiny", *line.split()])
        asked = plan_request(options)
        assert replace(item.request, timeout=round(item.request.timeout, 6)) == asked


def test_the_file_of_a_schedule_is_beside_the_settings(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plans = 'plans = [{ plan = "pp=2", schedule = "mine.py::f" }, { plan = "pp=2", schedule = "zb-h1" }]'
    text = f'[tool.nnscaler.gate]\n[[tool.nnscaler.gate.models]]\nmodel = "model.py"\n{plans}\n'
    (folder / "below").mkdir()
    settings(text)
    monkeypatch.chdir(folder / "below")
    requests = [item.request for item in read_settings(folder / "pyproject.toml", {}).plans]
    assert [request.schedule for request in requests] == [str(folder / "mine.py::f"), "zb-h1"]


def test_the_text_alone_is_read_first(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    item = settings(f"[tool.nnscaler.gate]\n{MODELS}").plans[0]
    asked: list[PlanRequest] = []
    cached: list[bool] = []

    def verified(request: PlanRequest, context: RunContext) -> Report:
        asked.append(request)
        cached.append(context.cached)
        return report()

    monkeypatch.setattr("verify.gate.verify_item.verify_request", verified)
    for phase, cache in (("static", None), ("all", Cache(folder))):
        perform_item(folder, cache, None)(item, phase, lambda text: None)
    assert asked == [replace(item.request, level="static"), item.request]
    assert cached == [False, True]  # lemmas too


def test_choices_are_those_of_verify_plan(folder: Path) -> None:
    text = '[tool.nnscaler.gate]\n[[tool.nnscaler.gate.models]]\nmodel = "m.py"\nplans = [{{ ranks = 2, {} = "{}" }}]\n'
    plain = settings(text.format("dtype", "float64")).plans[0].request
    for name, values in (("dtype", FLOATS), ("backend", BACKENDS)):
        for value in values:
            assert settings(text.format(name, value)).plans[0].request == replace(plain, **{name: value})  # type: ignore[arg-type]
    assert refused(text.format("dtype", "float46")).help == "did you mean float64?"


def test_paths_are_relative_to_the_settings(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "inner").mkdir()
    settings(f'[tool.nnscaler.gate]\nbaseline = "b.toml"\n{MODELS}')
    monkeypatch.chdir(folder / "inner")
    found = read_settings()
    assert found.plans[0].request.model == f"{folder}/sub/model.py::tiny", "outside of the current folder: whole"
    assert found.plans[0].name.startswith("sub/model.py::tiny"), "the same name from everywhere"
    assert found.baseline == folder / "b.toml"
    assert read_settings(None, {"baseline": "c.toml"}).baseline == folder / "inner" / "c.toml"


def test_a_plan_may_be_searched_for_a_cluster(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entries = (
        '{ ranks = 4, cluster = "h100x8", memory = "40GB", constraints = "kept.toml" }',
        '{ ranks = 4, plan = "auto", cluster = "ours.toml", profile = "p.json" }',
        '{ ranks = 4, plan = "auto:h100x8" }',
    )
    table = f'[tool.nnscaler.gate]\n[[tool.nnscaler.gate.models]]\nmodel = "m.py"\nplans = [{", ".join(entries)}]\n'
    settings(table)
    (folder / "inner").mkdir()
    monkeypatch.chdir(folder / "inner")
    items = read_settings().plans
    sources = [plan_source(item.request) for item in items]
    assert sources == [
        AutoPlan("h100x8", 40e9, f"{folder}/kept.toml"),
        AutoPlan(f"{folder}/ours.toml", profile=f"{folder}/p.json"),
        AutoPlan("h100x8"),
    ]


def test_sources_of_operators(folder: Path) -> None:
    text = """
[tool.nnscaler.gate]
op-timeout = "7s"
seed = 5
[tool.nnscaler.gate.ops]
names = ["aten.gelu", "ops/a.py::f"]
files = ["ops/b.py"]
modules = ["my.ops"]
"""
    assert settings(text).sources == (
        OpSource("name", "aten.gelu", (), 5, 7.0),
        OpSource("name", "ops/a.py::f", (), 5, 7.0),
        OpSource("file", "ops/b.py", (), 5, 7.0),
        OpSource("module", "my.ops", (), 5, 7.0),
    )
    user = settings(f"[tool.nnscaler.gate]\n{MODELS}\n[tool.nnscaler.gate.ops]\nuser = true\n").sources
    assert [(s.kind, s.files) for s in user] == [("user", ("sub/model.py",))]


@pytest.mark.parametrize(
    ("text", "message", "line"),
    [
        ("[tool.nnscaler.gate]\nbudgett = 1", "[tool.nnscaler.gate] has no key 'budgett'", 2),
        ("[tool.nnscaler]\ngates = 1", "[tool.nnscaler] has no key 'gates'", 2),
        ("[tool.nnscaler.gate]\n", "[tool.nnscaler.gate] names neither models nor ops", 1),
        ("[tool.nnscaler.gate]\nmodels = []\n", "[tool.nnscaler.gate] names neither models nor ops", 1),
        ("[tool.nnscaler.gate.ops]\n", "[tool.nnscaler.gate.ops] names no operator", 1),
        ("[tool.nnscaler.gate.ops]\nuser = true\n", "user = true takes the operators of the models", 2),
        ("[tool.nnscaler.gate]\nmodels = [{ plans = [] }]\n", "[tool.nnscaler.gate.models] 1 lacks 'model'", 2),
        (
            '[tool.nnscaler.gate]\nmodels = [{ model = "m.py", plans = [] }]',
            "plans of [tool.nnscaler.gate.models] 1",
            2,
        ),
        (
            '[tool.nnscaler.gate]\nmodels = [\n{ model = "m.py", plans = [\n{ rank = 2 }] }]',
            "[tool.nnscaler.gate.models.plans] 1 1 has no key 'rank'",
            4,
        ),
        (
            '[tool.nnscaler.gate]\nmodels = [{ model = "m.py", plans = [{ schedule = "gpipe" }] }]',
            "[tool.nnscaler.gate.models.plans] 1 1 lacks ranks",
            2,
        ),
    ],
)
def test_wrong_settings_are_refused_with_their_line(folder: Path, text: str, message: str, line: int) -> None:
    error = refused(text)
    assert message in error.message
    assert error.code == "bad_settings"
    assert error.where is not None
    assert (error.where.file, error.where.line) == (str(folder / "pyproject.toml"), line)


def test_nothing_to_verify_is_an_error(folder: Path) -> None:
    assert refused("[project]\n").code == "nothing_named"
    Path("pyproject.toml").unlink()
    with pytest.raises(NnscalerError, match=r"no pyproject.toml|no table \[tool.nnscaler.gate\]"):
        read_settings()


def test_the_example_of_the_help_is_right(folder: Path) -> None:
    found = settings(EXAMPLE)
    assert [item.name for item in found.plans] == ["model.py ranks=4 plan=dp=2,tp=2"]
    assert found.get("budget") == 120.0


def test_the_command_line_goes_before_the_environment_and_that_before_the_file(folder: Path) -> None:
    text = f'[tool.nnscaler]\nseed = 3\n[tool.nnscaler.gate]\nbudget = "10s"\n{MODELS}'
    Path("pyproject.toml").write_text(text, encoding="utf-8")
    told = read_settings().values["budget"]
    assert (told.value, told.source) == (10.0, "pyproject.toml:4")
    told = read_settings(None, {}, {"NNSCALER_BUDGET": "20s"}).values["budget"]
    assert (told.value, told.source) == (20.0, "NNSCALER_BUDGET")
    told = read_settings(None, {"budget": 30.0}, {"NNSCALER_BUDGET": "20s"}).values["budget"]
    assert (told.value, told.source) == (30.0, "--budget")
    found = read_settings()
    assert (found.values["seed"].value, found.values["seed"].source) == (3, "pyproject.toml:2")
    assert found.values["jobs"].source == "default"
    assert [p.seed for p in found.plans] == [3, 7, 3]


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("NNSCALER_CACHE", "0", False),
        ("NNSCALER_JOBS", "3", 3),
        ("NNSCALER_SEED", "-4", -4),
        ("NNSCALER_BASELINE", "b", "b"),
    ],
)
def test_the_environment_is_read_by_type(folder: Path, name: str, text: str, value: object) -> None:
    settings(f"[tool.nnscaler.gate]\n{MODELS}")
    assert read_settings(None, {}, {name: text}).get(name.removeprefix("NNSCALER_").lower()) == value


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("NNSCALER_CACHE", "perhaps"),
        ("NNSCALER_JOBS", "0"),
        ("NNSCALER_SEED", "x"),
        ("NNSCALER_SEED", str(2**63)),
        ("NNSCALER_OP_TIMEOUT", "soon"),
    ],
)
def test_a_wrong_variable_is_refused(folder: Path, name: str, text: str) -> None:
    settings(f"[tool.nnscaler.gate]\n{MODELS}")
    with pytest.raises(NnscalerError, match=f"the environment variable {name} is '{text}'"):
        read_settings(None, {}, {name: text})


def test_a_file_can_be_named(folder: Path) -> None:
    other = folder / "other.toml"
    other.write_text(f"[tool.nnscaler.gate]\n{MODELS}", encoding="utf-8")
    assert len(read_settings(other).plans) == 3
    assert len(read_settings(None, {}, {"NNSCALER_CONFIG": str(other)}).plans) == 3


def test_selecting_items() -> None:
    items = [OpItem("a.py::f", "a.py::f"), OpItem("a.py::g", "a.py::g"), OpItem("aten.gelu", "aten.gelu")]
    assert [i.name for i in select(items, ["::"])] == ["a.py::f", "a.py::g"]
    assert [i.name for i in select(items, ["aten*", "*::g"])] == ["a.py::g", "aten.gelu"]
    assert select(items, []) == items
    with pytest.raises(NnscalerError, match=r"no item of the gate matches 'aten\.gleu'") as caught:
        select(items, ["aten.gleu"])
    assert caught.value.help == "did you mean 'aten.gelu'?"


def test_two_items_of_one_name_are_refused(folder: Path) -> None:
    with pytest.raises(NnscalerError, match="two items of the gate are called 'a'"):
        check_names([OpItem("a", "a"), OpItem("a", "b")])
    double = '[tool.nnscaler.gate]\nmodels = [{ model = "m.py", plans = [{ ranks = 2 }, { ranks = 2 }] }]'
    assert "two items of the gate are called 'm.py ranks=2'" in refused(double).message


EXTERNAL = """
[[tool.nnscaler.external]]
target = "sub/check.py::with_tp"
mesh = "dp=2,tp=2"
dtype = ["float64", "bfloat16"]
executor = "both"
checkpoint = true
timeout = "50s"
[[tool.nnscaler.external]]
target = "hf:llama"
tp = [2, 4]
set = ["attention_bias=true"]
sweep-flags = true
seed = 7
[[tool.nnscaler.external]]
torchrun = "train.py --size 4"
ranks = 2
steps = 3
name = "my script"
"""


def test_programs_of_others_are_items(folder: Path) -> None:
    """They need no [tool.nnscaler.gate], and are what the command line would make of the same options."""
    found = settings(EXTERNAL)
    assert [(item.name, item.timeout) for item in found.external] == [
        (
            "sub/check.py::with_tp mesh=dp=2,tp=2 dtype=float64,bfloat16 executor=both checkpoint=yes",
            50.0,
        ),
        ("hf:llama tp=2,4 set=attention_bias=true sweep-flags=yes seed=7", 300.0),
        ("my script", 300.0),
    ]
    lines = (
        ["sub/check.py::with_tp", *"--mesh dp=2,tp=2 --dtype float64 bfloat16 --executor both".split(), "--checkpoint"],
        ["hf:llama", *"--tp 2 4 --set attention_bias=true --sweep-flags --seed 7".split()],
        ["--torchrun", "train.py --size 4", *"--ranks 2 --steps 3".split()],
    )
    for item, words in zip(found.external, lines, strict=True):
        asked = external_request(build_parser().parse_args(["verify-external", *words]))
        assert item.request == replace(asked, timeout=item.request.timeout)
        assert item.request.timeout == pytest.approx(0.8 * item.timeout)


def test_paths_of_programs_of_others_are_relative_to_the_settings(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings(f"[tool.nnscaler.gate]\nseed = 5\n{EXTERNAL}")
    (folder / "inner").mkdir()
    monkeypatch.chdir(folder / "inner")
    first, second, third = (item.request for item in read_settings().external)
    assert first.target == f"{folder}/sub/check.py::with_tp"
    assert (second.target, second.seed, first.seed) == ("hf:llama", 7, 5)
    assert third.script == f"{folder}/train.py --size 4"


@pytest.mark.parametrize(
    ("entry", "told", "line"),
    [
        ('target = "a.py"\ntp = [2]', "[tool.nnscaler.external] 1: --tp is not for a check file", 1),
        ('target = "a.py"\nrank = 2', "[tool.nnscaler.external] 1 has no key 'rank'", 3),
        ("ranks = 2", "nothing is named that could be verified", 1),
        ('target = "hf:llama"\ntp = 2', "tp of [tool.nnscaler.external] 1 is a list of whole numbers", 3),
        ('target = "hf:llama"\ntp = [0]', "tp of [tool.nnscaler.external] 1 is a list of whole numbers", 3),
        ('target = "a.py"\ndtype = ["float8"]', "dtype float8 is none of", 1),
        ('target = "a.py"\nexecutor = "nccl"', "executor of [tool.nnscaler.external] 1 is one of simulator", 3),
        ('torchrun = "a.py \'"', "cannot be read", 1),
    ],
)
def test_programs_of_others_that_cannot_be(folder: Path, entry: str, told: str, line: int) -> None:
    error = refused(f"[[tool.nnscaler.external]]\n{entry}\n")
    assert error.code == "bad_settings" and told in error.message
    assert error.where is not None and error.where.line == line
