"""One line of what an error says, also of one that says nothing or begins with a line break."""

from __future__ import annotations

import pytest

from nnscaler.exception_in_one_line import first_line, in_one_line

ERRORS = [
    (ValueError("no such name"), "no such name", "ValueError: no such name"),
    (RuntimeError("\n  two ranks\nare lost"), "two ranks", "RuntimeError: two ranks"),
    (AssertionError(), "", "AssertionError"),
    (KeyError("name"), "'name'", "KeyError: 'name'"),
    (RuntimeError(" \n"), "", "RuntimeError"),
]


@pytest.mark.parametrize(("error", "line", "told"), ERRORS)
def test_one_line(error: Exception, line: str, told: str) -> None:
    assert (first_line(error), in_one_line(error)) == (line, told)
    assert first_line(str(error)) == line and first_line(error, 2) == line[:2]
