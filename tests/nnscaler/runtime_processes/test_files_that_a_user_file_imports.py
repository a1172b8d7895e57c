"""The files of the user's that a file imports, found by its text."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from nnscaler.runtime.program.files_that_a_user_file_imports import imported_files
from nnscaler.runtime.program.import_role_and_user_files import load_user_module


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def names(folder: Path, file: str, *, loaded: bool = False) -> dict[str, str]:
    found = imported_files(folder / file, loaded=loaded)
    return {name: str(path.relative_to(folder.resolve())) for name, path in found.items()}


def test_files_beside_it_and_what_they_import(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "ops.py": "import json, torch, nnscaler, verify, if_first\nfrom if_second import *",
            "verify.py": "",  # has the name of a package of ours
            "if_first.py": "def later():\n    import if_deep.kernels, if_nowhere",
            "if_second.py": "import ops\nfrom importlib import import_module\nimport_module('if_third')",
            "if_third.py": "this is no Python",
            "if_deep/kernels.py": "",  # in a folder without an __init__.py
            "if_unused.py": "",
        },
    )
    assert names(tmp_path, "ops.py") == {
        "verify": "verify.py",
        "if_first": "if_first.py",
        "if_second": "if_second.py",
        "if_deep.kernels": "if_deep/kernels.py",
        "if_third": "if_third.py",
    }


def test_a_module_of_a_package_and_the_project_around_it(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "pyproject.toml": "",
            "src/if_shared.py": "",
            "if_package/__init__.py": "",
            "if_package/inner/__init__.py": "from . import ops",
            "if_package/inner/ops.py": "from .kernels import k\nfrom .. import base\nimport if_package.far, if_shared",
            "if_package/inner/kernels.py": "",
            "if_package/base.py": "",
            "if_package/far.py": "from .inner import kernels",
        },
    )
    expected = {
        "if_package": "if_package/__init__.py",
        "if_package.inner": "if_package/inner/__init__.py",
        "if_package.inner.kernels": "if_package/inner/kernels.py",
        "if_package.base": "if_package/base.py",
        "if_package.far": "if_package/far.py",
        "if_shared": "src/if_shared.py",
    }
    assert names(tmp_path, "if_package/inner/ops.py") == expected


@pytest.mark.parametrize("name", ["if_helper", "types"])  # which means something else to the process, too
def test_what_was_loaded_is_what_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Whatever else has the name on the way, as files that the loader loads import what lies beside them."""
    write(
        tmp_path, {f"other/{name}.py": "", f"own/{name}.py": "K = 1", "own/if_loads.py": f"import {name} as n\nK = n.K"}
    )
    monkeypatch.syspath_prepend(tmp_path / "other")
    assert load_user_module(tmp_path / "own/if_loads.py").K == 1
    for loaded in (False, True):
        assert names(tmp_path, "own/if_loads.py", loaded=loaded) == {name: f"own/{name}.py"}


def test_what_a_file_adds_to_the_path_is_found_where_it_was_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    adds = "import sys\nfrom pathlib import Path\nsys.path.insert(0, str(Path(__file__).parent / 'lib'))\n"
    write(tmp_path, {"if_adds.py": f"{adds}import if_added", "lib/if_added.py": ""})
    assert names(tmp_path, "if_adds.py") == {}
    load_user_module(tmp_path / "if_adds.py")
    assert names(tmp_path, "if_adds.py", loaded=True) == {"if_added": "lib/if_added.py"}
