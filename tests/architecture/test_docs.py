"""Documents say what is true: their links lead somewhere, their paths exist. (Their examples run: tests/pages/.)"""

from __future__ import annotations

import os.path
import re
from pathlib import Path

import pytest

from ci.site.pages import make_pages
from verify.results.finding_codes import CODES

LINK = re.compile(r"\[[^\]]+\]\((?!https?:)([^)#]+)")
PATH = re.compile(r"`((?:op_registry|nnscaler|verify|docs|examples|benchmarks|tests|ci|\.ci)/[\w./-]*)`")


@pytest.fixture(scope="session")
def documents(files: list[Path]) -> list[Path]:
    return [path for path in files if path.suffix == ".md"]


def test_links_lead_somewhere(documents: list[Path], repository: Path) -> None:
    generated = {os.path.normpath(repository / "docs" / path) for path in make_pages()}
    broken = [
        f"{document.name}: {target}"
        for document in documents
        for target in LINK.findall(document.read_text(encoding="utf-8"))
        if not (document.parent / target).exists() and os.path.normpath(document.parent / target) not in generated
    ]
    assert not broken


def test_paths_in_documents_exist(documents: list[Path], repository: Path) -> None:
    missing = [
        f"{document.name}: {path}"
        for document in documents
        for path in PATH.findall(document.read_text(encoding="utf-8"))
        if not (repository / path).exists()
    ]
    assert not missing


def test_every_finding_is_documented(repository: Path) -> None:
    text = (repository / "docs" / "findings.md").read_text(encoding="utf-8")
    documented = re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)
    assert sorted(documented) == sorted(CODES)
