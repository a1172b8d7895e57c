"""Colour: the flag, then NO_COLOR, then FORCE_COLOR, then the terminal."""

from __future__ import annotations

import io

import pytest

from nnscaler.cli.output.console import Console, wants_color
from verify.results.styled_line import StyledLine, plain


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("choice", "environment", "terminal", "expected"),
    [
        ("always", {"NO_COLOR": "1"}, False, True),
        ("never", {"FORCE_COLOR": "1"}, True, False),
        ("auto", {"NO_COLOR": "1", "FORCE_COLOR": "1"}, True, False),
        ("auto", {"NO_COLOR": ""}, True, True),
        ("auto", {"FORCE_COLOR": "1"}, False, True),
        ("auto", {"CLICOLOR_FORCE": "1"}, False, True),
        ("auto", {"FORCE_COLOR": "0"}, False, False),
        ("auto", {}, True, True),
        ("auto", {"TERM": "dumb"}, True, False),
        ("auto", {}, False, False),
    ],
)
def test_order(choice: str, environment: dict[str, str], terminal: bool, expected: bool) -> None:
    assert wants_color(choice, environment, Terminal() if terminal else io.StringIO()) is expected


def test_styles_only_where_wanted(capsys: pytest.CaptureFixture[str]) -> None:
    line = StyledLine((("PASS", "good"), ("  loss [8]", "")))
    Console("never").lines([line])
    assert capsys.readouterr().out == "PASS  loss [8]\n"
    Console("always").lines([line])
    colored = capsys.readouterr().out
    assert "\x1b[" in colored and "loss [8]" in colored


def test_quiet_silences_progress_and_not_warnings(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console("never", 0)
    console.progress("trace")
    console.detail("more")
    console.warning("careful")
    console.lines([plain("result")])
    captured = capsys.readouterr()
    assert captured.out == "result\n"
    assert captured.err == "warning: careful\n"


def test_long_lines_are_not_wrapped(capsys: pytest.CaptureFixture[str]) -> None:
    Console("always").lines([plain("x" * 500)])
    assert capsys.readouterr().out.count("\n") == 1


@pytest.mark.parametrize(("encoding", "written"), [("utf-8", "\\ud800 é"), ("ascii", "\\ud800 \\xe9")])
def test_what_stdout_has_no_bytes_for_is_escaped(encoding: str, written: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of the user's code may have half of a surrogate pair, and so may the name of a file."""
    stream = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(stream, encoding=encoding))
    console = Console("never")
    console.lines([plain("\ud800 é")])
    console.result("\ud800 é")
    assert stream.getvalue().decode(encoding) == f"{written}\n" * 2
    assert console.said()
