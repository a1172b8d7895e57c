"""No committed file holds paths of somebody's machine, or work left over."""

from __future__ import annotations

import re
from pathlib import Path

# "/home/me/" may stand for anybody's.
MACHINE_PATH = re.compile(r"(?<![\w.])/(?:home/(?!me/)|(?:root|Users|opt|work|tmp)/)[\w.]")
LEFT_OVER = re.compile(r"\b(?:TO" + r"DO|FIX" + r"ME|XX" + r"X|Not" + r"ImplementedError)\b")
BINARY = {".pt", ".png", ".pdf"}


def find(files: list[Path], repository: Path, pattern: re.Pattern[str]) -> list[str]:
    return [
        f"{path.relative_to(repository)}:{number}: {line.strip()}"
        for path in files
        if path.suffix not in BINARY
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if pattern.search(line)
    ]


def test_no_path_of_a_machine(files: list[Path], repository: Path) -> None:
    assert not find([path for path in files if path != Path(__file__)], repository, MACHINE_PATH)


def test_nothing_is_left_to_do(files: list[Path], repository: Path) -> None:
    assert not find(files, repository, LEFT_OVER)
