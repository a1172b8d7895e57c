"""Users' files beside files with our names; role files."""

from __future__ import annotations

import subprocess
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import CodeType

import pytest

import verify
from nnscaler.runtime.communication.communicator import ProgramError
from nnscaler.runtime.program.import_role_and_user_files import UserFileError, letting_go, load_role, load_user_module
from nnscaler.runtime.program.resolve_shadowed_user_imports import own_names


@pytest.fixture(autouse=True)
def unchanged_import_system() -> Iterator[None]:
    """Forget, after the test, everything that it loads."""
    path, finders, modules = list(sys.path), list(sys.meta_path), set(sys.modules)
    yield
    sys.path[:], sys.meta_path[:] = path, finders
    for name in set(sys.modules) - modules:
        del sys.modules[name]


def write(folder: Path, **files: str) -> None:
    for name, text in files.items():
        file = folder / (name.replace("__", "/") + ".py")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


MODEL = """
import verify
import verify.inner.deep as deep
from op_registry import mine
from ir import *
from verify import inner, flag
import layers_of_mine

def late():
    import ir
    from types import WHO
    import verify.late_part
    return ir.name, WHO, verify.late_part.name

class Model:
    pass
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(
        tmp_path,
        model=MODEL,
        ir="__all__ = ['name']\nname = 'ir of the user'\nimport verify\nassert verify.flag == 'verify of the user'",
        op_registry="from verify import flag as mine",
        types="WHO = 'types of the user'",
        layers_of_mine="import op_registry\nwho = op_registry.mine",
    )
    (tmp_path / "verify" / "inner").mkdir(parents=True)
    (tmp_path / "verify" / "__init__.py").write_text("flag = 'verify of the user'\nfrom . import inner")
    (tmp_path / "verify" / "inner" / "__init__.py").write_text("from ..late_part import name\nimport ir as _ir")
    (tmp_path / "verify" / "inner" / "deep.py").write_text("import types\nwho = types.WHO")
    (tmp_path / "verify" / "late_part.py").write_text("name = 'late'")
    return tmp_path


def test_files_of_the_folder_get_each_other(folder: Path) -> None:
    model = load_user_module(folder / "model.py")
    assert model.verify.flag == model.flag == model.mine == "verify of the user"
    assert model.inner is model.verify.inner
    assert (model.inner.name, model.deep.who) == ("late", "types of the user")
    assert model.name == "ir of the user"
    assert model.layers_of_mine.who == "verify of the user"
    assert model.late() == ("ir of the user", "types of the user", "late")
    assert load_user_module(folder / "model.py") is model
    assert model.Model.__module__.startswith("_nnscaler_user_")


def test_everybody_else_gets_what_they_got(folder: Path) -> None:
    before = dict(sys.modules)
    load_user_module(folder / "model.py")
    import types

    import op_registry

    assert sys.modules["verify"] is verify is before["verify"]
    assert "verify" in str(verify.__file__)
    assert not hasattr(op_registry, "mine")
    assert not hasattr(types, "WHO")
    assert sys.path[-1] == str(folder)
    assert str(folder) not in sys.path[:-1]
    assert "ir" not in sys.modules


def test_ours_are_not_yet_imported(folder: Path, repository: Path) -> None:
    """The collision is with what the process would import."""
    script = f"""
