"""Training a program under torchrun: two stages on two ranks, written by hand."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from nnscaler.errors import NnscalerError
from nnscaler.records_as_json import encode
from nnscaler.runtime import launch
from nnscaler.runtime.communication.communicator import ProgramError
from nnscaler.runtime.communication.join_process_group import ProcessPlace, torchrun_place
from nnscaler.runtime.program.program_directory import (
    describe_state,
    groups_of,
    pairs_of,
    rank_with_loss,
    read_program,
)
from nnscaler.runtime.training.saving.checkpoint import load_checkpoint
from nnscaler.training.program_on_rank import joined
from tests.sampling import every

Write = Callable[[Path], tuple[dict[str, torch.Tensor], torch.Tensor]]

HEAD = """
import torch
from nnscaler.runtime import Input, Loss, Parameter, Partial, Receive, Send, Sharded, Stage, comm

aten = torch.ops.aten
"""

FIRST = """
class Stage0(Stage):
    index = 0
    ranks = (0, 1)
    axes = {"dp": 2}
    micro_batches = 2
    parameters = {"w": Parameter("first.weight", (3, 4), "float32", {}, reduce=("dp",))}
    inputs = {"x": Input("x", {"dp": Sharded(0), "micro": Sharded(0, outer=2)})}
    sends = (Send("h", 1, peers=(2, 3)),)

    def forward(self, x):
        return {"h": aten.tanh(aten.linear(x, comm.replicate(self.w, self.dp)))}
"""

SECOND = """
class Stage1(Stage):
    index = 1
    ranks = (2, 3)
    axes = {"dp": 2}
    micro_batches = 2
    parameters = {"w": Parameter("second.weight", (1, 3), "float32", {}, reduce=("dp",))}
    receives = {"h": Receive("h", 0, (2, 3), "float32", peers=(0, 1))}
    loss = Loss({"dp": Partial(), "micro": Partial()})

    def forward(self, h):
        return {"loss": aten.sum(aten.square(aten.linear(h, self.w)))}
