"""The settings of a run: read from a file and a command line, every key checked, and told in the manual."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from nnscaler.errors import NnscalerError
from nnscaler.training.read_settings import all_options, idle, ranks_of, read_settings, settings_of

FILE = """\
model = "models/gpt.py::small"
steps = 8

[data]
source = "text.py::datasets"
packed = 16

[optimizer]
lr = 3e-4
betas = [0.9, 0.95]
groups = { "*.bias" = { weight_decay = 0.0 } }

[hooks]
on_step = "hooks.py::print_rate"
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(FILE)
    return path


def test_a_file_is_read(file: Path) -> None:
    found = read_settings(file)
    assert (found.steps, found.data.packed, found.data.batch_size) == (8, 16, 32)
    assert found.optimizer.arguments == {"lr": 3e-4, "betas": [0.9, 0.95]}
    assert found.optimizer.groups == {"*.bias": {"weight_decay": 0.0}}
    assert found.model == f"{file.parent}/models/gpt.py::small"  # from the file's folder
    assert found.data.source == f"{file.parent}/text.py::datasets"
    assert found.hooks.on_step == (f"{file.parent}/hooks.py::print_rate",)


@pytest.mark.parametrize(
    ("pipeline", "found"), [("zb-h1", "zb-h1"), ("mine.py::f", "{}/mine.py::f"), ("a.csv", "{}/a.csv")]
)
def test_the_file_of_a_schedule_is_beside_the_settings(file: Path, pipeline: str, found: str) -> None:
    file.write_text(f'pipeline = "{pipeline}"\n{file.read_text()}')
    assert read_settings(file).pipeline == found.format(file.parent)


def test_the_command_line_goes_first(file: Path) -> None:
    words = ["--ranks=2", "--plan=dp=2,zero=1", "--steps", "5", "--dtype=float64", "--checkpoints.folder=runs/a"]
    words += ["--lr=1e-2", "--optimizer.fused=false", "--data.shuffle=false", "--checkpoints.asynchronous"]
    words += ["--schedule.name=CosineAnnealingLR", "--schedule.T_max=7", "--hooks.on_end=a.py::f,b.py::g", "--clip=1"]
    found = read_settings(file, [*words, "--check-replicas-every=3"])
    assert (found.ranks, found.plan, found.steps, found.clip) == (2, "dp=2,zero=1", 5, 1.0)
    assert (found.precision.dtype, found.checkpoints.folder, found.data.shuffle) == ("float64", "runs/a", False)
    assert found.optimizer.arguments == {"lr": 1e-2, "betas": [0.9, 0.95], "fused": False}
    assert (found.schedule.name, found.schedule.arguments) == ("CosineAnnealingLR", {"T_max": 7})
    assert found.checkpoints.asynchronous is True
    assert (found.hooks.on_end, found.check_replicas_every) == (("a.py::f", "b.py::g"), 3)


WRONG = {
    ("steps = 8", "stps = 8"): "a run has no key 'stps'\n  --> {file}:2   stps = 8\n  help: did you mean steps?",
    ("packed", "paked"): "[data] has no key 'paked'\n  --> {file}:6   paked = 16\n  help: did you mean packed?",
    ("= 16", '= "16"'): '`data.packed` is a whole number, not "16"\n  --> {file}:6   packed = "16"',
    ("steps = 8", f"seed = {2**70}"): "`seed` is 1180591620717411303424, which has more than 63 bits",
    ("steps = 8", "steps = -8"): "`steps` is -8, and at least 0 is needed\n  --> {file}:2   steps = -8",
    ("[data]", "[data]\nbatch_size = 0"): "`data.batch_size` is 0, and at least 1 is needed",
    ("[data]", "checkpoints = 3\n[data]"): "`checkpoints` is a table: [checkpoints]",
    ('{ "*.bias" = { weight_decay = 0.0 } }', "3"): "`optimizer.groups` is a table of tables",
    ('source = "text.py::datasets"', ""): "`data.source` is missing",
    ("[data]", '[checkpoints]\nbest = "lowest"\n[data]'): "`checkpoints.best` is 'lowest'",
    ("[data]", "[profiler]\nfirst = 5\nlast = 3\n[data]"): "the profiler's first step is 5 and its last 3",
    ("steps = 8", "steps = 8\nclip = nan"): "`clip` is nan, and at least 0 is needed",
    ("steps = 8", "epochs = 0"): "neither `steps` nor `epochs` says when training ends",
}


