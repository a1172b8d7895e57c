"""Requests for models of transformers: which programs they name, and what becomes of those that cannot be made."""

from __future__ import annotations

from pathlib import Path

import pytest

from nnscaler.cli.main import main
from nnscaler.errors import NnscalerError
from verify.external.request import ExternalRequest
from verify.external.transformers.expand_requests import expand, value_of
from verify.external.transformers.find_and_change_config import targets
from verify.external.verify_request import verify_external_request
from verify.programs.loaded_model_and_plan import RunContext


def test_sizes_are_programs_of_their_own() -> None:
    found = expand(ExternalRequest("hf:mixtral", tp=(2, 4), ep=(1, 2), settings=("a=1",), seed=3))
    assert [(r.target, r.tp, r.ep, r.fsdp) for r in found] == [
        ("hf:mixtral", (2,), (), ()),
        ("hf:mixtral", (2,), (2,), ()),
        ("hf:mixtral", (4,), (), ()),
        ("hf:mixtral", (4,), (2,), ()),
    ]
    assert all(r.settings == ("a=1",) and r.seed == 3 for r in found)
    assert [r.tp for r in expand(ExternalRequest("hf:llama"))] == [(2,)]
    assert [(r.tp, r.fsdp) for r in expand(ExternalRequest("hf:llama", fsdp=(2,)))] == [((), (2,))]


def test_flags_are_programs_of_their_own() -> None:
    """Values survive the way through a token, which has texts."""
    found = expand(ExternalRequest("hf:qwen3", tp=(2,), settings=("rms_norm_eps=1e-5",), sweep_flags=True))
    assert found[0] == ExternalRequest("hf:qwen3", tp=(2,), settings=("rms_norm_eps=1e-5",))
    assert all(r.settings[0] == "rms_norm_eps=1e-5" and len(r.settings) > 1 for r in found[1:])
    assert ("rms_norm_eps=1e-5", "attention_bias=true") in {r.settings for r in found}
    assert not any(r.sweep_flags for r in found) and len({r.settings for r in found}) == len(found)
    with pytest.raises(NnscalerError, match="no model type"):
        expand(ExternalRequest("hf:qwen33", sweep_flags=True))


@pytest.mark.long
def test_all_models_with_a_plan() -> None:
    found = expand(ExternalRequest("hf:all", tp=(2,)))
    assert [r.target for r in found] == [f"hf:{name}" for name in targets()]
    assert {"hf:llama", "hf:mixtral", "hf:qwen3"} <= {r.target for r in found}


@pytest.mark.parametrize(
    ("text", "value"),
    [("true", True), ("False", False), ("None", None), ("3", 3), ("1e-3", 1e-3), ("[1,2]", [1, 2]), ("gelu", "gelu")],
)
def test_values_of_settings(text: str, value: object) -> None:
    assert value_of(text) == value and type(value_of(text)) is type(value)


@pytest.mark.long
def test_several_programs_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """One has no such plan and is left out, one cannot be made and is INCONCLUSIVE; the rest is verified."""
    names = ["llama", "no_such_model", "gpt2"]
    monkeypatch.setattr("verify.external.transformers.expand_requests.targets", lambda: names)
    said: list[str] = []
    context = RunContext(say=said.append, command=("nnscaler", "verify-external", "hf:all"))
    reports = verify_external_request(ExternalRequest("hf:all", tp=(2,), steps=1, level="run"), context)
    assert [report.subject for report in reports] == ["hf:llama --tp 2", "hf:no_such_model --tp 2"]
    assert [report.verdict.word for report in reports] == ["VERIFIED", "INCONCLUSIVE"]
    (finding,) = reports[1].findings
    assert finding.code == "could_not_run" and "has no model type 'no_such_model'" in finding.message
    assert str(finding.reproduce).startswith("nnscaler reproduce nns3:")
    assert any("1 of 3 have no such plan" in line for line in said)
    assert any("PASS hf:llama --tp 2" in line for line in said)


def test_a_process_that_ends_is_inconclusive(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    monkeypatch.setattr("verify.external.transformers.lint_and_repair_plan.program_of", lambda request: os._exit(9))
    reports = verify_external_request(ExternalRequest("hf:llama", tp=(2, 4)))
    assert [report.findings[0].code for report in reports] == ["item_died", "item_died"]
    assert all(report.exit_code == 3 for report in reports)
    assert "exited with code 9" in reports[0].findings[0].message


def test_no_model_with_such_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verify.external.transformers.expand_requests.targets", lambda: ["gpt2", "bert"])
    with pytest.raises(NnscalerError, match="none of 2 models has such a plan"):
        verify_external_request(ExternalRequest("hf:all", tp=(2,)))


def test_nothing_wrong_writes_no_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "script.py"
    words = ["verify-external", "hf:llama", "--steps", "1", "--level", "run", "--emit-script", str(script)]
    assert main(words) == 0
    captured = capsys.readouterr()
    assert captured.out.splitlines()[-1].startswith("VERIFIED  hf:llama --tp 2 on 2 ranks (tp=2)")
    assert "was not written" in captured.err and not script.exists()


def test_a_model_that_is_not_there_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify-external", "hf:lama"]) == 2
    assert "did you mean hf:llama" in capsys.readouterr().err
