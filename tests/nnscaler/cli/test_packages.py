"""Models in packages and projects: how they are named, what they may import, and what is said where it is not there."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from nnscaler.cli.main import main
from nnscaler.errors import NnscalerError
from nnscaler.model_file import load_loss_function, load_model_file
from verify.gate.settings import read_settings

LAYERS = """
import torch

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(6, 8), torch.nn.Linear(8, 3)

    def forward(self, x, labels):
        logits = self.down(torch.relu(self.up(x)))
        return torch.nn.functional.cross_entropy(logits, labels)

def loss(outputs, batch):
    return outputs
"""
NET = """
import torch
from ..layers import Block
from {package}.layers import Block as Same

assert Block is Same

def build_model():
    return Block()

def small():
    return Block()

def sample_inputs():
    return {{"x": torch.randn(12, 6), "labels": torch.randint(0, 3, (12,))}}
"""


def write(folder: Path, **files: str) -> None:
    """`a__b` is `a/b.py`."""
    for name, text in files.items():
        file = folder / (name.replace("__", "/") + ".py")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


@pytest.fixture(autouse=True)
def process() -> Iterator[None]:
    """Remove from the process, after the test, everything that loading leaves in it."""
    modules, path, finders = set(sys.modules), list(sys.path), list(sys.meta_path)
    yield
    for name in set(sys.modules) - modules:
        if name.startswith(("_nnscaler_user_", "sketch", "verify.sketch")):
            del sys.modules[name]
    sys.path[:], sys.meta_path[:] = path, finders


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`src/sketch/models/net.py` in a project, and `tools/alone.py` beside it."""
    package = tmp_path / "src" / "sketch"
    write(package, layers=LAYERS, models__net=NET.format(package="sketch"))
    for folder in (package, package / "models"):
        (folder / "__init__.py").write_text("")
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "sketch"\n')
    write(tmp_path, tools__alone=NET.format(package="sketch").replace("from ..layers", "from sketch.layers"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refused(target: str) -> NnscalerError:
    with pytest.raises(NnscalerError) as caught:
        load_model_file(target, 0).build()
    return caught.value


@pytest.mark.parametrize(
    ("target", "factory"),
    [
        ("src/sketch/models/net.py", "build_model"),
        ("src/sketch/models/net.py::small", "small"),
        ("src/sketch/models/net.py:small", "small"),
        ("sketch.models.net", "build_model"),
        ("sketch.models.net:small", "small"),
        ("sketch.models.net::small", "small"),
        ("tools/alone.py", "build_model"),
    ],
)
def test_what_names_a_model(project: Path, target: str, factory: str) -> None:
    before = list(sys.path)
    model = load_model_file(target, 0)
    file = "tools/alone.py" if "alone" in target else "src/sketch/models/net.py"
    assert (model.path, model.factory, model.name) == (project / file, factory, Path(file).name)
    assert type(model.build()) is sys.modules["sketch.layers"].Block
    assert model.description()["file"] == str(project / file)
    assert sys.path[: len(before)] == before and str(project / "src") in sys.path  # last: it shadows nothing


@pytest.mark.parametrize("here", [".", "src", "src/sketch", "src/sketch/models", "tools"])
def test_a_module_is_found_from_anywhere_in_its_project(
    project: Path, here: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project / here)
    assert load_model_file("sketch.models.net:small", 0).path == project / "src/sketch/models/net.py"
    assert load_loss_function("sketch.layers:loss")(3, {}) == 3


def test_a_package_whose_name_means_something_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import verify as ours

    write(tmp_path / "verify", __init__="flag = 1", layers=LAYERS, models__net=NET.format(package="verify"))
    (tmp_path / "verify" / "__init__.py").write_text("flag = 1")
    (tmp_path / "verify" / "models" / "__init__.py").write_text("from verify import flag")
    monkeypatch.chdir(tmp_path)
    model = load_model_file("verify/models/net.py", 0).build()
    assert type(model).__module__.startswith("_nnscaler_user_")
    assert sys.modules["verify"] is ours and "verify.models" not in sys.modules


def test_relative_imports_of_siblings_in_no_package(tmp_path: Path) -> None:
    write(tmp_path, layers=LAYERS, net=NET.format(package="x").replace("..layers", ".layers"))
    text = (tmp_path / "net.py").read_text().replace("from x.layers import Block as Same", "Same = Block")
    (tmp_path / "net.py").write_text(text)
    assert load_model_file(str(tmp_path / "net.py"), 0).build().up.in_features == 6


def test_a_module_that_is_not_there(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project / "tools")
    error = refused("sketch.models.nets:small")
    assert error.code == "no_such_file"
    assert error.message == (
        "there is no file and no module 'sketch.models.nets': no sketch/models/nets.py and no "
        f"sketch/models/nets/__init__.py in ., {project}, {project / 'src'}, or among the installed packages"
    )
    assert error.help == "nnscaler verify-plan path/to/model.py, or package.module:function"
    assert refused("nothing.py").message == "there is no file 'nothing.py'"
    assert main(["verify-plan", "sketch.models.nets:small", "--plan", "dp=2"]) == 2


def test_an_import_that_finds_nothing_says_where_it_looked(project: Path) -> None:
    write(project, tools__alone="import torch\nimport sketchy_layers\n")
    error = refused("tools/alone.py")
    assert error.message == "cannot import alone.py: ModuleNotFoundError: No module named 'sketchy_layers'"
    assert error.help == "looked for it in tools, ., src, and among the installed packages"
    assert error.where is not None and error.where.line == 2


ARGUMENTS = """
import argparse
import sys

parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, {option})
"""


def test_arguments_with_defaults_are_read_as_if_there_were_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["nnscaler", "verify-plan", "net.py", "--plan", "dp=2"])
    parse = f"{ARGUMENTS.format(option='default=8')}width = parser.parse_args().width\nassert len(sys.argv) == 1\n"
    write(tmp_path, net=f"{parse}{LAYERS}\ndef build_model():\n    assert len(sys.argv) == 1\n    return Block()\n"
          "def sample_inputs():\n    return (parser.parse_args().width,)\n")  # fmt: skip
    model = load_model_file(str(tmp_path / "net.py"), 0)
    assert model.inputs == (8,) and model.build().up.in_features == 6
    assert sys.argv[1] == "verify-plan"


HINT = (
    "the command line is nnscaler's, and this code sees none: give every argument a default, or put what a script does "
    'under: if __name__ == "__main__":'
)


@pytest.mark.parametrize(
    ("text", "code", "line"),
    [
        (ARGUMENTS.format(option="required=True") + "parser.parse_args()\n", "model_import_failed", 7),
        ("import sys\nname = sys.argv[1]\n", "model_import_failed", 2),
        (
            ARGUMENTS.format(option="required=True")
            + "def build_model():\n    return parser.parse_args()\ndef sample_inputs():\n    return ()\n",
            "model_raised",
            8,
        ),
    ],
)
def test_a_command_line_that_is_not_the_models(text: str, code: str, line: int, tmp_path: Path) -> None:
    write(tmp_path, net=text)
    error = refused(str(tmp_path / "net.py"))
    assert (error.code, error.help) == (code, HINT), error
    assert error.where is not None and error.where.line == line


def test_gate_items_and_tokens_name_the_file(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = '[[tool.nnscaler.gate.models]]\nmodel = "sketch.models.net:small"\nplans = [{ ranks = 2, plan = "dp=2" }]\n'
    (project / "pyproject.toml").write_text(f"{text}[tool.nnscaler.gate.ops]\nuser = true\n")
    for here, path in ((".", "src/sketch/models/net.py"), ("tools", str(project / "src/sketch/models/net.py"))):
        monkeypatch.chdir(project / here)
        settings = read_settings(project / "pyproject.toml", {})
        (item,) = settings.plans
        assert (item.name, item.request.model) == ("sketch.models.net:small ranks=2 plan=dp=2", f"{path}::small")
        assert settings.sources[0].files == (path,)


def test_compiled_verified_and_reproduced(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from nnscaler.cli.commands.verify_plan import plan_request
    from nnscaler.cli.main import build_parser
    from verify.programs.request import WORDS, make_token

    model = "sketch.models.net:small"
    assert main(["compile", model, "--ranks", "2", "--plan", "dp=2", "--out", "program", "-q"]) == 0
    quick = ["--backend", "simulator", "--quick", "--steps", "1", "--level", "run", "-q"]
    assert main(["verify-plan", model, "--program", "program", "--ranks", "2", *quick]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("VERIFIED  net.py on 2 ranks")
    options = build_parser().parse_args(["verify-plan", model, "--plan", "dp=2", *quick])
    token = make_token(replace(plan_request(options), ranks=2))
    assert token.request["model"] == "src/sketch/models/net.py::small"
    word = WORDS.encode(token)
    assert word is not None and main(["reproduce", word, "-q"]) == 0