"""
FIRST = FIRST.replace("comm.replicate(self.w, self.dp)", "self.w")  # summed by the reducer, by `reduce`


def write_program(folder: Path) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """State and input of a program of four ranks."""
    generator = torch.Generator().manual_seed(3)
    state = {
        "first.weight": torch.randn(3, 4, generator=generator),
        "second.weight": torch.randn(1, 3, generator=generator),
    }
    x = torch.randn(8, 4, generator=generator)
    roles = []
    for role, (text, name, ranks) in enumerate(((FIRST, "Stage0", (0, 1)), (SECOND, "Stage1", (2, 3)))):
        order = f'\nSTAGES = ({name},)\nRANKS = {ranks}\nSCHEDULE = "F{role}.0 F{role}.1 B{role}.0 B{role}.1"\n'
        digest = write_role(folder, role, HEAD + text + order)
        roles.append({"file": f"role_{role}.py", "sha256": digest, "ranks": ranks, "stages": [role]})
    manifest = {
        "format": 1,
        "model": {"name": "Tiny", "file": "tiny.py"},
        "ranks": 4,
        "axes": [["dp", 2], ["pp", 2]],
        "micro_batches": 2,
        "schedule": "1f1b",
        "roles": roles,
        "inputs": [{"name": "x", "shape": list(x.shape), "dtype": "float32"}],
        "tensors": {},
        "state": encode(describe_state(state)),
        "batch": encode(describe_state({"x": x})),
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    torch.save(state, folder / "state.pt")
    torch.save({"x": x}, folder / "inputs.pt")
    return state, x


def losses_on_one_device(state: dict[str, torch.Tensor], x: torch.Tensor, steps: int, lr: float) -> list[float]:
    weights = [w.double().requires_grad_() for w in state.values()]
    optimizer = torch.optim.SGD(weights, lr=lr)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (torch.tanh(x.double() @ weights[0].t()) @ weights[1].t()).square().sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def run(command: list[str], repository: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(repository), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", *command]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)


def write_program_of_two_ranks(tmp_path: Path) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """One rank for each stage."""
    state, x = write_program(tmp_path)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    roles = [dict(role, ranks=[i]) for i, role in enumerate(manifest["roles"])]
    (tmp_path / "manifest.json").write_text(json.dumps(manifest | {"ranks": 2, "axes": [["pp", 2]], "roles": roles}))
    for role in range(2):
        file = tmp_path / f"role_{role}.py"
        text = file.read_text().replace('{"dp": 2}', '{"dp": 1}').replace('(2, 3), "float32"', '(4, 3), "float32"')
        text = text.replace("outer=2", "outer=1")
        for old, new in (("(0, 1)", "(0,)"), ("(2, 3)", "(1,)")):
            for name in ("ranks = ", "RANKS = ", "peers="):
                text = text.replace(f"{name}{old}", f"{name}{new}")
        file.write_text(text)
    return state, x


@pytest.mark.parametrize(
    ("ranks", "write", "axes"),
    [(2, write_program_of_two_ranks, "pp=2"), pytest.param(4, write_program, "dp=2 pp=2", marks=pytest.mark.long)],
)
def test_trains_under_torchrun(ranks: int, write: Write, axes: str, repository: Path, tmp_path: Path) -> None:
    expected = losses_on_one_device(*write(tmp_path), steps=3, lr=0.05)
    (tmp_path / "verify.py").write_text("raise SystemExit('the wrong module')")
    command = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m", "nnscaler.runtime.launch"]
    result = run(
        [*command, ".", "--steps", "3", "--lr", "0.05", "--dtype", "float64", "--stop-on-nan"], repository, tmp_path
    )
    assert result.returncode == 0, result.stderr
    head, *lines = result.stdout.splitlines()
    assert head == f"tiny.py on {ranks} ranks over gloo ({axes}, 1f1b, 2 micro-batches): sgd, lr 0.05, float64, cpu"
    assert [line.split("  loss ")[0] for line in lines] == ["step 1", "step 2", "step 3"]
    losses = [float(line.split("loss ")[1]) for line in lines]
    assert losses == pytest.approx(expected, rel=1e-12)


def test_a_wrong_number_of_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_program(tmp_path)
    assert launch.main([str(tmp_path)]) == 2
    message = capsys.readouterr().err
    assert "is a program for 4 ranks, and 1 run" in message
    assert "torchrun --nproc-per-node 4 -m nnscaler.runtime.launch" in message
    assert launch.main([str(tmp_path / "nothing")]) == 2
    assert "is not a compiled program: it has no manifest.json" in capsys.readouterr().err


def write_program_of_one_rank(tmp_path: Path) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    tmp_path.mkdir(exist_ok=True)
    state, x = write_program(tmp_path)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    text = HEAD + FIRST + SECOND + '\nSTAGES = (Stage0, Stage1)\nRANKS = (0,)\nSCHEDULE = "F0.0 F1.0 B1.0 B0.0"\n'
    text = text.replace("micro_batches = 2", "micro_batches = 1").replace('(2, 3), "float32"', '(8, 3), "float32"')
    for ranks in ("(0, 1)", "(2, 3)"):
        text = text.replace(f"ranks = {ranks}", "ranks = (0,)").replace(f"peers={ranks}", "peers=(0,)")
    digest = write_role(tmp_path, 0, text.replace('{"dp": 2}', '{"dp": 1}').replace("outer=2", "outer=1"))
    role = {"file": "role_0.py", "sha256": digest, "ranks": [0], "stages": [0, 1]}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest | {"ranks": 1, "axes": [], "roles": [role]}))
    return state, x


def write_role(folder: Path, role: int, text: str) -> str:
    (folder / f"role_{role}.py").write_text(text)
    return hashlib.sha256(text.encode()).hexdigest()


def test_one_rank_needs_no_torchrun(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state, x = write_program_of_one_rank(tmp_path)
    assert launch.main([str(tmp_path), "--dtype", "float64", "--steps", "2", "--device", "cpu"]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.startswith("tiny.py on 1 rank (1f1b, 2 micro-batches): sgd, lr 0.01")
    expected = losses_on_one_device(state, x, steps=2, lr=0.01)
    assert [float(line.split("loss ")[1]) for line in lines] == pytest.approx(expected, rel=1e-12)


def test_clipping_and_going_on_from_a_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_program_of_one_rank(tmp_path / "program")
    saved = str(tmp_path / "checkpoint")

    def lines(*more: str) -> list[str]:
        common = [str(tmp_path / "program"), "--dtype", "float64", "--device", "cpu"]
        assert launch.main([*common, "--clip-grad-norm", "0.25", "--loss-scale", "1024", *more]) == 0
        return capsys.readouterr().out.splitlines()[1:]

    whole = lines("--steps", "4")
    assert [line.split()[1] for line in whole] == ["1", "2", "3", "4"]
    assert all(float(line.split("gradient norm ")[1]) > 0.25 for line in whole)
    assert lines("--steps", "2", "--save", saved) + lines("--steps", "2", "--load", saved) == whole
    unclipped = losses_on_one_device(*write_program_of_one_rank(tmp_path / "other"), steps=4, lr=0.01)
    assert float(whole[1].split("loss ")[1].split()[0]) != pytest.approx(unclipped[1], rel=1e-6)


def test_a_step_whose_gradients_are_not_finite_is_skipped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_program_of_one_rank(tmp_path)
    arguments = [str(tmp_path), "--dtype", "float32", "--device", "cpu", "--steps", "2", "--loss-scale", "3e38"]
    assert launch.main(arguments) == 0
    first, second = capsys.readouterr().out.splitlines()[1:]
    assert first.endswith("(skipped: not finite)") and second.endswith("(skipped: not finite)")
    assert first.split("loss ")[1].split()[0] == second.split("loss ")[1].split()[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--clip-grad-norm", "0"], "--clip-grad-norm 0 is not a positive number"),
        (["--steps", "0"], "--steps 0: training makes at least 1"),
        (["--steps", "-3"], "--steps -3: training makes at least 1"),
        (["--loss-scale", "nan"], "--loss-scale nan is not a positive number"),
        (["--save", "x", "--optimizer", "adamw"], "keeps nothing of adamw's own state"),
    ],
)
def test_options_that_cannot_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    write_program_of_one_rank(tmp_path)
    assert launch.main([str(tmp_path), *options]) == 2
    assert message in capsys.readouterr().err


def test_a_loss_that_is_not_a_number(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_program_of_one_rank(tmp_path)
    arguments = [str(tmp_path), "--device", "cpu", "--steps", "3", "--lr", "1e20"]
    assert launch.main(arguments) == 0
    told = capsys.readouterr()
    assert [line.split()[3] for line in told.out.splitlines()[1:]][1:] == ["inf", "nan"]
    assert "warning: the loss of step 2 is inf" in told.err and "warning: the loss of step 3 is nan" in told.err
    saved = str(tmp_path / "saved")
    assert launch.main([*arguments, "--stop-on-nan", "--save", saved]) == 3
    told = capsys.readouterr()
    assert len(told.out.splitlines()) == 3
    assert "error: the loss of step 2 is inf: stopped before the optimizer used it" in told.err
    kept = load_checkpoint(saved)
    assert (kept.step, kept.passes) == (1, 2)
    assert all(bool(tensor.isfinite().all()) for tensor in kept.state.values())


def test_a_skipped_step_is_not_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_program_of_one_rank(tmp_path)
    saved = str(tmp_path / "saved")
    arguments = [str(tmp_path), "--device", "cpu", "--steps", "2", "--loss-scale", "3e38", "--save", saved]
    assert launch.main(arguments) == 0
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()[1:]] == ["1", "1"]
    assert (load_checkpoint(saved).step, load_checkpoint(saved).passes) == (0, 2)


def test_groups_and_pairs(tmp_path: Path) -> None:
    write_program(tmp_path)
    stages = read_program(tmp_path).stages()
    assert groups_of(stages) == [(0, 1), (0, 1, 2, 3), (2, 3)]
    assert pairs_of(stages) == [(0, 2), (1, 3), (2, 0), (3, 1)]
    assert rank_with_loss(stages) == 2


def test_what_torchrun_says() -> None:
    assert torchrun_place({}) is None
    assert torchrun_place({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}) == ProcessPlace(
        3, 4, 1, 2
    )
    for wrong in ({"RANK": "4", "WORLD_SIZE": "4"}, {"RANK": "x", "WORLD_SIZE": "1"}):
        with pytest.raises(ProgramError, match="RANK"):
            torchrun_place(wrong)
    with pytest.raises(ProgramError, match="RANK=0 is set, and WORLD_SIZE is not"):
        torchrun_place({"RANK": "0"})


@pytest.mark.parametrize("port", [None, "no number"])
def test_an_environment_that_does_not_say_where_ranks_meet(monkeypatch: pytest.MonkeyPatch, port: str | None) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.delenv("MASTER_PORT", raising=False)
    said = "RANK=0 and WORLD_SIZE=1 are set, and MASTER_PORT not, where ranks meet: torchrun sets all"
    if port is not None:
        monkeypatch.setenv("MASTER_PORT", port)
        said = "rank 0 cannot join the others: ValueError: invalid literal for int.* 'no number'"
    with pytest.raises(NnscalerError, match=said):
        joined(ProcessPlace(0, 1, 0, 1), "cpu")


USES_REGISTRY = """
import torch
from nnscaler.runtime import Loss, Parameter, Stage, user_operators

