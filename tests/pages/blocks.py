"""The code blocks of the pages: README, CONTRIBUTING and docs/, in the order in which a reader meets them.

A block is fenced, and says its language. What the test needs to know stands in HTML comments above it, which no reader
sees:

    <!-- not run: REASON -->       exempt
    <!-- run by: tests/... -->     another test runs it
    <!-- long -->                  takes seconds: with `-m long`
    <!-- exit: 1 -->               the status of the (last) command, else 0
    <!-- output -->                it is what the block before prints; `output: part` is in there somewhere
    <!-- output of: COMMAND -->    it is part of what the command prints, which the page does not show
    <!-- python                    a block that the page does not show; likewise sh; `file: NAME` writes a file
    ... -->
    <!-- then: COMMAND -->         a command after the block, which the page does not show

A block with a title (```python title="model.py") is a file, which later blocks use. `text` is a figure (a formula, a
drawing, a synopsis), and no code, unless a comment says that it is output. Data without a title (toml, json, yaml)
is read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MARKS = ("not run", "run by", "long", "exit", "output", "output of")
COMMENT = re.compile(r"^<!-- ([\w ]+?)(?:: (.*?))? -->$")
HIDDEN = re.compile(r"^<!-- (?:(python|sh|console)|file: (\S+))$")
FENCE = re.compile(r'^```(\w*)(?: title="([^"]+)")?$')


@dataclass(frozen=True)
class Block:
    """A block, its place, and what the comments above it say."""

    page: str
    line: int
    language: str
    text: str
    title: str | None
    marks: Mapping[str, str]
    shown: bool = True

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def code(self) -> bool:
        """Whether it is counted: it is shown, and no figure."""
        return self.shown and (self.language != "text" or bool(self.marks))

    @property
    def fate(self) -> str:
        """`exempt`, `elsewhere`, `long` or `run`."""
        named = {"not run": "exempt", "run by": "elsewhere", "long": "long"}
        return next((fate for mark, fate in named.items() if mark in self.marks), "run")


def pages() -> list[Path]:
    """Return every page whose blocks count."""
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def read_blocks(page: Path) -> list[Block]:
    """Return the blocks of a page in order. Raises ValueError for a fence or a comment that is not understood."""
    return list(_blocks(page, page.read_text(encoding="utf-8").splitlines()))


def _blocks(page: Path, lines: list[str]) -> Iterator[Block]:
    name, i = str(page.relative_to(ROOT)), 0
    marks, last = dict[str, str](), dict[str, str]()
    while i < len(lines):
        line, start = lines[i], i + 1
        hidden, comment = HIDDEN.match(line), COMMENT.match(line)
        if hidden or line.startswith("```"):
            fence = FENCE.match(line)
            if not hidden and (fence is None or not fence[1]):
                raise ValueError(f"{name}:{start}: a fence must say its language, and at most a title: {line}")
            end = lines.index("-->" if hidden else "```", start)
            text = "\n".join(lines[start:end]) + "\n"
            if hidden:
                yield Block(name, start, hidden[1] or "file", text, hidden[2], marks, shown=False)
            elif fence:
                yield Block(name, start, fence[1], text, fence[2], marks)
            last, marks, i = marks, {}, end
        elif comment and comment[1] == "then":
            yield Block(name, start, "sh", f"{comment[2]}\n", None, last, shown=False)
        elif comment:
            if comment[1] not in MARKS:
                raise ValueError(f"{name}:{start}: {comment[1]!r} is none of {', '.join(MARKS)}")
            marks = {**marks, comment[1]: comment[2] or ""}
        elif line and marks:
            raise ValueError(f"{name}:{start}: a comment for a block, and no block after it")
        i += 1
