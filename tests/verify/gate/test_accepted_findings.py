"""The file of known findings: what is written is read again, and what is wrong in it is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nnscaler.errors import NnscalerError
from nnscaler.pyproject_settings import read_document
from tests.verify.gate.results import LATER, entry
from verify.gate.accepted_findings_with_owners import quoted, read_baseline, write_baseline
from verify.results.finding_codes import CODES, UNFINISHED

GOOD = """
[[finding]]
item = "a"
code = "gradient_differs"
owner = "ann"
expires = 2027-01-31
reason = "why"
"""


def refused(folder: Path, text: str) -> NnscalerError:
    file = folder / "baseline.toml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(NnscalerError) as caught:
        read_baseline(file)
    assert caught.value.code == "bad_settings"
    assert caught.value.where is not None
    return caught.value


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "baseline.toml"
    known = [
        entry("a ranks=2", message='part of "it"', tensor="w"),
        entry(item="ü\n\\", code="loss_differs", fingerprint="f" * 32, checks=("loss", "gradients \x01")),
        entry(checks=()),
    ]
    write_baseline(file, known)
    read = read_baseline(file)
    assert [(e.item, e.code, e.message, e.tensor, e.fingerprint, e.checks, e.expires) for e in read] == [
        (e.item, e.code, e.message, e.tensor, e.fingerprint, e.checks, LATER) for e in known
    ]
    assert [e.where.line for e in read if e.where is not None] == [4, 13, 22]
    write_baseline(file, [])
    assert read_baseline(file) == ()


def test_a_message_beside_a_fingerprint_is_a_comment(tmp_path: Path) -> None:
    file = tmp_path / "baseline.toml"
    write_baseline(file, [entry(message="0.5 and\nnot 1.0", fingerprint="f")])
    assert "# 0.5 and not 1.0\n" in file.read_text(encoding="utf-8")
    assert read_baseline(file)[0].message is None


@pytest.mark.parametrize("key", ["item", "code", "owner", "expires", "reason"])
def test_each_entry_needs(tmp_path: Path, key: str) -> None:
    lines = [line for line in GOOD.splitlines() if not line.startswith(f"{key} ")]
    assert f"lacks '{key}'" in refused(tmp_path, "\n".join(lines)).message


def test_wrong_entries_are_refused(tmp_path: Path) -> None:
    assert refused(tmp_path, GOOD + 'ovner = "x"\n').help == "did you mean owner?"
    error = refused(tmp_path, GOOD + GOOD.replace("2027-01-31", '"2027-01-31"'))
    assert "is a date" in error.message
    assert error.where is not None and error.where.line == 13
    assert "there is no finding 'none'" in refused(tmp_path, GOOD.replace("gradient_differs", "none")).message
    assert "has no key 'findings'" in refused(tmp_path, GOOD.replace("[[finding]]", "[[findings]]")).message
    assert "is not a list of tables" in refused(tmp_path, GOOD.replace("[[finding]]", "[finding]")).message
    assert "is a text, not ' '" in refused(tmp_path, GOOD.replace('"ann"', '" "')).message


@pytest.mark.parametrize("code", sorted(UNFINISHED))
def test_what_says_that_nothing_was_decided_cannot_be_known(tmp_path: Path, code: str) -> None:
    assert code in CODES
    assert "cannot be known" in refused(tmp_path, GOOD.replace("gradient_differs", code)).message


@given(st.text(st.characters(exclude_categories=("Cs",))))
def test_any_text_can_be_quoted(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    file = tmp_path_factory.getbasetemp() / "quoted.toml"
    file.write_bytes(f"a = {quoted(text)}\n".encode())
    assert read_document(file).content["a"] == text
