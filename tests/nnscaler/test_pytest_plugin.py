"""The pytest plugin: what it gives, and that it does nothing to a test run that does not use it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass

import pytest

from tests.sampling import every

pytest_plugins = ("pytester",)

PLUGIN = ("-p", "no:cacheprovider")  # the plugin itself is an entry point of the installed project
OPS = """
import nnscaler
from torch import Tensor


@nnscaler.register_op("m k+, k+ n -> m n", name="{name}_right")
def right(a: Tensor, b: Tensor) -> Tensor:
    return a @ b


@nnscaler.register_op("a b -> a b", name="{name}_wrong")
def wrong(x: Tensor) -> Tensor:
    return x.softmax(-1)
"""
MODEL = """
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, x, labels):
        return nn.functional.cross_entropy(self.layer(x), labels)


def build_model():
    return Model()


def sample_inputs():
    return {"x": torch.randn(12, 8), "labels": torch.randint(0, 4, (12,))}
"""
OPERATORS = """
def test_right(verify_op):
    assert verify_op("plugin_ops.py::right").verdict.passes

def test_wrong(verify_op):
    verify_op("plugin_ops.py::wrong")

def test_none(verify_op):
    verify_op("plugin_ops.py::nothing")
"""
PLANS = """
import unittest
import pytest
from model import build_model, sample_inputs

@pytest.mark.nnscaler_plan(ranks=2, plan="dp=2", depth="quick")
def test_file():
    return "model.py"

@pytest.mark.nnscaler_plan(ranks=4, plan="dp=2,tp=2", depth="quick")
def test_module():
    return build_model, sample_inputs()

@pytest.mark.nnscaler_plan(ranks=2, depth="quick")
def test_fixture(verify_plan):
    assert "2 ranks" in verify_plan("model.py").setting
    assert "1 rank" in verify_plan("model.py", ranks=1).setting

@pytest.mark.nnscaler_plan(ranks=2)
def test_nothing():
    pass

@pytest.mark.nnscaler_plan(ranks=2)
def test_unused(verify_plan):
    pass

class TestCase(unittest.TestCase):
    @pytest.mark.nnscaler_plan(ranks=2)
    def test_method(self):
        return "model.py"

@pytest.mark.nnscaler_plan(ranks=3, plan="dp=2")
def test_illegal():
    return "model.py"

@pytest.mark.nnscaler_plan(ranks=2)
def test_no_inputs():
    return build_model
"""
PROGRAMS = """
def test_right(verify_external):
    assert verify_external("check.py", ranks=2, steps=1).verdict.passes

def test_wrong(verify_external):
    verify_external("check.py::forgotten", ranks=2, steps=1)

def test_none(verify_external):
    verify_external("nothing.py")
"""
CHECK = """
import torch
from torch.distributed.fsdp import fully_shard

mesh = ("dp",)

def model():
    return torch.nn.Linear(8, 4)

def batch():
    return torch.randn(12, 8)

def step(model, batch):
    return model(batch).square().mean()

def parallelize(model, mesh):
    return fully_shard(model, mesh=mesh)

def forgotten(model, mesh):
    return model
"""
GATE = """
[tool.nnscaler.gate]
baseline = "known.toml"
[[tool.nnscaler.gate.models]]
model = "model.py"
plans = [{ ranks = 2, backend = "simulator", depth = "quick" }]
[tool.nnscaler.gate.ops]
files = ["plugin_ops.py", "gone.py"]
"""
WRONG_PLAN = """
import pytest

@pytest.mark.nnscaler_plan(ranks=2, plan="tp=2", depth="quick")
def test_file():
    return "wrong_model.py"
"""
UNSHADOWED = """
import sys

import op_registry
import verify


def test_mine():
    assert verify.MINE == 1 and op_registry.MINE == 2
    prefixes = ("torch.", "nnscaler.", "verify.", "op_registry.")
    ours = [name for name in sys.modules if f"{name}.".startswith("torch.") or name.startswith(prefixes)]
    assert ours == ["nnscaler.pytest_plugin"], ours
"""


def test_a_suite_with_a_verify_of_its_own_is_left_alone(pytester: pytest.Pytester) -> None:
    """pytest puts a test's folder first on the path: whatever the plugin imported of ours would be the user's file."""
    pytester.makepyfile(verify="MINE = 1", op_registry="MINE = 2", test_mine=UNSHADOWED)
    result = pytester.runpytest_subprocess(*PLUGIN)
    result.assert_outcomes(passed=1)


def test_a_suite_with_a_verify_of_its_own_is_told_why_ours_cannot_run(pytester: pytest.Pytester) -> None:
    test = "import verify\n\ndef test_op(verify_op):\n    verify_op('aten.relu')\n"
    pytester.makepyfile(verify="MINE = 1", test_it=test)
    result = pytester.runpytest_subprocess(*PLUGIN)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["*cannot verify anything in this process: the package `verify` in use is not nnScaler's*"]
    )


@dataclass(frozen=True)
class Suite:
    """One run of a suite that verifies operators and plans."""

    lines: pytest.LineMatcher

    def outcomes(self, file: str) -> dict[str, str]:
        """How each test of a file ended, by its name."""
        found = re.findall(rf"^(PASSED|FAILED|ERROR) {file}::(\w+)", str(self.lines), re.MULTILINE)
        return {name: outcome.lower() for outcome, name in found}


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Suite:
    """The operators, the plans, the gate, and a model with an operator of the user's whose annotation is wrong."""
    folder = tmp_path_factory.mktemp("suite")
    wrong = MODEL.replace("self.layer(x)", "wrong(self.layer(x))")
    texts = {
        "plugin_ops.py": OPS.format(name="plugin"),
        "test_operators.py": OPERATORS,
        "model.py": MODEL,
        "test_plans.py": PLANS,
        "ops2.py": OPS.format(name="plugin_plan"),
        "wrong_model.py": wrong.replace("import torch\n", "import torch\nfrom ops2 import wrong\n", 1),
        "test_wrong.py": WRONG_PLAN,
        "check.py": CHECK,
        "test_programs.py": PROGRAMS,
        "pyproject.toml": GATE,
        "known.toml": "",
    }
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    options = ["--nnscaler-gate", "-v", "--strict-markers", "-rA", "--basetemp", str(folder / "tmp")]
    command = [sys.executable, "-m", "pytest", *PLUGIN, *options]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)
    assert result.returncode == pytest.ExitCode.TESTS_FAILED, result.stdout + result.stderr
    return Suite(pytest.LineMatcher(result.stdout.splitlines()))


