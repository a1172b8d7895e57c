"""Files of operators, each with names of its own: registered names are one per process."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

HEAD = "import nnscaler, torch\nfrom torch import Tensor\n\n"


@pytest.fixture(scope="session")
def numbers() -> Iterator[int]:
    return itertools.count()


@pytest.fixture
def write(tmp_path: Path, numbers: Iterator[int], monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """write(source): a file in the current folder; `NAME` in the source becomes a word of its own. Gives its name."""
    monkeypatch.chdir(tmp_path)

    def make(source: str) -> str:
        number = next(numbers)
        file = tmp_path / f"ops_{number}.py"
        file.write_text(HEAD + source.replace("NAME", f"run_{number}"))
        return file.name

    return make
