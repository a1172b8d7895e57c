"""The user's model file, and what is said when something about it is wrong."""

from __future__ import annotations

import pathlib
from pathlib import Path

import pytest
import torch

import op_registry

import nnscaler
import verify
from nnscaler.errors import NnscalerError
from nnscaler.is_user_file import from_package_on
from nnscaler.model_file import TEMPLATE, is_users, load_model_file


def write(folder: Path, text: str, name: str = "model.py") -> str:
    (folder / name).write_text(text)
    return str(folder / name)


def refused(target: str) -> NnscalerError:
    with pytest.raises(NnscalerError) as caught:
        model = load_model_file(target, 0)
        model.build()
    return caught.value


def test_the_template_is_a_model_file(tmp_path: Path) -> None:
    model = load_model_file(write(tmp_path, TEMPLATE), 0)
    inputs = model.inputs
    assert isinstance(inputs, dict)
    assert model.build()(**inputs).ndim == 0
    assert model.name == "model.py"


def test_the_seed_decides_parameters_and_batch(tmp_path: Path) -> None:
    target = write(tmp_path, TEMPLATE)
    models = [load_model_file(target, seed) for seed in (0, 0, 1)]
    batches = [m.inputs["x"] for m in models]  # type: ignore[call-overload]
    weights = [m.build().state_dict()["layer.weight"] for m in models]
    for one, same, other in (batches, weights):
        assert torch.equal(one, same) and not torch.equal(one, other)


def test_another_factory(tmp_path: Path) -> None:
    target = write(tmp_path, TEMPLATE + "\ndef other():\n    return torch.nn.Identity()\n")
    assert isinstance(load_model_file(f"{target}::other", 0).build(), torch.nn.Identity)


def test_no_file(tmp_path: Path) -> None:
    assert refused(str(tmp_path / "none.py")).code == "no_such_file"


@pytest.mark.parametrize("text", ["x = 1\n", "def build_model(): ...\n", "def sample_inputs(): ...\n"])
def test_a_file_without_the_functions_gets_a_template(text: str, tmp_path: Path) -> None:
    error = refused(write(tmp_path, text))
    assert error.code == "model_incomplete"
    assert error.help is not None and "def sample_inputs()" in error.help


def test_an_unknown_factory_lists_what_there_is(tmp_path: Path) -> None:
    error = refused(write(tmp_path, TEMPLATE) + "::tiny")
    assert "tiny" in error.message and "build_model" in error.message


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("import torch\nimport no_such_package\n", 2),
        ("def f():\n    return 1 / 0\n\nf()\n", 2),
        ("def f(:\n", 1),
    ],
)
def test_errors_at_import_name_the_users_line(text: str, line: int, tmp_path: Path) -> None:
    target = write(tmp_path, text)
    error = refused(target)
    assert error.code == "model_import_failed"
    assert error.where is not None and (error.where.file, error.where.line) == (target, line)


@pytest.mark.parametrize("line", ["importlib.import_module('no_such_package')", "import no_such_package"])
@pytest.mark.parametrize("beside", ["", "types.py"])  # a name that means something else: our hook imports then
def test_failed_imports_are_of_the_users_line(
    line: str, beside: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither of our hooks nor of `<frozen importlib>`, which a path relative to the current folder would be in it."""
    monkeypatch.chdir(tmp_path)
    target = write(tmp_path, f"import importlib\n{line}\n")
    if beside:
        write(tmp_path, "", beside)
    error = refused(target)
    assert error.where is not None and (error.where.file, error.where.line) == (target, 2)


def test_files_of_ours_are_not_the_users(tmp_path: Path) -> None:
    mine = write(tmp_path, "", "verify.py")
    for file in (nnscaler.__file__, verify.__file__, op_registry.__file__, torch.__file__, pathlib.__file__):
        assert not is_users(file)
    assert is_users(mine) and is_users(__file__) and not is_users("<string>") and not is_users(None)
    assert is_users(str(Path(str(nnscaler.__file__)).parents[1] / "nnscaler_models" / "gpt.py"))  # only named like us
    assert is_users(str(tmp_path / "my-site-packages" / "gpt.py"))
    for packages in ("site-packages", "dist-packages"):
        installed = str(tmp_path / packages / "gpt" / "model.py")
        assert not is_users(installed) and from_package_on(installed) == str(Path("gpt", "model.py"))
    assert from_package_on(mine) is None


def test_errors_of_the_factory_name_the_users_line(tmp_path: Path) -> None:
    text = TEMPLATE.replace("return Model()", "return Model() + 1")
    error = refused(write(tmp_path, text))
    assert error.code == "model_raised"
    assert error.where is not None and error.where.text == "return Model() + 1"


def test_sys_exit_at_import_is_an_error(tmp_path: Path) -> None:
    error = refused(write(tmp_path, "import sys\nsys.exit('done')\n"))
    assert error.code == "model_import_failed" and "__main__" in str(error.help)


@pytest.mark.parametrize(
    "line", ["torch.empty(10**15)", "bytearray(10**17)", "raise RuntimeError('CUDA out of memory.')"]
)
def test_a_model_that_does_not_fit_is_told_of_the_meta_device(line: str, tmp_path: Path) -> None:
    text = f"import torch\ndef build_model():\n    {line}\ndef sample_inputs():\n    return {{}}\n"
    file = tmp_path / "model.py"
    file.write_text(text)
    with pytest.raises(NnscalerError, match=r"build_model\(\) of model.py runs out of memory: ") as caught:
        load_model_file(str(file), 0).build()
    error = caught.value
    assert error.code == "out_of_memory" and error.where is not None and error.where.line == 3
    assert error.help is not None
    for told in ('with torch.device("meta"):', "--level static", "nnscaler plan", "model.py::small_model"):
        assert told in error.help
    other = tmp_path / "other.py"
    other.write_text(text.replace("return {}", "return torch.empty(10**15)"))
    with pytest.raises(NnscalerError, match="sample_inputs") as caught:
        load_model_file(str(other), 0)
    assert "smaller batch" in str(caught.value.help) and "meta" not in str(caught.value.help)


def test_another_error_that_speaks_of_memory_is_not_taken_for_it(tmp_path: Path) -> None:
    file = tmp_path / "model.py"
    file.write_text(
        "def build_model():\n    raise RuntimeError('expected contiguous memory format')\n"
        "def sample_inputs():\n    return {}\n"
    )
    with pytest.raises(NnscalerError) as caught:
        load_model_file(str(file), 0).build()
    assert caught.value.code == "model_raised"
