"""CSV files of torch.distributed.pipelining: torch runs ours unmodified, and ours reads torch's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining import ScheduleDualPipeV, ScheduleInterleavedZeroBubble, ScheduleZBVZeroBubble
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

from nnscaler.errors import NnscalerError
from nnscaler.instructions import Instruction
from nnscaler.scheduling.dependencies import chain, check_acyclic
from nnscaler.scheduling.given_orders import read_csv, read_orders, write_csv
from nnscaler.scheduling.registry import SCHEDULES
from nnscaler.scheduling.schedule import Schedule
from verify.external.verify import verify_program
from verify.results.report import Report
from verify.results.verdict import Verdict
from verify.self_test.external.models import Mlp
from verify.self_test.external.pipelines import Pipelined, adamw_of_parts, in_a_loop, in_a_v, pipeline_step
from verify.self_test.external.right_tensor_parallel_programs import program


def read(text: str) -> Schedule:
    return read_orders(read_csv(text, "orders.csv"), "orders.csv")


@given(name=st.sampled_from(sorted(SCHEDULES)), devices=st.integers(1, 5), micro_batches=st.integers(1, 12))
@settings(max_examples=40, deadline=None)
def test_what_is_written_is_read_back(name: str, devices: int, micro_batches: int) -> None:
    kind = SCHEDULES[name]
    assume(not kind.shares or devices == 1)
    made = kind(devices, kind.chunks, micro_batches)
    found = read(write_csv(made))
    assert (found.devices, found.micro_batches, found.orders) == (made.devices, micro_batches, made.orders)


def test_what_torch_has_not_is_not_written() -> None:
    with pytest.raises(NnscalerError, match=r"has stage 0 on the devices \[0, 1"):
        write_csv(SCHEDULES["interlaced"](2, 1, 3))
    with pytest.raises(NnscalerError, match="in 2 slices"):
        write_csv(replace(SCHEDULES["1f1b"](2, 1, 3), slices=2))


@dataclass(frozen=True)
class FromFile:
    """Torch's runtime with the schedule of a CSV."""

    path: str

    def __call__(self, stages: Any, micro_batches: int, **choices: Any) -> Any:
        each = stages if isinstance(stages, list) else [stages]
        runtime = _PipelineScheduleRuntime(each, micro_batches, **choices)
        runtime._load_csv(self.path)
        return runtime


@dataclass(frozen=True)
class Dumped:
    """A schedule of torch's that is written to files as it is made: its passes alone, and with its communication."""

    kind: Callable[..., Any]
    folder: Path

    def __call__(self, stages: Any, micro_batches: int, **choices: Any) -> Any:
        schedule = self.kind(stages, micro_batches, **choices)
        for form in ("compute_only", "compute_comms"):
            schedule._dump_csv(str(self.folder / f"{form}.csv"), format=form)
        return schedule


def verify(schedule: Callable[..., Any], ranks: int, micro_batches: int, numbers: Any, each: int) -> Report:
    """Run a pipeline of torch's over simulated ranks, and compare losses, gradients and steps with the plain model."""
    pipelined = Pipelined(schedule, micro_batches, each, numbers)
    words: dict[str, Any] = {"mesh": (("pp", ranks),), "step": pipeline_step, "optimizer": adamw_of_parts}
    return verify_program(program("pipeline", partial(Mlp, layers=ranks * each), pipelined, 0, **words))


@pytest.mark.parametrize(
    ("name", "ranks", "micro_batches"),
    [
        *[("1f1b", 3, 4), ("1f1b-split", 3, 4), ("interleaved", 2, 4), ("zb-h1", 3, 4), ("zb-h1-few", 3, 4)],
        *[("zb-h2", 2, 6), ("zb-v", 2, 4), ("dualpipe-v", 2, 6)],
    ],
)
def test_torch_runs_what_is_written(name: str, ranks: int, micro_batches: int, tmp_path: Path) -> None:
    kind, file = SCHEDULES[name], tmp_path / "orders.csv"
    made = kind(ranks, kind.chunks, micro_batches)
    file.write_text(write_csv(made))
    numbers = in_a_v if made.devices[-1] == (0,) else in_a_loop
    report = verify(FromFile(str(file)), ranks, micro_batches, numbers, kind.chunks)
    counts = {check.name: check.count for check in report.checks}
    assert report.verdict is Verdict.TESTED_EXACT, [f.message for f in report.findings]
    assert counts["gradients"] > 0 and counts["losses"] > 0, counts


