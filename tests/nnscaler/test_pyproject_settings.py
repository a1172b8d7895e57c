"""Settings: each wrong key and value is named with its line."""

from __future__ import annotations

from pathlib import Path

import pytest

from nnscaler.errors import NnscalerError
from nnscaler.pyproject_settings import Key, KeyPath, find_pyproject, line_of, read_document, read_table, seconds_of

KEYS = (
    Key("budget", "seconds"),
    Key("ranks", "count"),
    Key("seed", "integer"),
    Key("files", "texts"),
    Key("quick", "flag"),
    Key("dtype", "text", choices=("float64", "float32")),
    Key("models", "tables"),
    Key("day", "date"),
)
PATH: KeyPath = ("tool", "it")
TEXT = """\
[project]
name = "x"

[tool.it]
budget = "2m"
models = [
    { model = "a.py" },  # { a brace in a comment
    { model = "b.py",
      ranks = 2 },
]

[[tool.it.table]]
model = "c.py"

[[tool.it.table]]
other = 1
model = "d.py"
"""


def refused(folder: Path, line: str) -> NnscalerError:
    file = folder / "pyproject.toml"
    file.write_text(f"# a comment\n[tool.it]\n{line}\n", encoding="utf-8")
    with pytest.raises(NnscalerError) as caught:
        read_table(read_document(file), PATH, KEYS)
    assert caught.value.code == "bad_settings"
    assert caught.value.where is not None
    assert caught.value.where.file == str(file)
    assert caught.value.where.line == 3
    assert caught.value.where.text == line
    return caught.value


def test_an_unknown_key_is_named_with_its_line_and_the_nearest_one(tmp_path: Path) -> None:
    error = refused(tmp_path, "budgett = 1")
    assert error.message == "[tool.it] has no key 'budgett'"
    assert error.help == "did you mean budget?"
    assert refused(tmp_path, "zzz = 1").help == "the keys are budget, ranks, seed, files, quick, dtype, models, day"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("ranks = 0", "ranks of [tool.it] is a whole number of at least 1, not 0"),
        ("ranks = true", "ranks of [tool.it] is a whole number of at least 1, not true"),
        ("ranks = 2.0", "ranks of [tool.it] is a whole number of at least 1, not 2.0"),
        ('seed = "1"', "seed of [tool.it] is a whole number, not '1'"),
        ('files = "a.py"', "files of [tool.it] is a list of texts, not 'a.py'"),
        ("files = [1]", "files of [tool.it] is a list of texts, not a list"),
        ("quick = 1", "quick of [tool.it] is true or false, not 1"),
        ('budget = "fast"', 'budget of [tool.it] is a time such as "120s", "2m" or "1h30m", not \'fast\''),
        ("budget = 0", 'budget of [tool.it] is a time such as "120s", "2m" or "1h30m", not 0'),
        ('dtype = "float23"', "dtype of [tool.it] is one of float64, float32, not 'float23'"),
        ('day = "2027-01-31"', "day of [tool.it] is a date such as 2027-01-31, not '2027-01-31'"),
        ("day = 2027-01-31T00:00:00", "day of [tool.it] is a date such as 2027-01-31, not a datetime"),
        ("models = [1]", "models of [tool.it] is a list of tables, not a list"),
    ],
)
def test_a_value_of_another_type_is_refused(tmp_path: Path, line: str, message: str) -> None:
    assert refused(tmp_path, line).message == message


def test_a_missing_key_is_named(tmp_path: Path) -> None:
    file = tmp_path / "x.toml"
    file.write_text("[tool.it]\n", encoding="utf-8")
    with pytest.raises(NnscalerError, match=r"\[tool.it\] lacks 'model', a text"):
        read_table(read_document(file), PATH, [Key("model", "text", required=True)])


def test_what_is_no_table_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "x.toml"
    file.write_text("[tool]\nit = 3\n", encoding="utf-8")
    with pytest.raises(NnscalerError, match=r"\[tool.it\] is not a table") as caught:
        read_table(read_document(file), PATH, KEYS)
    assert caught.value.where is not None and caught.value.where.line == 2
    assert read_table(read_document(file), ("tool", "other"), KEYS) == {}


def test_what_is_no_toml_is_refused_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "x.toml"
    file.write_text("a = 1\nb = [\n", encoding="utf-8")
    with pytest.raises(NnscalerError, match=r"x\.toml is not TOML") as caught:
        read_document(file)
    assert caught.value.where is not None
    file.write_bytes(b"a = '\xff'")
    with pytest.raises(NnscalerError, match="is not UTF-8"):
        read_document(file)
    with pytest.raises(NnscalerError, match="No such file") as missing:
        read_document(tmp_path / "none.toml")
    assert missing.value.code == "no_such_file"


@pytest.mark.parametrize(
    ("path", "line"),
    [
        (("tool", "it"), 4),
        (("tool", "it", "budget"), 5),
        (("tool", "it", "models"), 6),
        (("tool", "it", "models", 0, "model"), 7),
        (("tool", "it", "models", 1, "model"), 8),
        (("tool", "it", "models", 1, "ranks"), 9),
        (("tool", "it", "table", 0, "model"), 13),
        (("tool", "it", "table", 1), 15),
        (("tool", "it", "table", 1, "model"), 17),
        (("tool", "it", "none"), 4),
        (("nothing",), 1),
    ],
)
def test_places_are_those_of_the_text(path: KeyPath, line: int) -> None:
    assert line_of(TEXT, path) == line


@pytest.mark.parametrize(
    ("value", "seconds"),
    [("120s", 120), ("2m", 120), ("1h30m", 5400), ("1h 30min", 5400), ("250ms", 0.25), ("90", 90), (1.5, 1.5), (3, 3)],
)
def test_times(value: object, seconds: float) -> None:
    assert seconds_of(value) == seconds


@pytest.mark.parametrize(
    "value", ["", "s", "2 days", "-1s", "1m2", 0, "0s", -1, True, None, float("inf"), float("nan")]
)
def test_what_is_no_time(value: object) -> None:
    assert seconds_of(value) is None


def test_the_nearest_file_is_found(tmp_path: Path) -> None:
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    (tmp_path / "pyproject.toml").touch()
    assert find_pyproject(inner) == tmp_path / "pyproject.toml"
    (tmp_path / "a" / "pyproject.toml").touch()
    assert find_pyproject(inner) == tmp_path / "a" / "pyproject.toml"