@pytest.mark.parametrize("edit", WRONG)
def test_what_is_wrong_in_a_file_is_told_with_its_line(file: Path, edit: tuple[str, str]) -> None:
    file.write_text(FILE.replace(*edit))
    with pytest.raises(NnscalerError) as error:
        read_settings(file)
    assert error.value.code == "bad_settings"
    assert WRONG[edit].format(file=file) in str(error.value)


WORDS = {
    "--stepps=3": "there is no option --stepps\n  help: did you mean --steps?",
    "--checkpoints.foldr=x": "help: did you mean --checkpoints.folder",
    "--batchsize=3": "help: did you mean --batch_size",
    "--steps=many": '`steps` is a whole number, not "many"',
    "steps=3": "'steps=3' is no option\n  help: --steps=3",
    "--steps": "--steps has no value",
    "--optimizer.groups.x=3": "groups are given in a file",
    "--checkpoints=3": "there is no option --checkpoints",
}


@pytest.mark.parametrize("word", WORDS)
def test_what_is_wrong_on_the_command_line_is_told(file: Path, word: str) -> None:
    with pytest.raises(NnscalerError) as error:
        read_settings(file, [word])
    assert WORDS[word] in str(error.value)


IDLE: list[tuple[dict[str, Any], str]] = [
    ({"schedule": {"max_lr": 1.0, "per": "epoch"}}, "`schedule.name`.* no effect of `schedule.per`, `schedule.max_lr`"),
    ({"checkpoints": {"every": 2, "keep": 1}}, "`checkpoints.folder` .* of `checkpoints.every`, `checkpoints.keep`"),
    ({"profiler": {"last": 3}}, "`profiler.first` is not set"),
    ({"weights_prefix": "model."}, "`weights` is not set"),
    (
        {"checkpoints": {"folder": "runs", "every": 3}, "validation": {"every": 2}},
        "`checkpoints.every` = 3 is no multiple of `validation.every` = 2",
    ),
    ({"precision": {"dtype": "float64", "param": "bfloat16"}}, "`precision.dtype` is set.* no effect of .*param`"),
]


@pytest.mark.parametrize(("given", "told"), IDLE)
def test_settings_that_do_nothing_are_told(given: dict[str, Any], told: str) -> None:
    (found,) = idle(settings_of(given))
    assert re.match(told, found)
    more = {"schedule": {"name": "StepLR", "step_size": 2}, "validation": {"every": 1}, "weights": "w"}
    assert not idle(settings_of({**more, "checkpoints": {"folder": "runs", "every": 2}}))


def test_python_gives_tables_as_dicts() -> None:
    found = settings_of(
        {
            "model": "m.py",
            "optimizer": {"name": "SGD", "lr": 0.1},
            "checkpoints": {"folder": "a", "every": None},
            "plan": None,
        }
    )
    assert (found.optimizer.name, found.optimizer.arguments, found.checkpoints.folder) == ("SGD", {"lr": 0.1}, "a")
    with pytest.raises(NnscalerError, match="has no key 'modle'"):
        settings_of({"modle": "m.py"})


@pytest.mark.parametrize(
    ("fields", "ranks"),
    [({}, 1), ({"ranks": 3}, 3), ({"plan": "dp=2,tp=2"}, 4), ({"plan": "auto", "ranks": 2}, 2), ({"plan": "auto"}, 1)],
)
def test_the_plan_says_how_many_ranks(fields: dict[str, Any], ranks: int) -> None:
    assert ranks_of(settings_of(fields)) == ranks


def test_a_plan_for_other_ranks_is_refused() -> None:
    with pytest.raises(NnscalerError) as error:
        ranks_of(settings_of({"plan": "dp=2", "ranks": 3}))
    assert error.value.code == "plan_illegal"


def test_every_option_is_explained(repository: Path) -> None:
    manual = (repository / "docs" / "train.md").read_text(encoding="utf-8")
    for option in all_options():
        assert option.help, option.path
        assert f"| `{option.path}` | `{option.default}` |" in manual, option.path


def test_a_list_on_the_command_line_is_as_in_a_file_or_its_items_alone(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('model = "m.py"\nsteps = 1\n[data]\nsource = "m.py::data"\nbatch_size = 1\n')
    for text in ("m.py::f,m.py::g", '["m.py::f", "m.py::g"]'):
        assert read_settings(file, [f"--hooks.on_step={text}"]).hooks.on_step == ("m.py::f", "m.py::g")
