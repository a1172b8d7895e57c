"""Programs that wait for ever: found without waiting for the time-out, on threads and on processes, and cleaned up."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

import verify
from nnscaler import compile as compiler
from nnscaler.cli.main import main
from nnscaler.scheduling import timeline
from nnscaler.scheduling.schedule import Schedule, parse_order
from tests.broken import models
from tests.broken.planting import Edit, Original, assert_refuted
from tests.sampling import every
from verify.programs.execution import run_on_backend

TIMEOUT = 60.0  # of the whole run; a hang is to be found in much less


@dataclass(frozen=True, slots=True)
class Hang:
    """`program`: the fixture that is broken. `tensors`: all are named; `waits`: what some rank says it waits in."""

    name: str
    program: str
    edits: tuple[Edit, ...]
    code: str
    tensors: tuple[str, ...]
    waits: str


SKIPPED = Edit(
    "comm.all_reduce(linear_1, self.tp)", "(comm.all_reduce(linear_1, self.tp) if self.rank == 0 else linear_1 * 2)"
)
HANGS = [
    Hang(  # the other rank comes to the norm of the gradients, which is the next call of their group
        "one rank skips a collective",
        "small_sharded",
        (SKIPPED,),
        "communication_mismatch",
        ("linear_1_v1",),
        "all_reduce(sum) float64[12, 5]",
    ),
    Hang(
        "order of the schedule",
        "small_staged",
        (Edit("F0.0 F0.1 B0.0 B0.1", "F0.0 B0.0 F0.1 B0.1"), Edit("F1.0 B1.0 F1.1 B1.1", "F1.0 F1.1 B1.1 B1.0", 1)),
        "deadlock",
        ("linear",),
        "recv float64[6, 10] 0 -> 1 key (linear@1 0 1 1 F)",
    ),
    Hang(
        "keys of a message differ",
        "small_staged",
        (Edit('Receive("linear@1"', 'Receive("tanh@1"', 1),),
        "deadlock",
        ("linear", "tanh"),
        "key (tanh@1 0 1 0 F)",
    ),
]
MORE = [
    Hang(
        "one rank of four skips a collective",
        "staged",
        (
            Edit(
                "comm.all_reduce(cross_entropy_loss_count_of_step, self.dp)",
                "(comm.all_reduce(cross_entropy_loss_count_of_step, self.dp) if self.rank == 2 else "
                "cross_entropy_loss_count_of_step)",
                1,
            ),
        ),
        "communication_mismatch",  # its peer meets it with the sum of the loss
        ("cross_entropy_loss_count_of_step_v1",),
        "",
    ),
    Hang(
        "one rank of four calls another collective",
        "sharded",
        (
            Edit(
                "comm.all_reduce(linear_1, self.tp)",
                "(comm.all_gather if self.tp.index else comm.all_reduce)(linear_1, self.tp, *[0] * self.tp.index)",
            ),
        ),
        "communication_mismatch",
        ("linear_1_v1",),
        "",
    ),
    Hang("send to the wrong rank", "staged", (Edit("peers=(2, 3)", "peers=(3, 2)"),), "deadlock", ("add_1",), "recv"),
    Hang(
        "only one stage sums the tied embedding",
        "staged",
        (Edit(", copies=((0, 1), (2, 3))", ""),),
        "deadlock",
        ("words.weight",),
        "the gradient sum of `words.weight`",
    ),
    Hang("one stage drops the last backward", "staged", (Edit(" B1.3", "", 1),), "deadlock", ("add_1",), "3 B)"),
    Hang(
        "only the producer knows that there is no gradient",
        "staged",
        (Edit("peers=(2, 3)", "peers=(2, 3), needs_grad=False"),),
        "communication_mismatch",
        ("add_1",),
        "",
    ),
    Hang(
        "shapes of a message differ",
        "staged",
        (Edit("(2, 5, 12)", "(2, 12, 5)", 1, "Receive("),),
        "communication_mismatch",
        ("add_1",),
        "",
    ),
]


def check(report: verify.Report, hang: Hang) -> None:
    finding = assert_refuted(report, hang.code, hang.tensors[0])
    assert all(f"`{tensor}`" in finding.message for tensor in hang.tensors), finding.message
    waits = [text for name, text in finding.counter_example.items() if name.startswith("rank ")]
    assert not hang.waits or any(hang.waits in text for text in waits), waits


@pytest.mark.parametrize("hang", every(2, [*HANGS, *MORE]), ids=lambda hang: hang.name)
def test_on_threads(request: pytest.FixtureRequest, hang: Hang, tmp_path: Path) -> None:
    original: Original = request.getfixturevalue(hang.program)
    program = original.broken(tmp_path, hang.edits)
    threads = threading.active_count()
    report = original.verify(program, timeout=TIMEOUT)
    check(report, hang)
    wait_until(lambda: threading.active_count() <= threads)


@pytest.mark.parametrize("hang", every(2, [*HANGS, MORE[1]]), ids=lambda hang: hang.name)
def test_on_processes(
    request: pytest.FixtureRequest, hang: Hang, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_on_backend, "STALL", 2.0)
    original: Original = request.getfixturevalue(hang.program)
    program = original.broken(tmp_path, hang.edits)
    with run_on_backend.start_server() as server:
        report = original.verify(program, backend="gloo", timeout=TIMEOUT, server=server)
        check(report, hang)
        wait_until(lambda: not children_of(server.process_id))


@pytest.mark.long
def test_from_the_command_line(
    small_staged: Original, tmp_path: Path, repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the default backend, which is processes, and a server that is started for it."""
    before = children_of(os.getpid())
    program = small_staged.broken(tmp_path, HANGS[1].edits)
    model = str(repository / "tests/broken/models.py")
    assert main(["verify-plan", model, "--program", str(program), "--timeout", str(TIMEOUT)]) == 1
    written = capsys.readouterr().out
    assert "deadlock" in written and "`linear`" in written and "REFUTED" in written.splitlines()[-1]
    wait_until(lambda: set(children_of(os.getpid())) <= set(before))


def test_a_schedule_of_the_compiler_that_deadlocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check that orders are acyclic is off, and stage 1 wants all micro-batches before it answers the first."""
    orders = (parse_order("F0.0 B0.0 F0.1 B0.1"), parse_order("F1.0 F1.1 B1.0 B1.1"))
    monkeypatch.setattr(compiler, "check_acyclic", lambda *_: ())
    monkeypatch.setattr(compiler, "schedule_of", lambda *_: Schedule("wrong", ((0,), (1,)), 2, orders))
    monkeypatch.setattr(timeline, "check_acyclic", lambda *_: ())
    request = {"ranks": 2, "plan": "pp=2", "micro_batches": 2}
    report = verify.verify_plan(models.perceptron, models.points(), level="run", **request)
    assert_refuted(report, "deadlock", "linear")


def children_of(process: int) -> list[int]:
    return [
        int(pid) for task in Path(f"/proc/{process}/task").iterdir() for pid in (task / "children").read_text().split()
    ]


def wait_until(condition: Callable[[], bool], seconds: float = 240.0) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "waited in vain"
        time.sleep(0.05)
