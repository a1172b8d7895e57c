"""Files that are written whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from nnscaler.atomic_writes import replace_text, save_tensors


def test_a_file_is_replaced_whole_or_stays(tmp_path: Path) -> None:
    file = tmp_path / "state.json"
    replace_text(file, "one")
    replace_text(file, "two")
    with pytest.raises(UnicodeEncodeError):
        replace_text(file, "three \ud800")
    assert file.read_text() == "two"
    assert list(tmp_path.iterdir()) == [file]


def test_memory_that_is_seen_as_two_dtypes_is_saved(tmp_path: Path) -> None:
    """A buffer of complex numbers, and its real part beside it; torch refuses to save both."""
    turns, plain = torch.randn(3, dtype=torch.complex64), torch.randn(2)
    given = {"turns": turns, "turned": turns.conj(), "real": turns.real, "plain": plain, "tied": plain}
    with pytest.raises(RuntimeError, match="view the same data as different types"):
        torch.save(given, tmp_path / "refused.pt")
    save_tensors(given, tmp_path / "saved.pt")
    found = torch.load(tmp_path / "saved.pt")
    assert list(found) == list(given) and all(torch.equal(found[name], given[name]) for name in given)
    assert found["plain"].data_ptr() == found["tied"].data_ptr()
