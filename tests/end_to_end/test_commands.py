"""The commands as a user types them, on a model file of the user's: exit codes, output, processes."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from nnscaler.cli.main import main
from tests.sampling import every

MODEL = """
import torch
from torch import nn
from torch.nn import functional as F


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 3 * width)
        self.down = nn.Linear(3 * width, width)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.layers = nn.ModuleList(Layer(width) for _ in range(2))
        self.lm_head = nn.Linear(width, 12)

    def forward(self, x, labels):
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.lm_head(x), labels)


def build_model():
    return Model()


def wide_model():
    return Model(16)


def sample_inputs():
    return {"x": torch.randn(12, 8), "labels": torch.randint(0, 12, (12,))}
"""
LAST_LINE = re.compile(
    r"(?P<word>VERIFIED|REFUTED|INCONCLUSIVE)  (?P<file>\S+) on (?P<ranks>\d+) ranks? \((?P<how>[^)]*)\), in \w+: "
    r"(?P<checks>\d+) checks?, (?P<refuted>\d+) refuted, \d+\.\d s \(seed (?P<seed>\d+)\)"
)


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "model.py").write_text(MODEL)
    return str(tmp_path / "model.py")


def last_line(text: str) -> dict[str, str]:
    found = LAST_LINE.fullmatch(text.splitlines()[-1])
    assert found is not None, text
    return found.groupdict()


def children() -> set[int]:
    """Processes whose parent is this one."""
    found: set[int] = set()
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        if int(fields[1]) == os.getpid() and fields[0] != "Z":
            found.add(int(status.parent.name))
    return found


@pytest.mark.apart
def test_processes_by_default(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    before = children()
    assert main(["verify-plan", model, "--ranks", "4", "--plan", "dp=2,tp=2"]) == 0
    captured = capsys.readouterr()
    line = last_line(captured.out)
    assert (line["word"], line["file"], line["ranks"], line["how"]) == ("VERIFIED", "model.py", "4", "dp=2 tp=2")
    assert int(line["checks"]) > 50 and line["refuted"] == "0" and line["seed"] == "0"
    assert "gloo" in captured.err and "trace" in captured.err and "dp=2 tp=2" in captured.err
    for check in ("loss", "gradients", "parameters after 2 steps", "replicas bitwise equal"):
        assert f"PASS  {check}" in captured.out
    assert children() == before


def test_a_plan_is_searched_and_shown(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify-plan", model, "--ranks", "4", "--backend", "simulator"]) == 0
    captured = capsys.readouterr()
    assert last_line(captured.out)["how"]
    assert re.search(r"plan .*=", captured.err)
    told = r"searched in \d+\.\d s for this machine \(.*\): .* a step, at most \d+\.\d% above the best"
    assert re.search(f"search .*{told}", captured.err) and re.search(f"the plan was {told}", captured.out)


def test_a_plan_is_searched_within_what_the_options_say(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "kept.toml"
    kept.write_text("[[constraint]]\nkind = 'tensor_parallel'\n[[constraint]]\nkind = 'sizes'\nmicro_batches = 1\n")
    search = ["--ranks", "2", "--cluster", "a100x8", "--constraints", str(kept)]
    assert main(["verify-plan", model, *search, "--backend", "simulator", "--quick"]) == 0
    assert last_line(capsys.readouterr().out)["how"] == "tp=2"
    assert main(["compile", model, *search, "--out", str(tmp_path / "build")]) == 0
    captured = capsys.readouterr()
    assert "wrote" in captured.out and "tp=2" in captured.out and "for a100x8" in captured.err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--cluster", "h100"], "h100x8"),
        (["--memory", "lots"], "--memory 80GB"),
        (["--memory", "1kB"], "no plan for 2 ranks"),
        (["--constraints", "not_there.toml"], "not_there.toml"),
        (["--profile", "not_there.json"], "not_there.json"),
        (["--plan", "dp=2", "--memory", "1GB"], "leave --plan away"),
        (["--plan", "auto:h100x8", "--cluster", "a100x8"], "both name a cluster"),
        (["--schedule", "3f1b"], "no figures"),
        (["--schedule", "zigzag"], "1f1b"),
        (["--replicate", "nothing_like_this*"], "nothing_like_this"),
    ],
)
@pytest.mark.parametrize("command", ["verify-plan", "compile"])
def test_a_search_that_fails_is_an_error(
    model: str, command: str, options: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ["--backend", "simulator"] if command == "verify-plan" else ["--out", str(tmp_path / "build")]
    assert main([command, model, "--ranks", "2", *more, *options]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and "error:" in captured.err and said in captured.err
    assert "Traceback" not in captured.err and not (tmp_path / "build").exists()


@pytest.mark.parametrize("command", ["plan", "verify-plan", "compile"])
def test_files_of_a_search_that_are_wrong_are_errors_with_their_place(
    model: str, command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = {"plan": [], "verify-plan": ["--backend", "simulator"], "compile": ["--out", str(tmp_path / "build")]}
    cluster, kept = tmp_path / "ours.toml", tmp_path / "kept.toml"
    cluster.write_text('[device]\nmemory = "80GB"\nbandwith = "2TB/s"\n')
    kept.write_text("[[constraint]]\nkind = 'sizes'\ntp = 3\n")
    unknown = tmp_path / "unknown.toml"
    unknown.write_text("[[constraint]]\nkind = 'replicat'\n")
    for option, said in (
        (["--cluster", str(cluster)], "ours.toml"),
        (["--constraints", str(kept)], "permitted"),
        (["--constraints", str(unknown)], "did you mean 'replicate'?"),
    ):
        assert main([command, model, "--ranks", "2", *more[command], *option]) == 2
        captured = capsys.readouterr()
        assert captured.out == "" and "help:" in captured.err and said in captured.err
        assert "Traceback" not in captured.err


def test_options_reach_the_run(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--plan", "pp=2", "--schedule", "gpipe", "--micro-batches", "3", "--steps", "1", "--seed", "4", "-q"]
    assert main(["verify-plan", model, "--backend", "simulator", *options]) == 0
    captured = capsys.readouterr()
    line = last_line(captured.out)
    assert (line["ranks"], line["how"], line["seed"]) == ("2", "pp=2, GPipe, 3 micro-batches", "4")
    assert "parameters after 1 step " in captured.out
    assert captured.err == ""


def test_json_leaves_stdout_clean(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--ranks", "2", "--plan", "tp=2", "--backend", "simulator", "--output-format", "json"]
    assert main(["verify-plan", model, *options]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["verdict"] == "VERIFIED" and document["findings"] == []
    assert {check["name"] for check in document["checks"]} >= {"loss", "gradients"}


def test_low_precision(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--plan", "dp=2", "--backend", "simulator", "--dtype", "float32", "--level", "run"]
    options += ["--output-format", "json"]
    assert main(["verify-plan", model, *options]) == 0
    assert json.loads(capsys.readouterr().out)["level"] == "TESTED (calibrated)"


def compiled(model: str, tmp_path: Path, *options: str) -> Path:
    out = tmp_path / "build"
    assert main(["compile", model, "--ranks", "2", "--plan", "tp=2", "--out", str(out), *options]) == 0
    return out


def edit(program: Path, text: str, replacement: str) -> None:
    file = program / "role_0.py"
    source = file.read_text()
    assert text in source
    file.write_text(source.replace(text, replacement, 1))


def test_compile_writes_a_program(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = compiled(model, tmp_path, "-v")
    text = capsys.readouterr().out
    assert re.search(r"matmul FLOPs divided over tp: (99|100)\.\d %", text)
    assert "torchrun --nproc-per-node 2 -m nnscaler.runtime.launch" in text
    assert (out / "manifest.json").is_file() and (out / "plan.json").is_file()


def test_what_is_printed_to_run_can_be_pasted(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "it's a build; really"
    assert main(["compile", model, "--ranks", "1", "--plan", "dp=1", "--out", str(out), "-q"]) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("run it: "))
    command = line.removeprefix("run it: ")
    assert shlex.split(command)[-1] == str(out)
    alone = command.replace("torchrun --nproc-per-node 1 -m", f"{shlex.quote(sys.executable)} -m")
    run = subprocess.run(["bash", "-c", f"{alone} --steps 1"], capture_output=True, text=True, check=False)
    assert run.returncode == 0 and "step 1  loss " in run.stdout


def test_a_saved_plan_and_a_policy(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = compiled(model, tmp_path)
    saved = str(out / "plan.json")
    assert main(["verify-plan", model, "--ranks", "2", "--plan", saved, "--backend", "simulator"]) == 0
    (tmp_path / "policy.py").write_text(
        "import nnscaler\n\ndef twice(graph, ranks):\n    return nnscaler.Plan(mesh=(('dp', ranks),))\n"
    )
    policy = f"{tmp_path}/policy.py::twice"
    assert main(["verify-plan", model, "--ranks", "2", "--plan", policy, "--backend", "simulator"]) == 0
    assert last_line(capsys.readouterr().out)["how"] == "dp=2"


def test_an_edited_program_is_refuted(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = compiled(model, tmp_path)
    command = ["verify-plan", model, "--program", str(program), "--backend", "simulator"]
    assert main(command) == 0
    edit(program, "comm.all_reduce(linear_1, self.tp)", "linear_1")
    capsys.readouterr()
    assert main(command) == 1
    out = capsys.readouterr().out
    assert last_line(out)["word"] == "REFUTED"
    first = next(line for line in out.splitlines() if line.startswith("tensor_differs"))
    assert "`linear_1_v1`" in first and "layers.0.down" in first
    assert "an all_reduce over tp is missing" in out
    assert "model.py:" in out and "role_0.py:" in out and "reproduce: nnscaler" in out


@pytest.mark.apart  # a server that all tests share would be started here, or end with what hangs
def test_a_hang_is_refuted_and_leaves_no_process(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("verify.programs.execution.run_on_backend.STALL", 2.0)
    program = compiled(model, tmp_path)
    edit(
        program,
        "linear_1_v1 = comm.all_reduce(linear_1, self.tp)",
        "linear_1_v1 = comm.all_reduce(linear_1, self.tp) if self.tp.index else linear_1",
    )
    capsys.readouterr()
    before = children()
    assert main(["verify-plan", model, "--program", str(program), "--timeout", "30"]) == 1
    out = capsys.readouterr().out
    assert last_line(out)["word"] == "REFUTED"
    assert re.search(r"^(deadlock|communication_mismatch) .*`\w+`", out, re.MULTILINE), out
    assert children() == before


@pytest.mark.long  # the test above is of processes too; tests/verify/test_verify_plan.py has this finding
def test_a_rank_that_raises_is_refuted(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = compiled(model, tmp_path)
    edit(program, "linear = aten.linear(", "linear = 1 / 0 + aten.linear(")
    capsys.readouterr()
    assert main(["verify-plan", model, "--program", str(program)]) == 1
    out = capsys.readouterr().out
    assert "rank_raises" in out and "ZeroDivisionError" in out and "`linear`" in out


@pytest.mark.parametrize("level", ["all", "run"])
@pytest.mark.parametrize(
    ("old", "new", "said"),
    every(
        2,
        [
            ("def forward(", "def forward((", "Function parameters cannot be parenthesized"),
            ("class Stage0", "nothing\nclass Stage0", "NameError: name 'nothing' is not defined"),
            ("class Stage0", "raise SystemExit(0)\nclass Stage0", "SystemExit: 0"),
        ],
    ),
)
def test_a_role_that_cannot_be_loaded_is_refuted_with_its_line(
    level: str, old: str, new: str, said: str, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = compiled(model, tmp_path)
    role = program / "role_0.py"
    lines = role.read_text().replace(old, new, 1).splitlines()
    role.write_text("\n".join(lines))
    assert main(["verify-plan", model, "--program", str(program), "--level", level, "-q"]) == 1
    out = capsys.readouterr().out
    number = next(n for n, line in enumerate(lines, 1) if new.splitlines()[0] in line)
    assert said in out and f"{role}:{number}" in out


def test_a_role_that_is_not_utf_8_exits_2_with_its_line(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = compiled(model, tmp_path)
    role = program / "role_0.py"
    content = role.read_bytes()
    role.write_bytes(content + b"\n# \xfc\n")
    assert main(["verify-plan", model, "--program", str(program)]) == 2
    line = content.count(b"\n") + 2
    assert f"{role} is not UTF-8: invalid start byte\n  --> {role}:{line}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--ranks", "8", "--plan", "dp=2,tp=2"], "8"),
        (["--ranks", "2", "--plan", "zz=2"], "zz"),
        (["--ranks", "2", "--plan", "no_such_plan.json"], "no_such_plan.json"),
        (["--ranks", "2", "--plan", "pp=2", "--schedule", "zigzag"], "1f1b"),
        (["--ranks", "2", "--plan", "tp=2", "--replicate", "nothing_like_this*"], "nothing_like_this"),
        (["--ranks", "64", "--plan", "pp=64"], "64"),
    ],
)
def test_illegal_plans_exit_2_and_say_what_is_legal(
    model: str, options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify-plan", model, "--backend", "simulator", *options]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and "error:" in captured.err and "help:" in captured.err and said in captured.err


def test_replicate(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--ranks", "2", "--plan", "tp=2", "--backend", "simulator", "--replicate", "lm_head*"]
    assert main(["verify-plan", model, *options]) == 0


def test_a_model_that_cannot_be_traced_exits_2_with_its_own_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = MODEL.replace("            x = layer(x)", "            x = layer(torch.from_numpy(x.detach().numpy() * 2))")
    (tmp_path / "model.py").write_text(text)
    assert main(["verify-plan", str(tmp_path / "model.py"), "--ranks", "2", "--backend", "simulator"]) == 2
    err = capsys.readouterr().err
    assert "model.py:" in err and len(err.splitlines()) < 30


def test_a_module_that_is_not_one_exits_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model.py").write_text(MODEL.replace("return Model()", "return 3"))
    assert main(["verify-plan", str(tmp_path / "model.py"), "--ranks", "2", "--backend", "simulator"]) == 2
    assert "not an nn.Module" in capsys.readouterr().err


def test_the_users_own_files_are_theirs(tmp_path: Path) -> None:
    """`verify.py`, `op_registry.py` and `ir.py` beside the model: nothing of ours is shadowed, nothing of theirs is."""
    for name in ("verify", "op_registry", "ir"):
        (tmp_path / f"{name}.py").write_text(f"def mine():\n    return '{name} of the user'\n")
    text = (
        "import ir\nimport op_registry\nimport verify\n"
        + MODEL
        + (
            "\nassert verify.mine() == 'verify of the user'\n"
            "assert op_registry.mine() == 'op_registry of the user'\n"
            "assert ir.mine() == 'ir of the user'\n"
        )
    )
    (tmp_path / "model.py").write_text(text)
    command = [sys.executable, "-P", "-c", "import sys; from nnscaler.cli.main import main; sys.exit(main())"]
    root = str(Path(__file__).resolve().parents[2])
    environment = {**os.environ, "PYTHONPATH": root, "NO_COLOR": "1"}
    arguments = ["verify-plan", "model.py", "--ranks", "2", "--plan", "dp=2", "--quick", "--backend", "simulator"]
    found = subprocess.run(
        [*command, *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stderr
    assert last_line(found.stdout)["word"] == "VERIFIED"
    assert "\x1b[" not in found.stdout + found.stderr
