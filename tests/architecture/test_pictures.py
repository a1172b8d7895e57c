"""The pictures of the documents are those that the script draws now."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from docs.pictures.draw import PICTURES, file_of

SLOW = {"certificate", "report"}  # a search, a verification


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.long] * (n in SLOW)) for n in PICTURES])
def test_a_picture_is_what_the_script_draws(name: str) -> None:
    drawn = PICTURES[name]().text()
    assert drawn == file_of(name).read_text(encoding="utf-8"), f"python -m docs.pictures.draw {name}"


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_xml_for_both_themes_and_fetches_nothing(name: str) -> None:
    text = file_of(name).read_text(encoding="utf-8")
    root = ElementTree.fromstring(text)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert "prefers-color-scheme: dark" in text
    assert not re.search(r"url\(|@import|<script|(?:href|src)=\"(?!#)", text)


def test_every_picture_has_its_file_and_every_file_its_picture(repository: Path) -> None:
    assert {p.name for p in (repository / "docs" / "pictures").glob("*.svg")} == {file_of(n).name for n in PICTURES}
