"""The steps of `nnscaler plan` after a plan was found: replay, comparison, the page; and --specialise."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path

import pytest

import nnscaler.cli.commands.plan
from nnscaler.cli.main import main

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


class Branching(Model):
    def forward(self, x, labels):
        return super().forward(x if x.sum() > 0 else -x, labels)


def build_model():
    return Model()


def branching():
    return Branching()


def sample_inputs():
    return {"x": torch.ones(12, 8), "labels": torch.randint(0, 8, (12,))}
"""
VOID = {"meta", "rect", "line", "circle", "path", "br", "hr", "img", "link", "input"}


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "model.py").write_text(MODEL)
    return str(tmp_path / "model.py")


def sizes(file: Path, **wanted: int) -> Path:
    file.write_text("[[constraint]]\nkind = 'sizes'\n" + "".join(f"{n} = {v}\n" for n, v in wanted.items()))
    return file


class Page(HTMLParser):
    """Tags that are open, and what was seen."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.fetched: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.fetched += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag


def test_a_pipeline_is_replayed_and_drawn(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = sizes(tmp_path / "kept.toml", pp=2, micro_batches=3)
    page, certificate = tmp_path / "plan.html", tmp_path / "certificate.json"
    words = ["plan", model, "--ranks", "2", "--cluster", "a100x8", "--constraints", str(kept)]
    assert main([*words, "--html", str(page), "--certificate", str(certificate), "--explain", "linear"]) == 0
    shown = capsys.readouterr().out
    told = json.loads(certificate.read_text())
    assert "replayed: " in shown and " a step, simulated from its program's statements" in shown
    assert told["simulated_seconds"] > 0 and len(told["simulated_busy"]) == 2
    assert all(0 < busy < 1 for busy in told["simulated_busy"]), "a pipeline fills and drains"
    assert all(f"busy {busy:.0%}, idle {1 - busy:.0%}" in shown for busy in told["simulated_busy"])
    text, found = page.read_text(), Page()
    found.feed(text)
    assert not found.open and "script" not in found.seen and not found.fetched
    assert text.count("<rect x=") == 4 * 3 * 3, "a bar per stage, micro-batch, and forward and either half of backward"
    for title in ("Stages", "Schedule", "Communication", "Memory per rank", "Explanation", "Certificate"):
        assert f"<h2>{title}" in text
    assert "pp=2, 3 micro-batches" in text and "prefers-color-scheme:dark" in text.replace(" ", "")
    again = tmp_path / "again.html"
    assert main([*words, "--html", str(again), "--explain", "linear"]) == 0
    assert again.read_text() == text


def test_only_the_first_passes_of_very_many_are_drawn(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("verify.report_formats.html.planner_result_page.BARS", 10)
    kept, page = sizes(tmp_path / "kept.toml", pp=2, micro_batches=12), tmp_path / "plan.html"
    words = ["plan", model, "--ranks", "2", "--cluster", "a100x8", "--constraints", str(kept)]
    assert main([*words, "--html", str(page)]) == 0
    assert 5 <= page.read_text().count("<rect x=") <= 10 and "the first" in page.read_text()


def test_what_takes_long_is_replayed_when_asked(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(nnscaler.cli.commands.plan, "MANY", 11)
    kept, certificate = sizes(tmp_path / "kept.toml", pp=2, micro_batches=3), tmp_path / "certificate.json"
    words = ["plan", model, "--ranks", "2", "--cluster", "a100x8", "--constraints", str(kept)]
    assert main([*words, "--certificate", str(certificate)]) == 0
    assert "not replayed" in capsys.readouterr().out
    assert json.loads(certificate.read_text())["simulated_seconds"] is None
    assert main([*words, "--replay"]) == 0
    assert "simulated from" in capsys.readouterr().out


def test_what_an_edit_of_constraints_changed(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", model, "--ranks", "2", "--cluster", "a100x8", "--constraints"]
    old, kept = tmp_path / "old.json", tmp_path / "kept.toml"
    assert main([*words, str(sizes(kept, tp=2, micro_batches=1)), "--out", str(old)]) == 0
    kept.write_text(kept.read_text() + "[[constraint]]\nkind = 'replicate'\noperations = ['layers.1']\n")
    capsys.readouterr()
    assert main([*words, str(kept), "--compare", str(old)]) == 0
    shown = capsys.readouterr().out
    assert f"against {old}, both simulated: " in shown
    assert main([*words, str(sizes(kept, pp=2, micro_batches=3)), "--compare", str(old)]) == 0
    shown = capsys.readouterr().out
    assert "configuration: tp=2 before, pp=2, 3 micro-batches, zb-v now" in shown
    assert "stage: 0 before, 1 now: " in shown and "linear_2" in shown
    assert main([*words, str(sizes(kept, tp=2, micro_batches=1)), "--compare", str(old)]) == 0
    assert "(+0.0%)" in (shown := capsys.readouterr().out) and "nothing is run otherwise" in shown


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "No such file"),
        ("{", "is not JSON"),
        ('{"mesh": [["dp", 4]]}', "--ranks 4"),
        ('{"mesh": [["dp", 2]], "steps": [{"step": "recompute", "operations": ["nowhere"]}]}', "nowhere"),
    ],
)
def test_a_plan_that_cannot_be_compared_is_an_error(
    model: str, text: str | None, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if text is not None:
        (tmp_path / "old.json").write_text(text)
    words = ["plan", model, "--ranks", "2", "--cluster", "a100x8", "--compare", str(tmp_path / "old.json")]
    assert main(words) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and said in captured.err and "old.json" in captured.err


@pytest.mark.parametrize("command", ["plan", pytest.param("profile", marks=pytest.mark.long)])
def test_a_branch_is_taken_where_that_is_asked_for(
    command: str, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [f"{model}::branching", "--ranks", "1", "--out", str(tmp_path / "out.json")]
    assert main([command, *words]) == 2
    assert "--specialise" in capsys.readouterr().err
    assert main([command, *words, "--specialise"]) == 0
