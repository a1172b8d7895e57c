"""Files that are written whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from nnscaler.atomic_writes import replace_text


def test_a_file_is_replaced_whole_or_stays(tmp_path: Path) -> None:
    file = tmp_path / "state.json"
    replace_text(file, "one")
    replace_text(file, "two")
    with pytest.raises(UnicodeEncodeError):
        replace_text(file, "three \ud800")
    assert file.read_text() == "two"
    assert list(tmp_path.iterdir()) == [file]
