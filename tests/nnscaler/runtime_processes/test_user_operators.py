"""Operators that a rank program takes from the user's file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nnscaler.runtime import user_operators
from nnscaler.runtime.communication.communicator import ProgramError
from nnscaler.runtime.program.import_role_and_user_files import load_user_module

OPERATORS = """
import torch
import nnscaler
import verify  # the file beside this one

@nnscaler.register_op("a b, b -> a b", name="{prefix}.scaled")
def scaled(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x * w * verify.FACTOR

@nnscaler.register_op("a b -> a b")
class {prefix}Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2
    @staticmethod
    def backward(ctx, g):
        return g * 2

@torch.library.custom_op("{prefix}::halved", mutates_args=())
def halved(x: torch.Tensor) -> torch.Tensor:
    return x / 2
nnscaler.register_op("a b -> a b")(halved)
"""


def write(folder: Path, prefix: str) -> Path:
    (folder / "verify.py").write_text("FACTOR = 3")
    (folder / "ops.py").write_text(OPERATORS.format(prefix=prefix))
    return folder / "ops.py"


CALLS = """
import torch
from nnscaler.runtime import user_operators
user = user_operators(
    scaled=("{prefix}.scaled", {file!r}, "scaled"),
    doubled=("{prefix}Doubled", {file!r}, "{prefix}Doubled"),
    halved=("{prefix}.halved.default", {file!r}, "halved"),
)
x = torch.ones(2, 3, requires_grad=True)
y = user.scaled(user.doubled(user.halved(x.detach()) + x), torch.ones(3))
y.sum().backward()
print(y.sum().item(), x.grad.sum().item())
"""


def test_the_file_is_imported_in_a_process_that_has_not(tmp_path: Path, repository: Path) -> None:
    script = CALLS.format(prefix="uo1", file=str(write(tmp_path, "uo1")))
    result = subprocess.run([sys.executable, "-c", script], cwd=repository, capture_output=True, text=True, timeout=600)
    assert result.stdout == "54.0 36.0\n", result.stderr


def test_registered_operators_are_used(tmp_path: Path) -> None:
    file = write(tmp_path, "uo2")
    module = load_user_module(file)
    found = user_operators(
        scaled=("uo2.scaled", str(file), "scaled"),
        doubled=("uo2Doubled", str(file), "uo2Doubled"),
        halved=("uo2.halved.default", "gone.py", "halved"),
        elsewhere=("uo2.scaled", "", ""),
    )
    assert found.scaled is module.scaled
    assert found.halved is torch.ops.uo2.halved.default
    x = torch.ones(1, 2)
    assert torch.equal(found.elsewhere(x, x[0]), found.scaled(x, x[0]))
    assert torch.equal(found.doubled(x), x * 2)


def test_what_cannot_be_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.py").write_text("")
    (tmp_path / "broken.py").write_text("1 / 0")
    for file, message in {
        "gone.py": "operator `uo3` is not registered in this process, and 'gone.py', where it was registered, does not",
        "": "operator `uo3` is not registered in this process, and the program does not say where",
        "empty.py": r"operator `uo3`: .*empty\.py was imported, but has no `function`",
        "broken.py": r"operator `uo3`: importing .*broken\.py failed: ZeroDivisionError",
    }.items():
        with pytest.raises(ProgramError, match=message):
            user_operators(uo3=("uo3", file, "function"))
