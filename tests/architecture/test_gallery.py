"""The pages and the notebook of bugs are made from their programs."""

from __future__ import annotations

import json

import pytest

from docs.gallery.write_bugs import ANSWERS, FIRST, NOTEBOOK, OTHERS, PAGE, bugs, said_of_all, written


def test_every_bug_is_on_a_page_and_in_the_notebook_as_it_is() -> None:
    found = bugs()
    assert [bug.number for bug in found] == sorted(ANSWERS) == list(range(1, 16))
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    texts = ["".join(cell["source"]) for cell in cells]
    outputs = ["".join(cell["outputs"][0]["text"]) for cell in cells if cell.get("outputs")]
    assert len(outputs) == len(found) and all("\nREFUTED  " in output for output in outputs)
    for bug in found:
        page = (PAGE if bug.number <= FIRST else OTHERS).read_text(encoding="utf-8")
        assert f"```python\n{bug.text}```\n" in page
        assert any(bug.text in text for text in texts), bug.number


@pytest.mark.long
@pytest.mark.apart
def test_pages_and_notebook_are_what_the_programs_say_now() -> None:
    for path, text in written(said_of_all()).items():
        assert text == path.read_text(encoding="utf-8"), f"python -m docs.gallery.write_bugs writes {path.name} anew"
