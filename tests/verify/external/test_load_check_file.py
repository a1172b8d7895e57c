"""Check files of users: what they may say, and each mistake with its place."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from nnscaler.errors import NnscalerError
from verify.external.load_check_file import TEMPLATE, CheckFile, load_check_file
from verify.external.reference import check_rows

FUNCTIONS = """
import torch

def model():
    return torch.nn.Linear(4, 2)

def batch():
    return torch.ones(8, 4)

def parallelize(model, mesh):
    return model
"""
PLAIN = FUNCTIONS + 'mesh = ("dp",)\n'


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    yield tmp_path


def load(text: str, target: str = "check.py", *, ranks: int | None = None, mesh: str | None = None) -> CheckFile:
    Path("check.py").write_text(text, encoding="utf-8")
    return load_check_file(target, ranks=ranks, mesh=mesh)


def refused(text: str, target: str = "check.py", *, ranks: int | None = 4, mesh: str | None = None) -> NnscalerError:
    with pytest.raises(NnscalerError) as caught:
        load(text, target, ranks=ranks, mesh=mesh)
    return caught.value


def test_the_template_is_a_check_file(folder: Path) -> None:
    program = load(TEMPLATE, ranks=4).program
    assert (program.name, program.mesh, program.data_axes) == ("check.py", (("dp", 4),), ("dp",))
    assert program.where is not None and program.where.text.startswith("def parallelize(model, mesh):")
    model, batch = program.model(), program.batch()
    loss = program.step(model, batch)
    assert loss is not None and loss.requires_grad
    assert (program.reference_step, program.optimizer, program.max_norm, program.clip) == (None, None, None, None)
    assert (dict(program.names), program.reference) == ({}, "whole")


def test_all_that_a_file_may_say(folder: Path) -> None:
    text = (
        FUNCTIONS
        + """
mesh = {"replicate": 2, "tp": 2}
data_axes = ()
max_norm = 1
names = {"a": "b"}
reference = "parts"

def step(model, batch):
    return model(batch).sum()

def reference_step(model, batch, scale=2.0):
    return scale * model(batch).sum()

def optimizer(model):
    return torch.optim.AdamW(model.parameters())

def clip(model, max_norm):
    return torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
