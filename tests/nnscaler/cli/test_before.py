"""Mistakes of a command line that need no model are reported before torch is imported, which takes seconds."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from nnscaler.cli.main import main
from nnscaler.transform.plan import Plan

TRAP = "raise RuntimeError('it was run')\n"
CLUSTER = '[device]\nmemory = "80GB"\n'
VERIFY, COMPILE = ["verify-plan", "trap.py"], ["compile", "trap.py", "--out", "build"]
PLAN = ["plan", "trap.py", "--ranks", "8"]
# the command line, and what it is told
CASES: list[tuple[list[str], str]] = [
    ([*VERIFY, "--ranks", "8", "--plan", "dp=2,tp=2"], "plan 'dp=2,tp=2' is for 4 ranks, and there are 8"),
    ([*COMPILE, "--ranks", "8", "--plan", "dp=2,tp=2"], "the product of dp, tp and pp must be 8: "),
    ([*COMPILE, "--plan", "dp=2,zz=2"], "'zz=2' is not one of dp=N, shard=N, cp=N, tp=N, pp=N, zero=1|2|3"),
    ([*VERIFY, "--plan", "dp=1,tp=2,zero=3"], "zero=3 with dp=1"),
    ([*VERIFY, "--plan", "no_such.json"], "'no_such.json' is neither mesh axes nor a file"),
    ([*VERIFY, "--plan", "no_such.py::policy"], "there is no file 'no_such.py'"),
    ([*VERIFY, "--plan", "trap.py"], "trap.py"),
    ([*VERIFY, "--plan", "binary.json"], "binary.json cannot be read"),
    ([*VERIFY, "--ranks", "6", "--plan", "plan.json"], "the plan is for 4 ranks (dp=2 tp=2), and there are 6"),
    ([*VERIFY, "--plan", "odd.json"], "no schedule '1f1bb'"),
    ([*COMPILE, "--ranks", "2", "--schedule", "gpip"], "no schedule 'gpip'\n  help: did you mean 'gpipe'?"),
    ([*VERIFY, "--plan", "pp=2", "--schedule", "zigzag"], "no schedule 'zigzag'"),
    ([*COMPILE, "--ranks", "2", "--schedule", "3f1b"], "the planner has no figures of its memory and its step"),
    ([*VERIFY, "--plan", "tp=2", "--memory", "80GB"], "--memory is for the search of a plan"),
    ([*VERIFY, "--plan", "auto:h100x8", "--cluster", "cpu"], "both name a cluster"),
    ([*VERIFY, "--ranks", "2", "--cluster", "h100x9"], "'h100x9' is neither a file nor a cluster that is known"),
    ([*COMPILE, "--ranks", "2", "--plan", "auto:h100x9"], "'h100x9' is neither a file nor a cluster that is known"),
    ([*PLAN, "--cluster", "broken.toml"], "broken.toml:"),
    ([*PLAN, "--memory", "lots"], "--memory lots: "),
    ([*PLAN, "--optimizer-bytes", "-1"], "-1 is negative"),
    ([*PLAN, "--constraints", "no_such.toml"], "no_such.toml"),
    ([*COMPILE, "--ranks", "2", "--constraints", "kinds.toml"], "kinds.toml: constraint 2 has the kind 'requires'"),
    ([*PLAN, "--constraints", "keys.toml"], "keys.toml: constraint 1 (sizes): tp is 0"),
    ([*PLAN, "--profile", "no_such.json"], "cannot read no_such.json: No such file"),
    ([*PLAN, "--profile", "plan.json"], "plan.json"),
    ([*PLAN, "--compare", "no_such.json"], "--compare no_such.json: "),
    ([*PLAN, "--compare", "plan.json"], "the plan is for 4 ranks, and there are 8"),
    (["verify-plan", "no_such.py", "--ranks", "2"], "there is no file 'no_such.py'"),
    (["compile", "no_such.py::small", "--out", "build"], "there is no file 'no_such.py'"),
    (["plan", "no_such.py", "--ranks", "2"], "there is no file 'no_such.py'"),
    (["profile", "no_such.py"], "there is no file 'no_such.py'"),
    (["profile", "trap.py", "--loss-fn", "no_such.py::loss"], "there is no file 'no_such.py'"),
    (["list", "ops", "--missing", "no_such.py"], "there is no file 'no_such.py'"),
    ([*VERIFY, "--loss-fn", "no_such.py::loss"], "there is no file 'no_such.py'"),
    ([*VERIFY, "--program", "no_such"], "no_such holds no program"),
    ([*VERIFY, "--program", "program", "--ranks", "3"], "program is a program for 2 ranks, not 3"),
    ([*VERIFY, "--program", "program", "--plan", "tp=2"], "--plan is for a program that is compiled"),
    ([*VERIFY, "--program", "program", "--micro-batches", "2"], "--micro-batches is for a program that is compiled"),
    ([*VERIFY, "--program", "program", "--replicate", "head"], "--replicate is for a program that is compiled"),
    ([*VERIFY, "--program", "program", "--memory", "1GB"], "--program has a plan already"),
    ([*VERIFY, "--program", "program", "--comm-profile"], "the program has no communication profile"),
    ([*VERIFY, "--level", "run", "--certificate", "proof.json"], "--level run proves nothing"),
    ([*VERIFY, "--level", "static", "--dtype", "bfloat16"], "--level static runs nothing"),
    ([*VERIFY, "--output-format", "xml"], "'xml' is none of full, concise, json"),
    (["verify-op", "no_such.py::f"], "no_such.py"),
    (["verify-op", "aten.add.Tensor", "--seed", str(2**70)], "1180591620717411303424 has more than 63 bits"),
    (["reproduce", "nns1:damaged"], "the token is damaged"),
    (["reproduce", "nns2:damaged"], "the token is damaged"),
    (["reproduce", "nns3:damaged"], "the token is damaged"),
    (["explain", "no_such_code"], "no_such_code"),
    (["gate", "--config", "gate.toml"], "did you mean seed?"),
    (
        ["gate", "--config", "external.toml"],
        "external.toml:4   [[tool.nnscaler.external]]\n  help: leave one of them away",
    ),
    (["verify-external"], "nothing is named that could be verified"),
    (["verify-external", "no_such.py"], "there is no file 'no_such.py'"),
    (["verify-external", "trap.py", "--mesh", "dp"], "'dp' of the mesh 'dp' is no axis with a size"),
    (["verify-external", "trap.py", "--tp", "2"], "--tp is not for a check file"),
    (["verify-external", "trap.py", "--tp", "two"], "'two' is not a whole number"),
    (["verify-external", "trap.py", "--dtype", "float8"], "invalid choice: 'float8'"),
    (["verify-external", "trap.py", "--executor", "nccl"], "invalid choice: 'nccl'"),
    (["verify-external", "hf:llama", "--ranks", "2"], "--ranks is not for a model of transformers"),
    (["verify-external", "hf:llama", "--emit-script", "trap.py/s.py"], "trap.py/s.py"),
    (["verify-external", "--torchrun", "no_such.py --x"], "there is no script 'no_such.py'"),
    (["verify-external", "--torchrun", "trap.py 'x"], "cannot be read: No closing quotation"),
    (["verify-external", "--torchrun", " "], "--torchrun names no script"),
    (["verify-external", "trap.py", "--torchrun", "trap.py"], "both 'trap.py' and the script"),
]
RUN = """
import io, json, os, sys
from contextlib import redirect_stderr
import nnscaler.planning.constraints, nnscaler.planning.cost.measured_profile, nnscaler.planning.plan_from_axes
from nnscaler.cli.main import main