import sys
from nnscaler.runtime.program.import_role_and_user_files import load_user_module
assert "verify" not in sys.modules and "op_registry" not in sys.modules
model = load_user_module({str(folder / "model.py")!r})
import verify, op_registry
assert model.verify is not verify and hasattr(op_registry, "register_op"), (verify, op_registry)
print("ours", verify.__file__.startswith({str(repository)!r}))
"""
    result = subprocess.run([sys.executable, "-c", script], cwd=repository, capture_output=True, text=True, timeout=600)
    assert result.stdout == "ours True\n", result.stderr


def test_without_collision_nothing_is_installed(tmp_path: Path) -> None:
    write(
        tmp_path,
        my_model_1="import my_layers_1\nimport verify\nfrom . import my_other_1",
        my_layers_1="",
        my_other_1="",
    )
    finders = list(sys.meta_path)
    model = load_user_module(tmp_path / "my_model_1.py")
    assert sys.meta_path == finders
    assert model.verify is verify
    assert model.my_layers_1 is sys.modules["my_layers_1"]  # by its ordinary name


def test_two_folders_with_the_same_file_names(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write(tmp_path / name, model="import my_layers_2 as layers", my_layers_2=f"who = {name!r}")
    models = [load_user_module(tmp_path / name / "model.py") for name in ("one", "two")]
    assert [m.layers.who for m in models] == ["one", "two"]


def test_our_own_folder_beside_a_model_is_not_the_users(repository: Path) -> None:
    """A model at the root of this repository sees our packages."""
    assert own_names(repository).isdisjoint({"nnscaler", "verify", "op_registry"})


def test_files_that_cannot_be_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserFileError, match=r"^file models/absent\.py does not exist$"):
        load_user_module("models/absent.py")
    write(tmp_path, relative="from .. import x", broken="import torch\n1 / 0")
    with pytest.raises(UserFileError, match=r"^relative\.py: attempted relative import.*import its siblings by name$"):
        load_user_module("relative.py")
    for _ in range(2):  # a failed import leaves nothing behind
        with pytest.raises(ZeroDivisionError):
            load_user_module("broken.py")
    (tmp_path / "text.txt").write_text("")
    with pytest.raises(UserFileError, match="its name must end in"):
        load_user_module("text.txt")


def test_roles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, role_0="RANKS = (0,)\n\ndef fail():\n    raise ValueError('in the role')", role_1="def broken(:\n")
    role = load_role("role_0.py")
    assert (role.RANKS, role.__file__) == ((0,), str(tmp_path / "role_0.py"))
    assert sys.modules[role.__name__] is role
    with pytest.raises(ValueError, match="in the role") as caught:
        role.fail()
    assert "    raise ValueError('in the role')" in "".join(traceback.format_exception(caught.value))
    write(tmp_path, role_0="RANKS = (1,)")
    assert load_role("role_0.py").RANKS == (1,)  # the file was edited
    with pytest.raises(ProgramError, match=r"^role_1\.py:1: "):
        load_role("role_1.py")
    with pytest.raises(ProgramError, match=r"^role file role_2\.py does not exist$"):
        load_role("role_2.py")


def test_a_role_that_is_transformed(tmp_path: Path) -> None:
    def transform(source: str, filename: str) -> CodeType:
        return compile(source.replace("1", "2"), filename, "exec")

    write(tmp_path, role_0="RANKS = (1,)")
    assert load_role(tmp_path / "role_0.py", transform=transform).RANKS == (2,)


def test_values_are_let_go_of_after_their_last_use(tmp_path: Path) -> None:
    text = """
class Stage0:
    def forward(self, make, seen):
        a = make("a")
        b, c = make("b"), make("c")
        first = seen(1, a)
        d = [b]
        second = seen(2, d)
        def inner():
            return c
        third = seen(3, None)
        return {"d": d, "inner": inner}
"""
    write(tmp_path, role_0=text)

    class Value:
        def __init__(self, name: str) -> None:
            self.name = name
            alive.add(name)

        def __del__(self) -> None:
            alive.discard(self.name)

    alive: set[str] = set()
    seen: dict[int, set[str]] = {}
    role = load_role(tmp_path / "role_0.py", transform=letting_go)
    found = role.Stage0().forward(Value, lambda place, value: seen.update({place: set(alive)}))
    assert seen == {1: {"a", "b", "c"}, 2: {"b", "c"}, 3: {"b", "c"}}
    assert (found["d"][0].name, found["inner"]().name) == ("b", "c")
    with pytest.raises(TypeError) as caught:
        role.Stage0().forward(Value, None)
    assert traceback.extract_tb(caught.value.__traceback__)[-1].lineno == 6


def test_a_rank_imports_no_compiler_of_torch() -> None:
    """Every local job waits for these imports."""
    heavy = ["torch._dynamo", "torch._inductor", "torch._functorch.aot_autograd", "torch.export._trace"]
    program = "import sys, verify.programs.execution.record_rank_steps; "
    program += f"print([name for name in {heavy} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_what_is_compiled_for_one_load_of_a_role_is_not_run_for_another() -> None:
    """torch.compile keeps, by a function's code, names in the globals of the module that it compiled it in."""
    done = subprocess.run([sys.executable, "-c", TWO_LOADS], check=False, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout == "4.0\n6.0\n", done.stderr


TWO_LOADS = """
import torch
from nnscaler.runtime.program.import_role_and_user_files import letting_go

lines = ["y = x + 1", "torch._dynamo.graph_break()", "z = y * 2", "return z"]
role = "class S:\\n    def forward(self, x):\\n" + "".join(f"        {line}\\n" for line in lines)
for value in (1.0, 2.0):
    module = {"torch": torch}
    exec(letting_go(role, "role_0.py"), module)
    print(float(torch.compile(module["S"]().forward, backend="eager")(torch.tensor(value))))
"""