def test_operators(suite: Suite) -> None:
    expected = {"test_right": "passed", "test_wrong": "failed", "test_none": "failed"}
    assert suite.outcomes("test_operators.py") == expected
    suite.lines.fnmatch_lines(["REFUTED  plugin_wrong*", "annotation_wrong *", "*reproduce: nnscaler reproduce nns1:*"])
    suite.lines.fnmatch_lines(["could not be verified: *plugin_ops.py::nothing does not exist*"])
    suite.lines.no_fnmatch_line("*pytest_assertions.py*")


def test_plans(suite: Suite) -> None:
    passed = dict.fromkeys(["test_file", "test_module", "test_fixture"], "passed")
    failed = dict.fromkeys(["test_nothing", "test_unused", "test_illegal", "test_no_inputs", "TestCase"], "failed")
    assert suite.outcomes("test_plans.py") == passed | failed
    for name in ("test_nothing", "test_unused", "test_method"):
        suite.lines.fnmatch_lines([f"{name}: nothing was verified: return a model file, *"])
    suite.lines.fnmatch_lines(["FAILED test_plans.py::TestCase::test_method*"])
    suite.lines.fnmatch_lines(["could not be verified: *plan*"])
    suite.lines.fnmatch_lines(["could not be verified: a module needs its inputs: *"])


def test_programs_of_others(suite: Suite) -> None:
    expected = {"test_right": "passed", "test_wrong": "failed", "test_none": "failed"}
    assert suite.outcomes("test_programs.py") == expected
    suite.lines.fnmatch_lines(["REFUTED  check.py::forgotten on 2 ranks (dp=2)*", "gradient_differs *"])
    suite.lines.fnmatch_lines(["could not be verified: there is no file 'nothing.py'*"])


def test_a_wrong_plan_fails_with_its_report(suite: Suite) -> None:
    assert suite.outcomes("test_wrong.py") == {"test_file": "failed"}
    suite.lines.fnmatch_lines(["REFUTED  wrong_model.py on 2 ranks*"])


def test_the_gate_as_tests(suite: Suite) -> None:
    suite.lines.fnmatch_lines_random(
        [
            "test_operators.py::test_right PASSED*",
            "nnscaler-gate::model.py ranks=2 backend=simulator depth=quick PASSED*",
            "nnscaler-gate::plugin_ops.py::right PASSED*",
            "nnscaler-gate::plugin_ops.py::wrong FAILED*",
            "nnscaler-gate::gone.py FAILED*",
        ]
    )
    suite.lines.fnmatch_lines(["*nnscaler gate: plugin_ops.py::wrong*", "REFUTED  plugin_ops.py::wrong*"])
    suite.lines.no_fnmatch_line("*Traceback*")


ENTRY = '[[finding]]\nitem = "{}"\ncode = "annotation_wrong"\nowner = "ann"\nexpires = {}\nreason = "why"\n'
KNOWN = "".join(ENTRY.format(f"plugin_ops.py::{name}", "2999-01-01") for name in ("wrong", "right"))


@pytest.mark.long
def test_the_gate_with_known_findings(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(plugin_ops=OPS.format(name="plugin_gate"), model=MODEL)
    pytester.path.joinpath("pyproject.toml").write_text(GATE, encoding="utf-8")
    pytester.path.joinpath("known.toml").write_text(KNOWN, encoding="utf-8")
    result = pytester.runpytest_subprocess(*PLUGIN, "--nnscaler-gate", "-v", "-k", "plugin_ops or baseline")
    result.stdout.fnmatch_lines(["*plugin_ops.py::wrong PASSED*", "*does not occur any more*"])


@pytest.mark.parametrize("text", every(2, ["", "[tool.nnscaler.gate]\nbudgett = 1\n"]))
def test_a_gate_without_settings_is_a_usage_error(pytester: pytest.Pytester, text: str) -> None:
    pytester.makepyprojecttoml(text)
    result = pytester.runpytest_inprocess(*PLUGIN, "--nnscaler-gate")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: *tool.nnscaler.gate*"])


def test_without_the_option_there_is_no_gate(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_it="def test_first():\n    pass\n")
    pytester.makepyprojecttoml("[tool.nnscaler.gate]\nbudgett = 1\n")
    pytester.runpytest_subprocess(*PLUGIN).assert_outcomes(passed=1)
