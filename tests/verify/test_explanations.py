"""Every code of a finding has a page, can be raised, and is in a test."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from nnscaler.cli.main import main
from verify.results.finding_codes import CODES, PAGES, page, section

REPOSITORY = Path(__file__).parents[2]
TITLES = ["What it means", "Example", "What to do"]


def test_there_is_a_page_for_each_code_and_no_other() -> None:
    assert sorted(file.stem for file in PAGES.iterdir()) == sorted(CODES)


@pytest.mark.parametrize("code", CODES)
def test_a_page_agrees_with_the_catalogue(code: str) -> None:
    lines = page(code).splitlines()
    assert lines[:4] == [f"# {code}", "", CODES[code], ""]
    assert [line[3:] for line in lines if line.startswith("## ")] == TITLES
    assert 15 <= len(lines) <= 45 and all(len(line) <= 125 or line.startswith("    ") for line in lines)
    assert all(section(code, title) for title in TITLES)
    assert not section(code, "Nothing")
    assert all(line.startswith("    ") for line in section(code, "Example").splitlines()[1:])


def sources(folder: str) -> str:
    skipped = {"finding_codes.py", "problems.py"}
    files = [file for file in (REPOSITORY / folder).rglob("*.py") if file.name not in skipped]
    return "\n".join(file.read_text(encoding="utf-8") for file in files)


@pytest.mark.long
def test_every_code_can_be_raised_and_is_tested() -> None:
    ours, tests = sources("verify"), sources("tests")
    made = set(re.findall(r'f"\{(?:kind|self\.kind|what)\}_(\w+)"', ours))  # f"{kind}_differs"
    dead = [code for code in CODES if f'"{code}"' not in ours and code.rpartition("_")[2] not in made]
    assert not dead
    assert not [code for code in CODES if not re.search(rf"\b{code}\b", tests)]


def test_an_unknown_code_is_a_key_error() -> None:
    with pytest.raises(KeyError):
        page("../catalogue")


def test_explain(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "gradient_differs"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"gradient_differs\n\n{CODES['gradient_differs']}\n\nWhat it means\n")
    assert "\x1b" not in out and "What to do\n" in out and "#" not in out
    assert main(["explain", "Gradient-Differs", "--color", "always"]) == 0
    assert "\x1b[" in capsys.readouterr().out


def test_explain_without_a_code_lists_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(CODES)
    assert all(line.endswith(CODES[line.split()[0]]) for line in lines)


@pytest.mark.parametrize(("word", "hint"), [("gradient_difers", "gradient_differs"), ("zzz", "lists every code")])
def test_explain_of_an_unknown_code(word: str, hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", word]) == 2
    captured = capsys.readouterr()
    assert not captured.out and hint in captured.err and word in captured.err