cases = json.loads(sys.argv[1])
with redirect_stderr(io.StringIO()):
    main(cases[0])  # what all of them import is imported once
for words in cases:
    if os.fork() == 0:  # each case by itself
        with redirect_stderr(io.StringIO()) as err:
            code = main(words)
        print(json.dumps((int(code), err.getvalue(), "torch" in sys.modules)), flush=True)
        os._exit(0)
    os.wait()
"""


def fill(folder: Path) -> None:
    """Files that are wrong in one way each."""
    (folder / "trap.py").write_text(TRAP)
    plan = Plan((("dp", 2), ("tp", 2)), ())
    (folder / "plan.json").write_text(plan.to_json())
    (folder / "odd.json").write_text(plan.to_json().replace("1f1b", "1f1bb"))
    (folder / "binary.json").write_bytes(b"\xff\xfe\x00")
    (folder / "broken.toml").write_text(CLUSTER)
    (folder / "kinds.toml").write_text('[[constraint]]\nkind = "megatron"\n[[constraint]]\nkind = "requires"\n')
    (folder / "keys.toml").write_text('[[constraint]]\nkind = "sizes"\ntp = 0\n')
    (folder / "gate.toml").write_text("[tool.nnscaler.gate]\nsed = 3\n")
    external = '[[tool.nnscaler.external]]\ntarget = "a.py"\nranks = 2\n[[tool.nnscaler.external]]\n'
    (folder / "external.toml").write_text(external + 'target = "trap.py"\ntorchrun = "trap.py"\n')
    program = folder / "program"
    program.mkdir()
    entries = {"format": 1, "micro_batches": 1, "schedule": "1f1b", "tensors": {}, "state": {}, "batch": {}}
    (program / "manifest.json").write_text(json.dumps({**entries, "ranks": 2, "axes": [], "roles": [], "inputs": []}))


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, str, bool]]:
    """Exit code, message, and whether torch was imported until then: of all cases, in one new process."""
    folder = tmp_path_factory.mktemp("before")
    fill(folder)
    command = [sys.executable, "-c", RUN, json.dumps([words for words, _ in CASES])]
    run = subprocess.run(command, capture_output=True, text=True, cwd=folder, check=True)
    assert not (folder / "build").exists()
    return [json.loads(line) for line in run.stdout.splitlines()]


@pytest.mark.parametrize("number", range(len(CASES)), ids=[" ".join(words) for words, _ in CASES])
def test_it_is_said_before_torch_is_imported(number: int, said: list[tuple[int, str, bool]]) -> None:
    code, err, heavy = said[number]
    assert code == 2, err
    assert CASES[number][1] in err and "it was run" not in err
    assert not heavy, "torch was imported"


def test_one_takes_less_than_two_seconds_of_the_processor(tmp_path: Path) -> None:
    fill(tmp_path)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    run = subprocess.run(
        [sys.executable, "-m", "nnscaler", *CASES[0][0]], cwd=tmp_path, capture_output=True, check=False
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert run.returncode == 2
    assert after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime < 2.0


def test_what_is_right_is_not_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each gets as far as the model's file."""
    fill(tmp_path)
    (tmp_path / "right.toml").write_text('[[constraint]]\nkind = "sizes"\ntp = 2\n')
    monkeypatch.chdir(tmp_path)
    for words in (
        [*VERIFY, "--plan", "plan.json", "--level", "static"],
        [*VERIFY, "--plan", "dp=2,zero=3", "--level", "static"],  # zero=3 is no axis: two ranks
        [*VERIFY, "--ranks", "2", "--cluster", "cpu", "--constraints", "right.toml", "--level", "static"],
        [*COMPILE, "--plan", "pp=2", "--schedule", "Interleaved"],
        [*COMPILE, "--plan", "trap.py::policy"],
    ):
        with pytest.MonkeyPatch.context() as patch:
            told: list[str] = []
            patch.setattr("nnscaler.cli.output.console.Console.error", lambda self, text, told=told: told.append(text))
            assert main([*words]) == 2
        assert "it was run" in told[0], told
