"""`nnscaler verify-external` on the example check files: they are right, and each mistake in them is found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import verify
from nnscaler.cli.main import main
from nnscaler.errors import NnscalerError
from tests.sampling import every, only
from verify.external.load_check_file import TEMPLATE, load_check_file

EXAMPLES = Path(__file__).parents[3] / "examples" / "external"


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    """Return the exit code and the report, as JSON."""
    capsys.readouterr()
    code = main(["verify-external", *words, "-q", "--output-format", "json"])
    captured = capsys.readouterr()
    assert captured.out, captured.err
    return code, json.loads(captured.out)


RIGHT = [
    ("ddp.py", "--ranks", "2"),
    ("fsdp2.py", "--ranks", "2"),
    ("tensor_parallel.py", "--mesh", "tp=2"),
    ("tensor_parallel.py::parallelize_2d", "--mesh", "dp=2,tp=2"),
    ("pipeline.py", "--ranks", "2"),
]


@pytest.mark.long
@pytest.mark.parametrize("words", every(3, map(pytest.param, RIGHT)), ids=" ".join)
def test_examples_are_verified(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    code, report = run(capsys, str(EXAMPLES / words[0]), *words[1:])
    assert (code, report["verdict"], report["tool"]) == (0, "VERIFIED", "verify-external")
    names = {check["name"] for check in report["checks"] if check["count"]}
    assert {"losses", "gradients", "parameters after steps"} <= names
    assert ("gradient norm" in names) == (words[0] == "fsdp2.py")
    assert not report["findings"]


# example, what replaces which text, the finding's code, and what its cause says
WRONG = [
    (
        "ddp.py",
        "return DistributedDataParallel(",
        "return (lambda m, **_: m)(",
        "gradient_differs",
        "all_reduce over dp",
    ),
    (
        "fsdp2.py",
        "    fully_shard(model, mesh=mesh)\n",
        "    fully_shard(model, mesh=mesh).set_gradient_divide_factor(1.0)\n",
        "gradient_differs",
        "it is 2 times the model's, the size of dp",
    ),
    (
        "tensor_parallel.py",
        '        plan[f"layers.{number}.norm"] = SequenceParallel()\n',
        "",
        "gradient_differs",
        "all_reduce over tp",
    ),
    (
        "pipeline.py",
        "loss_fn=F.cross_entropy)",
        "loss_fn=F.cross_entropy, scale_grads=False)",
        "gradient_differs",
        "4 times the model",
    ),
    ("pipeline.py", "torch.stack(losses).mean()", "torch.stack(losses).sum()", "loss_differs", "4 times the model"),
]


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "text", "instead", "code", "cause"), only((4,), WRONG), ids=[instead for _, _, instead, *_ in WRONG]
)
def test_mistakes_in_examples_are_found(
    name: str, text: str, instead: str, code: str, cause: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    right = (EXAMPLES / name).read_text(encoding="utf-8")
    assert right.count(text) == 1
    (tmp_path / name).write_text(right.replace(text, instead), encoding="utf-8")
    exit_code, report = run(capsys, str(tmp_path / name), "--ranks", "2", "--steps", "1")
    assert (exit_code, report["verdict"]) == (1, "REFUTED")
    found = {finding["code"]: finding for finding in report["findings"]}
    assert code in found, found
    assert cause in str(found[code]["cause"]), found[code]
    assert found[code]["where"]["file"].endswith(name)


def test_a_finding_is_found_again_and_a_correction_is_seen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("check.py").write_text(TEMPLATE.replace("return fully_shard(model, mesh=mesh)", "return model"))
    code, report = run(capsys, "check.py", "--ranks", "2", "--steps", "1")
    (line,) = {finding["reproduce"] for finding in report["findings"]}
    assert code == 1 and line.startswith("nnscaler reproduce nns3:")
    words = line.split()[1:]
    assert main([*words, "-q", "--output-format", "json"]) == 1
    again = json.loads(capsys.readouterr().out)
    for name in ("findings", "counts", "setting", "seed"):
        assert again[name] == report[name]
    Path("check.py").write_text(TEMPLATE + "# changed\n")
    assert main([*words, "-q"]) == 1  # a module is imported once per process: another one would see the correction
    assert "check.py was changed since the token was made" in capsys.readouterr().err


def test_a_batch_that_does_not_divide(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "check.py").write_text(TEMPLATE)
    assert main(["verify-external", str(tmp_path / "check.py"), "--ranks", "3"]) == 2
    err = capsys.readouterr().err
    assert "8 rows" in err and "3" in err and "help" in err


def test_what_is_communicated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "profile.json"
    words = ["verify-external", str(EXAMPLES / "ddp.py"), "--ranks", "2", "--level", "run", "-q"]
    assert main([*words, "--comm-profile", f"json={file}"]) == 0
    classes = json.loads(file.read_text())["classes"]
    assert "all_reduce" in {entry["kind"] for entry in classes}
    capsys.readouterr()
    assert main([*words, "--comm-profile"]) == 0
    assert any(line.startswith("all_reduce") for line in capsys.readouterr().out.splitlines())
    assert main(["verify-external", str(EXAMPLES / "fsdp2.py"), "--level", "static", "-q", "--comm-profile"]) == 3
    assert "1 of 1 reports have no communication profile" in capsys.readouterr().err


@pytest.mark.long
def test_a_proof_beside_the_run_and_alone(capsys: pytest.CaptureFixture[str]) -> None:
    example = str(EXAMPLES / "tensor_parallel.py")
    for level, names in (("all", {"gradients", "proof"}), ("static", {"proof"}), ("run", {"gradients"})):
        code, report = run(capsys, example, "--mesh", "tp=2", "--steps", "1", "--level", level)
        assert code == 0, report
        checks = {check["name"]: check["verdict"] for check in report["checks"]}
        assert names <= set(checks) and ("proof" in checks) == ("proof" in names)
        assert checks.get("proof") in (None, "PROVED (bounded)") and ("gradients" in checks) == (level != "static")
    code, report = run(capsys, str(EXAMPLES / "fsdp2.py"), "--level", "static")
    assert (code, report["verdict"]) == (3, "INCONCLUSIVE"), "what cannot be traced is no pass"


def test_both_executors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "check.py").write_text(TEMPLATE)
    words = ("--ranks", "2", "--steps", "1", "--executor", "both", "--level", "run")
    code, report = run(capsys, str(tmp_path / "check.py"), *words)
    assert code == 0 and report["setting"].endswith("on threads and on processes")
    names = [check["name"] for check in report["checks"]]
    assert {"gradients, simulator", "gradients, gloo"} <= set(names) and len(set(names)) == len(names)


def test_the_front_door_in_python(tmp_path: Path) -> None:
    (tmp_path / "check.py").write_text(TEMPLATE)
    file = str(tmp_path / "check.py")
    report = verify.verify_external(file, ranks=2, steps=1)
    assert report.verdict.passes and report.subject == "check.py"
    program = load_check_file(file, ranks=2).program
    assert isinstance(program, verify.ExternalProgram)
    again = verify.verify_external(program, steps=1)
    assert again.verdict is report.verdict and again.total == report.total
    with pytest.raises(NnscalerError, match="unexpected keyword argument 'rank'"):
        verify.verify_external(file, rank=2)


def test_what_cannot_be_matched_is_inconclusive(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A parameter that the plain model lacks is never a pass, however well all others agree."""
    more = "    model.register_parameter('more', torch.nn.Parameter(torch.rand(5)))\n    return fully_shard"
    (tmp_path / "check.py").write_text(TEMPLATE.replace("    return fully_shard", more))
    code, report = run(capsys, str(tmp_path / "check.py"), "--ranks", "2", "--steps", "1")
    assert (code, report["verdict"]) == (3, "INCONCLUSIVE")
    (finding,) = report["findings"]
    assert finding["code"] == "parameter_unmatched" and "`names`" in finding["help"]


@pytest.mark.long
def test_a_program_that_cannot_be_saved_is_inconclusive(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hook = "    model.register_state_dict_pre_hook(lambda *_: 1 / 0)\n    return fully_shard"
    (tmp_path / "check.py").write_text(TEMPLATE.replace("    return fully_shard", hook))
    words = ("--ranks", "2", "--steps", "1", "--level", "run", "--checkpoint")
    code, report = run(capsys, str(tmp_path / "check.py"), *words)
    assert (code, report["verdict"]) == (3, "INCONCLUSIVE")
    (finding,) = report["findings"]
    assert finding["code"] == "checkpoint_not_tried" and "ZeroDivisionError" in finding["message"]
