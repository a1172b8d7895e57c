"""Start the launcher from the tensors of a program's folder, and those of a checkpoint in their places."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from nnscaler.records_as_json import encode
from nnscaler.runtime import launch
from nnscaler.runtime.communication.communicator import ProgramError
from nnscaler.runtime.program.program_directory import describe_state
from nnscaler.runtime.training.saving.checkpoint import RunRecord, begin, publish, run_objects
from nnscaler.runtime.training.saving.dcp import whole, write_part
from tests.nnscaler.runtime_processes.test_launch import write_program_of_one_rank


def replace_tensor(folder: Path, name: str, value: torch.Tensor | None) -> None:
    state = torch.load(folder / "state.pt", weights_only=True)
    torch.save({n: t for n, t in {**state, name: value}.items() if t is not None}, folder / "state.pt")


def write_checkpoint(folder: Path, state: Mapping[str, torch.Tensor]) -> Path:
    """Write a checkpoint of one rank at step 1."""
    temporary = begin(folder)
    write_part(temporary, 0, [whole(("model", n), t) for n, t in state.items()], run_objects(RunRecord(1, 1)))
    publish(temporary, folder, 1)
    return folder


def test_weights_that_are_not_those_that_were_compiled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_program_of_one_rank(tmp_path)
    arguments = [str(tmp_path), "--device", "cpu", "--steps", "1"]
    replace_tensor(tmp_path, "second.weight", torch.ones(1, 3))
    assert launch.main(arguments) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert "error: `second.weight` in " in told.err
    assert "is not what the program was compiled with" in told.err and "need --own-weights" in told.err
    assert launch.main([*arguments, "--own-weights"]) == 0
    assert capsys.readouterr().out.splitlines()[0].endswith("cpu, own weights")
    for value, message in ((None, "lacks `second.weight`"), (torch.ones(3, 1), "is float32[3, 1], and the program's")):
        replace_tensor(tmp_path, "second.weight", value)
        assert launch.main([*arguments, "--own-weights"]) == 2
        assert message in capsys.readouterr().err
    (tmp_path / "state.pt").write_bytes(b"PK")
    assert launch.main(arguments) == 2
    assert "state.pt cannot be read, it may be cut short" in capsys.readouterr().err


def change_manifest(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    edit(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))


def test_a_hash_that_is_gone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_program_of_one_rank(tmp_path)
    arguments = [str(tmp_path), "--device", "cpu", "--steps", "1"]
    change_manifest(tmp_path, lambda manifest: manifest["state"]["second.weight"].update(sha256=None))
    assert launch.main(arguments) == 2
    told = capsys.readouterr().err
    assert "has no hash of `second.weight`" in told and "weights of yours need --own-weights" in told
    assert launch.main([*arguments, "--own-weights"]) == 0


def test_a_tied_weight_with_two_values(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state, _ = write_program_of_one_rank(tmp_path)
    more = {**state, "tied.weight": state["second.weight"] + 1}
    both = ["second.weight", "tied.weight"]
    tied = [{"fqns": both, "shape": [1, 3], "dtype": "float32", "trainable": True, "used": True}]
    change_manifest(tmp_path, lambda manifest: manifest.update(parameters=tied, state=encode(describe_state(more))))
    torch.save(more, tmp_path / "state.pt")
    for own in ([], ["--own-weights"]):
        assert launch.main([str(tmp_path), "--device", "cpu", "--steps", "1", *own]) == 2
        assert "`second.weight` and `tied.weight` in " in capsys.readouterr().err
    more["tied.weight"] = state["second.weight"]
    torch.save(more, tmp_path / "state.pt")
    assert launch.main([str(tmp_path), "--device", "cpu", "--steps", "1", "--own-weights"]) == 0


def test_another_sample_batch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, x = write_program_of_one_rank(tmp_path)
    torch.save({"x": x * 0}, tmp_path / "inputs.pt")
    assert launch.main([str(tmp_path), "--device", "cpu"]) == 2
    assert "inputs.pt is not what the program was compiled with" in capsys.readouterr().err
    change_manifest(tmp_path, lambda manifest: manifest.pop("batch"))
    assert launch.main([str(tmp_path), "--device", "cpu"]) == 2
    assert "has no record of its tensors" in capsys.readouterr().err


def test_a_constant_belongs_to_the_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state, _ = write_program_of_one_rank(tmp_path)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    manifest["state"] = encode(describe_state({**state, "_constants.0": torch.ones(2)}))
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    replace_tensor(tmp_path, "_constants.0", torch.zeros(2))
    assert launch.main([str(tmp_path), "--device", "cpu", "--own-weights"]) == 2
    assert "it belongs to the model's code" in capsys.readouterr().err


def test_a_checkpoint_takes_the_place_of_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_program_of_one_rank(tmp_path / "program")
    arguments = [str(tmp_path / "program"), "--device", "cpu", "--steps", "1"]
    assert launch.main([*arguments, "--save", str(tmp_path / "saved")]) == 0
    replace_tensor(tmp_path / "program", "second.weight", torch.ones(1, 3))
    assert launch.main([*arguments, "--load", str(tmp_path / "saved")]) == 0
    capsys.readouterr()
    write_checkpoint(tmp_path / "other", {"third": torch.ones(2)})
    for place, message in (("nothing", "is no checkpoint: it has no .metadata"), ("other", "of another model")):
        assert launch.main([*arguments, "--load", str(tmp_path / place)]) == 2
        assert message in capsys.readouterr().err


def test_a_checkpoint_that_is_cut_short(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_program_of_one_rank(tmp_path)
    for file in (".metadata", "__0_0.distcp"):
        saved = write_checkpoint(tmp_path / "saved", {"second.weight": torch.ones(1, 3)})
        os.truncate(saved / file, (saved / file).stat().st_size // 2)
        assert launch.main([str(tmp_path), "--load", str(saved)]) == 2
        assert f"{saved} cannot be read, it may be cut short" in capsys.readouterr().err
        shutil.rmtree(saved)


def test_a_checkpoint_of_a_model_with_other_shapes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_program_of_one_rank(tmp_path / "program")
    arguments = [str(tmp_path / "program"), "--device", "cpu", "--steps", "1"]
    assert launch.main([*arguments, "--dtype", "float64", "--save", str(tmp_path / "saved")]) == 0
    assert launch.main([*arguments, "--load", str(tmp_path / "saved")]) == 0  # in float32
    for tensor, kind in ((torch.ones(2, 3), "float32[2, 3]"), (torch.ones(1, 3, dtype=torch.int64), "int64[1, 3]")):
        other = write_checkpoint(tmp_path / kind, {"second.weight": tensor})
        capsys.readouterr()
        assert launch.main([*arguments, "--load", str(other)]) == 2
        told = f"is a checkpoint of another model: `second.weight` is {kind} in it, and the program's is float32[1, 3]"
        assert told in capsys.readouterr().err


def test_a_run_in_another_precision_saves_complex_numbers_for_others_too() -> None:
    narrow = torch.zeros(2, dtype=torch.complex64)
    launch._check_same_kind("weight", narrow.to(torch.complex128), narrow, "saved")
    with pytest.raises(ProgramError, match="saved is a checkpoint of another model: `weight` is complex64"):
        launch._check_same_kind("weight", narrow, narrow.real, "saved")


def test_a_checkpoint_that_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is found before the first step; and a disk that is full after the last one is no crash."""
    write_program_of_one_rank(tmp_path / "program")
    (tmp_path / "file").write_text("")
    arguments = [str(tmp_path / "program"), "--device", "cpu", "--steps", "1"]
    assert launch.main([*arguments, "--save", str(tmp_path / "file" / "saved")]) == 2
    told = capsys.readouterr()
    assert told.out == "" and told.err == f"error: cannot write the checkpoint {tmp_path}/file/saved: Not a directory\n"

    def full(content: object, file: object) -> None:
        try:
            raise OSError(errno.ENOSPC, "No space left on device")
        finally:
            raise RuntimeError("unexpected pos 704 vs 598")  # as torch does

    monkeypatch.setattr(torch, "save", full)
    assert launch.main([*arguments, "--save", str(tmp_path / "saved")]) == 2
    assert capsys.readouterr().err == f"error: cannot write the checkpoint {tmp_path}/saved: No space left on device\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "program"]


def test_a_role_file_that_was_edited_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It may be edited on purpose: the program runs as it is."""
    write_program_of_one_rank(tmp_path)
    arguments = [str(tmp_path), "--device", "cpu", "--steps", "1"]
    assert launch.main(arguments) == 0
    assert "warning" not in capsys.readouterr().err
    role = tmp_path / "role_0.py"
    role.write_text(role.read_text() + "# a note of mine\n")
    assert launch.main(arguments) == 0
    check = f"`nnscaler verify-plan MODEL --program {tmp_path}` says whether it is still right"
    assert capsys.readouterr().err == f"warning: {role} was changed after it was generated; {check}\n"
