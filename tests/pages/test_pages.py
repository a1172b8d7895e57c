"""Every code block of README, CONTRIBUTING and docs/ runs, and prints what the page shows; or the page says why not."""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.pages.blocks import ROOT, Block, pages, read_blocks
from tests.pages.runner import PageFailed, run_page

FOUND_BY_NAME = ("pyproject.toml",)
PRINTED = ("VERIFIED  ", "REFUTED  ", "INCONCLUSIVE  ", "error: ", "  = cause: ", "  loss ")


def rows(fates: set[str], asks: str) -> list[pytest.param]:
    """The pages with a block of this fate, and their blocks of all these fates."""
    found = []
    for page in pages():
        blocks = [block for block in read_blocks(page) if (block.code or not block.shown) and block.fate in fates]
        if any(block.shown and block.fate == asks for block in blocks):
            found.append(pytest.param(blocks, id=str(page.relative_to(ROOT))))
    return found


def run(blocks: list[Block], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("COLUMNS", "120")
    before, problem = set(sys.modules), ""
    try:
        assert run_page(blocks, folder) == sum(block.shown for block in blocks)
    except PageFailed as failed:
        problem = str(failed)
    finally:
        for name in set(sys.modules) - before:
            if str(getattr(sys.modules[name], "__file__", "")).startswith(str(folder)):
                del sys.modules[name]
    if problem:
        pytest.fail(problem, pytrace=False)


@pytest.mark.parametrize("blocks", rows({"run"}, "run"))
def test_the_blocks_of_a_page(blocks: list[Block], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(blocks, tmp_path, monkeypatch)


@pytest.mark.long
@pytest.mark.parametrize("blocks", rows({"run", "long"}, "long"))
def test_the_blocks_of_a_page_that_take_long(
    blocks: list[Block], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(blocks, tmp_path, monkeypatch)


def test_nine_of_ten_blocks_run() -> None:
    blocks = [block for page in pages() for block in read_blocks(page) if block.code]
    fates = Counter(block.fate for block in blocks)
    unsaid = [b.place for b in blocks if b.fate == "exempt" and len(b.marks["not run"]) < 10]
    assert not unsaid, "why are they not run?"
    assert len(blocks) > 150 and fates["exempt"] <= 0.1 * len(blocks), (len(blocks), fates)
    for block in blocks:
        if block.fate == "elsewhere":
            text = (ROOT / block.marks["run by"]).read_text(encoding="utf-8")
            assert Path(block.page).name in text or "read_commands" in text, block.place


def test_what_is_printed_is_marked() -> None:
    unmarked = [
        block.place
        for page in pages()
        for block in read_blocks(page)
        if block.shown and not block.code and any(said in block.text for said in PRINTED)
    ]
    assert not unmarked, "is it `output`, or why is it `not run`?"


def test_files_of_pages_are_used() -> None:
    unused = []
    for page in pages():
        blocks = read_blocks(page)
        for number, block in enumerate(blocks):
            if block.title is not None and block.fate in ("run", "long"):
                later = "\n".join(after.text for after in blocks[number + 1 :] if after.fate != "exempt")
                if Path(block.title).stem not in later and block.title not in FOUND_BY_NAME:
                    unused.append(block.place)
    assert not unused


@pytest.mark.parametrize(
    ("shown", "printed", "same"),
    [
        ("PASS  loss  TESTED  2 of 2 agree  0.1 s", "PASS  loss   TESTED  2 of 2 agree", True),
        ("PASS  loss  TESTED  2 of 2 agree", "PASS  loss   TESTED  2 of 2 agree  12.3 s", True),
        ("PASS  loss  TESTED  2 of 2 agree  0.1 s", "PASS  loss  TESTED  3 of 3 agree", False),
        ("PASS  loss  TESTED  2 of 2 agree", "PASS  loss  TESTED  2 of 2 agree, 3 cases", False),
        ("VERIFIED  model.py: 2 checks, 1.0 s", "VERIFIED  model.py: 2 checks, 2.0 s", True),
        ("VERIFIED  model.py: 2 checks, 1.0 s", "VERIFIED  model.py: 2 checks,", False),
        ("a step  1.0 s", "a step", False),
        ("...\nloss 1", "loss 1", True),
        ("...\nloss 1", "loss 12", False),
    ],
)
def test_a_time_may_be_another_and_that_of_a_check_may_be_missing(
    shown: str, printed: str, same: bool, tmp_path: Path
) -> None:
    command = Block("page.md", 1, "sh", f"echo '{printed}'\n", None, {})
    output = Block("page.md", 2, "text", f"{shown}\n", None, {"output": ""})
    with contextlib.nullcontext() if same else pytest.raises(PageFailed, match="the page shows"):
        run_page([command, output], tmp_path)