user = user_operators(twice=("launch_twice", {file!r}, "twice"))


class Stage0(Stage):
    index = 0
    ranks = (0,)
    axes = {{}}
    micro_batches = 1
    parameters = {{"w": Parameter("w", (), "float32", {{}})}}
    loss = Loss({{}})

    def forward(self):
        return {{"loss": user.twice(self.w)}}


STAGES = (Stage0,)
RANKS = (0,)
SCHEDULE = "F0.0 B0.0"
"""
REGISTERS = """
import nnscaler, torch
from op_registry import MINE

@nnscaler.register_op("() -> ()", name="launch_twice")
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * MINE
"""


def test_a_user_s_op_registry_in_the_current_folder_is_not_ours(repository: Path, tmp_path: Path) -> None:
    (tmp_path / "op_registry.py").write_text("MINE = 2\n")
    (tmp_path / "model.py").write_text(REGISTERS)
    folder = tmp_path / "program"
    folder.mkdir()
    (folder / "role_0.py").write_text(USES_REGISTRY.format(file=str(tmp_path / "model.py")))
    digest = hashlib.sha256((tmp_path / "model.py").read_bytes()).hexdigest()
    manifest = {
        "format": 1,
        "model": {"name": "Twice", "file": "model.py"},
        "ranks": 1,
        "axes": [],
        "micro_batches": 1,
        "schedule": "1f1b",
        "roles": [{"file": "role_0.py", "sha256": "", "ranks": (0,), "stages": [0]}],
        "inputs": [],
        "tensors": {},
        "state": encode(describe_state({"w": torch.tensor(3.0)})),
        "batch": {},
        "operator_files": {str(tmp_path / "model.py"): {"file": str(tmp_path / "model.py"), "sha256": digest}},
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    torch.save({"w": torch.tensor(3.0)}, folder / "state.pt")
    torch.save({}, folder / "inputs.pt")
    found = run(["nnscaler.runtime.launch", "program", "--steps", "1"], repository, tmp_path)
    assert found.returncode == 0, found.stderr
    assert "loss 6.0" in found.stdout


@pytest.mark.parametrize("how", every(2, [signal.SIGINT, signal.SIGTERM]))
def test_a_signal_ends_a_rank_that_waits_for_others(how: signal.Signals, repository: Path, tmp_path: Path) -> None:
    """It is inside torch, where Python's handlers do not run, and its parent ignores SIGINT."""
    write_program(tmp_path)
    with socket.create_server(("localhost", 0)) as waits:
        place = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
        address = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(waits.getsockname()[1])}
        process = subprocess.Popen(
            [sys.executable, "-m", "nnscaler.runtime.launch", "."],
            cwd=tmp_path,
            env={**os.environ, **place, **address, "PYTHONPATH": str(repository)},
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),  # noqa: PLW1509 - nothing else there
        )
        try:
            waits.accept()[0].recv(1)  # it has come to its store, which never answers
            process.send_signal(how)
            assert process.wait() == 128 + how
        finally:
            process.kill()
            process.wait()