@pytest.mark.long
def test_torch_refuses_one_that_lacks_a_pass(tmp_path: Path) -> None:
    file = tmp_path / "orders.csv"
    file.write_text(write_csv(SCHEDULES["zb-h1"](2, 1, 4)).replace("1W3", "1W2"))
    report = verify(FromFile(str(file)), 2, 4, in_a_loop, 1)
    assert report.verdict is Verdict.REFUTED


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "numbers"),
    [(ScheduleZBVZeroBubble, in_a_v), (ScheduleDualPipeV, in_a_v), (ScheduleInterleavedZeroBubble, in_a_loop)],
)
def test_what_torch_writes_is_read(kind: Any, numbers: Any, tmp_path: Path) -> None:
    verify(Dumped(kind, tmp_path), 2, 4, numbers, 2)
    alone, among = (read((tmp_path / f"{form}.csv").read_text()) for form in ("compute_only", "compute_comms"))
    assert alone == among
    assert alone.micro_batches == 4
    assert len(check_acyclic(alone, chain(4))) == sum(map(len, alone.orders))
    assert [device for (device,) in alone.devices] == ([0, 1, 1, 0] if numbers is in_a_v else [0, 1, 0, 1])
    if kind is ScheduleDualPipeV:
        assert alone.orders == SCHEDULES["dualpipe-v"](2, 2, 4).orders
    if kind is ScheduleZBVZeroBubble:
        assert [i for i in alone.orders[0] if i.kind != "W"] == [
            i for i in SCHEDULES["zb-v"](2, 2, 4).orders[0] if i.kind != "W"
        ]


def test_pairs_and_idle_cells() -> None:
    found = read("0F0,,0F1,,0B0,0B1\n,(1F0;1I0)OVERLAP_F_B,1F1,1W0,1I1,1W1,,\n\n")
    assert found.devices == ((0,), (1,))
    assert found.text(0) == "F0.0 F0.1 B0.0 B0.1"
    assert found.orders[1][:2] == (Instruction("F", 1, (0,)), Instruction("I", 1, (0,)))


@pytest.mark.parametrize(
    ("text", "message", "line"),
    [
        ("0F0,0B0\n1F0,1BO\n", "row 2, column 2: '1BO' is no pass of a stage", 2),
        ("0F0,0B0\n1F0,1B\n", "row 2, column 2: '1B' is no pass of a stage", 2),
        ("OF0,0B0\n1F0,1B0\n", "row 1, column 1: 'OF0' is no pass of a stage", 1),
        ("0F0,0B0\n1F0,1I0\n", "row 2: runs I1.0 and never W1.0", 2),
        ("0F0,0B0\n1F0,1I0,1W0,,1W0\n", "row 2, column 5: runs W1.0 twice", 2),
        ("0F0,0B0\n1F0,1W0,1I0\n", "row 2, column 2: runs W1.0 before I1.0", 2),
        ("0F0,0B0\n2F0,2B0\n", "row 2, column 1: F2.0 is of stage 2, and stage 1 is nowhere", 2),
        ("0F0,0B0\n1F0,1B0,0F1\n", "row 2, column 3: F0.1 is of stage 0, which is in row 1 as well", 2),
        ("0F0,0B0,0F1,0B1\n1F0,1B0\n", "row 2: never runs F1.1", 2),
        ("\n\n", "there are no passes in it", None),
    ],
)
def test_what_is_wrong_is_named_with_its_place(text: str, message: str, line: int | None) -> None:
    with pytest.raises(NnscalerError) as error:
        read(text)
    assert error.value.code == "bad_schedule"
    assert error.value.message == f"orders.csv: {message}"
    assert (None if error.value.where is None else error.value.where.line) == line
