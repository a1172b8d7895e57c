"""`nnscaler checkpoint`: what it prints, what it writes, and its exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from nnscaler.cli.main import main
from nnscaler.runtime.training.saving.checkpoint import RunRecord, begin, publish, run_objects
from nnscaler.runtime.training.saving.dcp import whole, write_part
from nnscaler.training.saving.weights import INDEX

STATE = {"a.weight": torch.arange(6.0).view(2, 3), "b.count": torch.tensor(3)}


def write(folder: Path, value: float = 0.0) -> Path:
    state = {**STATE, "a.weight": STATE["a.weight"] + value}
    record = RunRecord(7, 8, tied=(("a.weight", "head.weight"),), model="Tiny", metric=1.5)
    temporary = begin(folder)
    objects = {**run_objects(record), ("optimizer", "class"): "AdamW", ("loader",): {"epoch": 1}}
    write_part(temporary, 0, [whole(("model", n), t) for n, t in state.items()], objects)
    publish(temporary, folder, 1)
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    write(tmp_path / "run" / "step_000003")
    write(tmp_path / "run" / "step_000007")
    return tmp_path / "run"


def test_info(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "info", str(run), "-v"]) == 0
    told = capsys.readouterr()
    assert told.out.splitlines() == [
        f"{run}/step_000007",
        "step       7 (8 batches)",
        f"written    by 1 ranks, torch {torch.__version__}, Tiny",
        "score      1.5",
        "model      2 tensors; 32 bytes with the optimizer's state",
        "optimizer  AdamW",
        "besides    loader",
    ]
    assert "a.weight  float32[2, 3]" in told.err
    assert main(["checkpoint", "info", str(run / "step_000003"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["run"]["step"] == 7 and found["tensors"]["b.count"] == [[], "int64"]


def test_convert(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from safetensors.torch import load_file

    assert main(["checkpoint", "convert", str(run), str(tmp_path / "w.pt"), "--format", "torch"]) == 0
    assert capsys.readouterr().out == f"{tmp_path}/w.pt\n"
    found = torch.load(tmp_path / "w.pt", weights_only=True)
    assert set(found) == {*STATE, "head.weight"} and torch.equal(found["head.weight"], STATE["a.weight"])
    assert (
        main(["checkpoint", "convert", str(run), str(tmp_path / "one"), "--dtype", "bfloat16", "--prefix", "a."]) == 0
    )
    found = load_file(tmp_path / "one" / "model.safetensors")
    assert found["weight"].dtype == torch.bfloat16 and found["b.count"].dtype == torch.int64
    (tmp_path / "config.json").write_text("{}")
    arguments = ["--config", str(tmp_path / "config.json"), "--file-bytes", "24"]
    assert main(["checkpoint", "convert", str(run), str(tmp_path / "two"), *arguments]) == 0
    index = json.loads((tmp_path / "two" / INDEX).read_text())
    assert index["metadata"]["total_size"] == 32 and len(set(index["weight_map"].values())) == 2
    assert (tmp_path / "two" / "config.json").read_text() == "{}"


def test_verify(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "verify", str(run)]) == 0
    assert capsys.readouterr().out == f"{run}/step_000007: 5 entries read, 0 wrong\n"
    assert main(["checkpoint", "verify", str(run / "step_000003"), str(run)]) == 0
    other = write(tmp_path / "other", 1.0)
    assert main(["checkpoint", "verify", str(run), str(other)]) == 1
    assert f"model.a.weight differs in {other}" in capsys.readouterr().out
    broken = write(tmp_path / "broken", float("nan"))
    assert main(["checkpoint", "verify", str(broken)]) == 1
    assert "model.a.weight is not finite" in capsys.readouterr().out


def test_what_is_no_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "step_000001.saving").mkdir()
    for place in (tmp_path, tmp_path / "nothing"):
        assert main(["checkpoint", "info", str(place)]) == 2
        assert f"error: {place} is no checkpoint" in capsys.readouterr().err