"""
    )
    found = load(text)
    program = found.program
    assert (program.mesh, program.data_axes) == ((("replicate", 2), ("tp", 2)), ())
    assert (program.max_norm, program.names, program.reference) == (1.0, {"a": "b"}, "parts")
    assert program.reference_step is not None
    model, batch = program.model(), program.batch()
    assert torch.equal(program.reference_step(model, batch), 2 * program.step(model, batch))  # type: ignore[arg-type,operator]
    assert program.optimizer is not None and isinstance(program.optimizer(model), torch.optim.AdamW)
    assert program.clip is not None and program.clip.__name__ == "clip"
    assert found.notes == ()


@pytest.mark.parametrize(
    ("said", "ranks", "mesh", "axes", "data_axes"),
    [
        ('mesh = ("dp",)', 4, None, (("dp", 4),), ("dp",)),
        ('mesh = "tp"', 4, None, (("tp", 4),), ()),
        ('mesh = {"dp": 2, "tp": 2}', None, None, (("dp", 2), ("tp", 2)), ("dp",)),
        ('mesh = {"dp": -1, "tp": 2}', 8, None, (("dp", 4), ("tp", 2)), ("dp",)),
        ('mesh = (("dp_replicate", 2), ("dp_shard", 2))', 4, None, (("dp_replicate", 2), ("dp_shard", 2)), None),
        ('def mesh(ranks): return {"dp": ranks // 2, "tp": 2}', 6, None, (("dp", 3), ("tp", 2)), ("dp",)),
        ('def mesh(ranks): return ("pp",)', 3, None, (("pp", 3),), ()),
        ('data_axes = ("rows",)', 4, None, (("rows", 4),), ("rows",)),
        ('data_axes = "rows"', 4, None, (("rows", 4),), ("rows",)),
        ('mesh = ("dp",)', 4, "fsdp=2,cp=2", (("fsdp", 2), ("cp", 2)), ("fsdp",)),
        ('mesh = ("dp",)', None, "tp=3", (("tp", 3),), ()),
        ("", None, "pp=2", (("pp", 2),), ()),
        ('mesh = ("dp",)', None, None, (("dp", 2),), ("dp",)),
    ],
)
def test_meshes(
    folder: Path,
    said: str,
    ranks: int | None,
    mesh: str | None,
    axes: tuple[tuple[str, int], ...],
    data_axes: tuple[str, ...] | None,
) -> None:
    found = load(FUNCTIONS + said, ranks=ranks, mesh=mesh)
    assert found.program.mesh == axes
    assert found.program.data_axes == (tuple(name for name, _ in axes) if data_axes is None else data_axes)
    told = any("by the names of the axes" in note for note in found.notes)
    assert told == ("data_axes" not in said)
    assert any("2 ranks, for --ranks was not given" in note for note in found.notes) == (
        ranks is None and mesh is None and found.program.mesh == (("dp", 2),)
    )


# what is wrong, the code, a part of the message, and the line that is shown
WRONG = [
    (PLAIN.replace("def batch", "def batches"), "check_incomplete", "has no function batch() (it defines model", None),
    (FUNCTIONS, "check_incomplete", "says neither `mesh` nor over which axis", "def parallelize(model, mesh):"),
    (FUNCTIONS + "data_axes = ()", "check_incomplete", "says neither `mesh` nor", "def parallelize(model, mesh):"),
    (
        PLAIN + "def step(model): return model(1)",
        "bad_check_file",
        "`step` of check.py cannot be called as step(model, batch): too many positional arguments",
        "def step(model): return model(1)",
    ),
    (
        PLAIN.replace("parallelize(model, mesh)", "parallelize(m)"),
        "bad_check_file",
        "parallelize(model, mesh)",
        "def p",
    ),
    (
        PLAIN + "model = torch.nn.Linear(4, 2)",
        "bad_check_file",
        "`model` of check.py is a module (Linear)",
        "model = t",
    ),
    (PLAIN + "batch = torch.ones(3)", "bad_check_file", "`batch` of check.py is a Tensor, not a function", "batch = t"),
    (PLAIN + "optimizer = 3", "bad_check_file", "`optimizer` of check.py is an int, not a function", "optimizer = 3"),
    (PLAIN + "max_norm = 0", "bad_check_file", "`max_norm` of check.py is 0, not a positive number", "max_norm = 0"),
    (PLAIN + "max_norm = True", "bad_check_file", "is True, not a positive number", "max_norm = True"),
    (PLAIN + "def clip(m, n): ...", "bad_check_file", "`max_norm` of check.py is None", "def clip(m, n): ..."),
    (PLAIN + "names = ['a']", "bad_check_file", "`names` of check.py is no dict of names", "names = ['a']"),
    (PLAIN + "reference = 'mean'", "bad_check_file", "is 'mean', none of whole, parts", "reference = 'mean'"),
    (PLAIN + "data_axes = 3", "bad_check_file", "`data_axes` of check.py is 3, not names", "data_axes = 3"),
    (PLAIN + "data_axes = ('pd',)", "bad_mesh", "names 'pd', and the mesh has dp", "data_axes = ('pd',)"),
    (FUNCTIONS + "mesh = ('dp', 'tp')", "bad_mesh", "which names no axes with sizes", "mesh = ('dp', 'tp')"),
    (FUNCTIONS + "mesh = {'dp': 2.0}", "bad_mesh", "which names no axes with sizes", "mesh = {'dp': 2.0}"),
    (FUNCTIONS + "mesh = {'dp': True}", "bad_mesh", "which names no axes with sizes", "mesh = {'dp': True}"),
    (FUNCTIONS + "mesh = {}", "bad_mesh", "which names no axes with sizes", "mesh = {}"),
    (FUNCTIONS + "mesh = {'dp': 3}", "bad_mesh", "is for 3 ranks (dp=3), and there are 4", "mesh = {'dp': 3}"),
    (FUNCTIONS + "mesh = {'dp': -1, 'tp': 3}", "bad_mesh", "do not divide 4 ranks", "mesh = {'dp'"),
    (FUNCTIONS + "mesh = {'dp': -1, 'tp': -1}", "bad_mesh", "of several axes open: dp, tp", "mesh = {'dp'"),
    (
        FUNCTIONS + "def mesh(n): return 1 / 0",
        "model_raised",
        "mesh() of check.py raises ZeroDivisionError",
        "def mesh",
    ),
    (FUNCTIONS + "def mesh(): return {}", "model_raised", "mesh() of check.py raises TypeError", None),
    (FUNCTIONS + "data_axes = ('a', 'b')", "bad_mesh", "which names no axes with sizes", "data_axes = ('a', 'b')"),
    (PLAIN + "import nothing_like_this", "model_import_failed", "No module named 'nothing_like_this'", "import noth"),
    (PLAIN + "raise SystemExit(3)", "model_import_failed", "calls sys.exit(3)", "raise S"),
]


@pytest.mark.parametrize(("text", "code", "told", "line"), WRONG, ids=[told for _, _, told, _ in WRONG])
def test_mistakes(folder: Path, text: str, code: str, told: str, line: str | None) -> None:
    error = refused(text)
    assert error.code == code and told in error.message
    assert error.help or code in ("model_raised", "model_import_failed")
    if line is not None:
        assert error.where is not None and error.where.text.startswith(line), error.where


NESTED = [
    ("import inner", "inner.py", "import math\nimport nothing_like_this", 2, "import nothing_like_this"),
    ("import inner", "inner.py", "from .. import others", 1, "from .. import others"),
    ("import inner", "inner.py", "from os import nothing_like_this", 1, "from os import nothing_like_this"),
    ("import inner", "inner.py", "x = (", 1, "x = ("),
]


@pytest.mark.parametrize(("line", "file", "inner", "number", "text"), NESTED, ids=[row[2] for row in NESTED])
def test_an_import_that_fails_inside_of_another_has_its_place(
    folder: Path, line: str, file: str, inner: str, number: int, text: str
) -> None:
    Path(file).write_text(inner, encoding="utf-8")
    sys.modules.pop("inner", None)
    error = refused(PLAIN + line)
    assert error.code == "model_import_failed"
    assert error.where is not None
    assert (Path(error.where.file).name, error.where.line, error.where.text) == (file, number, text)


def test_an_import_that_fails_in_the_package_around_a_file_has_its_place(folder: Path) -> None:
    inside = folder / "outer_of_mine" / "inner_of_mine"
    inside.mkdir(parents=True)
    (inside.parent / "__init__.py").write_text("\nimport nothing_like_this\n", encoding="utf-8")
    (inside / "__init__.py").touch()
    (inside / "values.py").write_text("one = 1", encoding="utf-8")
    (inside / "check.py").write_text("from .values import one\n" + PLAIN, encoding="utf-8")
    with pytest.raises(NnscalerError) as caught:
        load_check_file("outer_of_mine.inner_of_mine.check:parallelize", ranks=2)
    where = caught.value.where
    assert where is not None and (where.line, where.text) == (2, "import nothing_like_this")


def test_a_file_that_lacks_something_is_shown_an_example(folder: Path) -> None:
    error = refused("")
    assert error.help is not None and "def parallelize(model, mesh):   # yours, as it is" in error.help


def test_another_function_may_be_the_parallel_one(folder: Path) -> None:
    text = PLAIN + "def with_tp(model, mesh, *, more=1):\n    return model\n"
    found = load(text, "check.py::with_tp").program
    assert (found.name, found.parallelize.__name__) == ("check.py::with_tp", "with_tp")
    assert found.where is not None and found.where.text.startswith("def with_tp")
    assert "has no function nothing() (it defines model, batch" in refused(text, "check.py::nothing").message
    with pytest.raises(NnscalerError, match=r"there is no file 'none.py'"):
        load_check_file("none.py")


def test_an_imported_function_has_its_own_place(folder: Path) -> None:
    Path("plans_of_mine.py").write_text("\n\ndef parallelize(model, mesh):\n    return model\n", encoding="utf-8")
    text = PLAIN.replace("def parallelize", "def unused") + "from plans_of_mine import parallelize\n"
    where = load(text, ranks=2).program.where
    assert where is not None and where.file.endswith("plans_of_mine.py") and where.line == 3


def test_a_slip_of_a_name_is_told(folder: Path) -> None:
    """What is not read would else be believed to have been verified."""
    found = load(PLAIN + "data_axis = ()\nmaxnorm = 1.0\nsteps = 3\nother = 1\n", ranks=2)
    told = [note for note in found.notes if "which is not read" in note]
    assert [note.rpartition("`")[0].rpartition("`")[2] for note in told] == ["data_axes", "max_norm", "step"]
    Path("other.py").write_text(PLAIN + "def step(model, batch): ...\nsteps = 3\n", encoding="utf-8")
    assert not [note for note in load_check_file("other.py", ranks=2).notes if "read" in note]


def test_rows_that_do_not_divide_have_the_place_of_the_batch(folder: Path) -> None:
    program = load(PLAIN, ranks=3).program
    with pytest.raises(NnscalerError, match=r"the 8 rows of `batch\(\)` in check.py do not divide into 3") as caught:
        check_rows(program, program.batch())
    assert caught.value.where is not None and caught.value.where.text == "def batch():"


def test_what_the_users_functions_raise_is_the_users(folder: Path) -> None:
    program = load(PLAIN.replace("return torch.nn.Linear(4, 2)", "return torch.nn.Linear()"), ranks=2).program
    with pytest.raises(NnscalerError) as caught:
        program.model()
    assert caught.value.code == "model_raised" and caught.value.where is not None
    assert caught.value.where.text == "return torch.nn.Linear()"


def test_one_file_serves_several_meshes(folder: Path) -> None:
    text = FUNCTIONS + "mesh = ('dp',)\ndata_axes = ('dp',)"
    found = load(text, mesh="tp=2")
    assert (found.program.mesh, found.program.data_axes) == ((("tp", 2),), ())
    assert "`data_axes` names dp, which --mesh tp=2 has not: left out" in found.notes


def test_an_axis_of_no_mesh_is_still_an_error(folder: Path) -> None:
    error = refused(FUNCTIONS + "mesh = ('rows',)\ndata_axes = ('dp',)", ranks=None, mesh="tp=2")
    assert (error.code, "names 'dp', and the mesh has tp" in error.message) == ("bad_mesh", True)
