"""`nnscaler timeline`: events of a plan, simulated and measured, as text, JSON, trace and page."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from nnscaler.cli.main import main
from nnscaler.performance.timeline_events import StepEvents
from nnscaler.records_as_json import decode

ROOT = Path(__file__).resolve().parents[3]
SCHEMA = json.loads((ROOT / "docs" / "reports" / "events.schema.json").read_text())
MODEL = """
import torch
from torch import nn
from torch.nn import functional as F


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 8)) for _ in range(2))

    def forward(self, x, labels):
        for layer in self.layers:
            x = x + layer(x)
        return F.cross_entropy(x, labels)


def build_model():
    return Model()


def empty():
    with torch.device("meta"):
        return Model()


def sample_inputs():
    return {"x": torch.ones(12, 8), "labels": torch.randint(0, 8, (12,))}
"""
VOID = {"meta", "rect", "line", "circle", "path", "br", "hr", "img", "link", "input"}
PIPELINE = ("--plan", "dp=2,pp=2", "--micro-batches", "3", "--cluster", "a100x8")


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "model.py").write_text(MODEL)
    return str(tmp_path / "model.py")


def events_in(file: Path) -> StepEvents:
    data: Any = json.loads(file.read_text())
    jsonschema.validate(data, SCHEMA)
    return decode(StepEvents, data)


class Titles(HTMLParser):
    """What is open, and the titles of marks."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.titles: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID or tag == "rect":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "title" and "svg" in self.open:
            self.titles.append(data)


def test_a_plan_is_simulated_and_written_in_every_form(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {name: tmp_path / f"step.{name}" for name in ("events", "trace", "html")}
    words = [word for name, file in files.items() for word in (f"--{name}", str(file))]
    assert main(["timeline", model, *PIPELINE, *words]) == 0
    shown = capsys.readouterr().out
    events = events_in(files["events"])
    assert events.source == "simulated" and "simulated: " in shown and "dp=2 pp=2, 3 micro-batches, 1f1b" in shown
    for text in ("computes  communicates", "all_reduce  gradient", "recv", "layers.*", "model.py:14"):
        assert text in shown
    kinds = {event.kind for event in events.events}
    assert kinds >= {"F", "B", "all_reduce", "send", "recv"}
    trace = json.loads(files["trace"].read_text())["traceEvents"]
    assert sum(entry["ph"] == "X" for entry in trace) == len(events.events)
    page = Titles()
    page.feed(files["html"].read_text())
    assert not page.open
    assert [t for t in page.titles if t.startswith("communication of ranks")] == [
        "communication of ranks 0-1",
        "communication of ranks 2-3",
    ]
    assert sum(t.startswith(("F of micro-batch", "B of micro-batch")) for t in page.titles) == 2 * 2 * 3
    assert any(t.startswith("recv over pp in F1.0, 128 B, layers.*.* model.py:14, 28.0") for t in page.titles)
    assert any(t.startswith("2 times all_reduce over dp in loss and 1 more, ") for t in page.titles)
    again = tmp_path / "again"
    assert main(["timeline", model, *PIPELINE, "--events", str(again)]) == 0
    assert again.read_bytes() == files["events"].read_bytes()


def test_the_end_of_the_events_is_what_the_planner_predicts(model: str, tmp_path: Path) -> None:
    plan, certificate, events = (tmp_path / name for name in ("plan.json", "certificate.json", "events.json"))
    machine = ["--cluster", "a100x8"]
    planned = ["plan", model, "--ranks", "4", *machine, "--out", str(plan), "--certificate", str(certificate)]
    assert main(planned) == 0
    assert main(["timeline", model, "--plan", str(plan), *machine, "--events", str(events)]) == 0
    found = events_in(events)
    assert found.seconds == json.loads(certificate.read_text())["simulated_seconds"]
    assert max(event.end for event in found.events) == pytest.approx(found.seconds)


def test_a_searched_plan_is_simulated_too(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["timeline", model, "--ranks", "2", "--cluster", "a100x8", "-q"]) == 0
    assert "simulated: " in capsys.readouterr().out


@pytest.mark.long
def test_a_run_is_measured(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events, trace, page = tmp_path / "run.json", tmp_path / "run.trace.json", tmp_path / "run.html"
    words = ["timeline", model, "--plan", "pp=2", "--micro-batches", "2", "--measured"]
    assert main([*words, "--events", str(events), "--trace", str(trace), "--html", str(page)]) == 0
    assert "measured: " in capsys.readouterr().out
    found = events_in(events)
    assert found.source == "measured" and {event.ranks for event in found.events} == {(0,), (1,)}
    passes = [e.instruction for e in found.events if e.device == 0 and e.kind in "FB"]
    assert passes == ["F0.0", "F0.1", "B0.0", "B0.1"]
    sent = {e.message: e for e in found.events if e.kind == "send"}
    received = {e.message: e for e in found.events if e.kind == "recv"}
    assert len(sent) == len(received) == 4
    assert all(e.start <= received[n].end for n, e in sent.items()), "ranks share a clock"
    assert all(e.module.startswith("layers.") and e.where for e in sent.values()), "causes come from the plan"
    assert "communication of ranks 1" in page.read_text()


def test_a_run_under_the_launcher_is_read(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    build, records, events = tmp_path / "build", tmp_path / "records", tmp_path / "run.json"
    assert main(["compile", model, "--plan", "dp=1", "--ranks", "1", "--out", str(build)]) == 0
    launched = [sys.executable, "-m", "nnscaler.runtime.launch", str(build), "--steps", "2", "--record", str(records)]
    subprocess.run(launched, check=True, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    words = ["timeline", model, "--plan", str(build), "--records", str(records)]
    assert main([*words, "--events", str(events)]) == 0
    found = events_in(events)
    assert found.source == "measured" and not list(found.calls())
    assert [e.instruction for e in found.events if e.kind in "FB"] == ["F0.0", "B0.0"]
    capsys.readouterr()
    other = ["timeline", model, "--plan", "dp=2", "--records", str(records)]
    assert main(other) == 2
    told = capsys.readouterr().err
    assert "has no rank1.json: 2 ranks write a file each" in told and "--record DIR writes them" in told


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--plan", "dp=2", "--memory", "4GB"], "--memory is for the search of a plan"),
        (["--plan", "dp=2", "--cluster", "nothing"], "nothing"),
        (["--plan", "dp=2", "--trace", "/dev/full"], "/dev/full"),
        (["--plan", "dp=2", "--measured", "--records", "x"], "not allowed with"),
        (["--plan", "up=2"], "up"),
    ],
)
def test_what_cannot_be_is_said(model: str, words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["timeline", model, *words]) == 2
    assert told in capsys.readouterr().err


def test_a_model_without_data_is_simulated_and_not_run(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["timeline", f"{model}::empty", *PIPELINE]
    assert main(words) == 0
    assert main([*words, "--measured"]) == 2
    assert "the model has no data (meta device)" in capsys.readouterr().err
