"""A `verify.py` of the user's is never taken for ours."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from nnscaler.cli.main import main
from nnscaler.cli.own_packages_shadowed import wrong_package


def test_ours_are_ours() -> None:
    assert wrong_package() is None


@pytest.mark.parametrize("name", ["verify", "op_registry"])
def test_another_package_exits_2_with_both_paths(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    other = ModuleType(name)
    other.__file__ = f"/home/me/{name}.py"
    monkeypatch.setitem(sys.modules, name, other)
    assert main(["list", "plans"]) == 2
    err = capsys.readouterr().err
    assert f"/home/me/{name}.py" in err and f"{name}/__init__.py" in err and "help:" in err


@pytest.mark.parametrize("packages", ["site-packages", "dist-packages"])
def test_another_distribution_is_to_be_uninstalled(packages: str, monkeypatch: pytest.MonkeyPatch) -> None:
    other = ModuleType("verify")
    other.__file__ = f"/usr/lib/python3/{packages}/verify/__init__.py"
    monkeypatch.setitem(sys.modules, "verify", other)
    assert "another distribution owns `verify`: uninstall it" in str(wrong_package())


@pytest.mark.parametrize("name", ["verify", "op_registry"])
def test_python_m_beside_a_users_file(name: str, tmp_path: Path, repository: Path) -> None:
    (tmp_path / f"{name}.py").write_text("raise RuntimeError('this is mine')\n")
    environment = {**os.environ, "PYTHONPATH": str(repository)}
    command = [sys.executable, "-m", "nnscaler", "list", "plans"]
    found = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert found.returncode == 2, found.stderr
    assert str(tmp_path) in found.stderr and "this is mine" not in found.stderr
