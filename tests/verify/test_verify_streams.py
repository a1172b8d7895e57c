"""verify-plan of a stream: it equals delayed SGD, and every report says so; it never equals the model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import nnscaler
import verify
from nnscaler.errors import NnscalerError
from nnscaler.training.assemble import _check_steps
from nnscaler.transform.plan import Plan
from verify.report_formats import FORMATS
from verify.results.verdict import Verdict
from verify.self_test.programs.tiny_models import Chain, pairs


def chain() -> Chain:
    torch.manual_seed(0)
    return Chain()


@pytest.mark.parametrize(("stages", "listed"), [(2, "1, 0"), (3, "2, 1, 0"), (4, "3, 2, 1, 0")])
def test_a_stream_equals_delayed_sgd(stages: int, listed: str) -> None:
    report = verify.verify_plan(
        chain(),
        pairs(),
        ranks=stages,
        plan=f"pp={stages}",
        schedule="pipedream",
        steps=6,
        depth="quick",
        train=stages == 2,
        optimizer="sgd",
    )
    semantics = f"delayed SGD with staleness p-1-s ({listed})"
    assert report.verdict.passes, report.findings
    assert report.setting.endswith(f"equals {semantics}") and "not the model's training" in report.notes[0]
    checks = {check.name: check for check in report.checks}
    assert checks["stream: parameters after each update"].count == 6 * 8
    assert checks["schedule has a total order"].detail == semantics
    assert report.attachments.certificate is not None
    assert any(semantics in text for text in report.attachments.certificate.assumed)
    if stages == 2:
        assert checks["stream: optimizer state, sgd"].count
    for name in ("full", "concise", "json", "jsonl", "junit", "html"):
        text = "\n".join(line.text for line in FORMATS[name]([report]))
        assert "delayed SGD" in text, name
        assert "equals the model" not in text, name


def test_without_stashing_it_is_refuted(tmp_path: Path) -> None:
    program = nnscaler.parallelize(chain(), pairs(), ranks=3, plan="pp=3", schedule="pipedream")
    folder = program.save(tmp_path / "program")
    text = (folder / "role_0.py").read_text(encoding="utf-8")
    (folder / "role_0.py").write_text(text.replace("    versions = 3\n", "    versions = 1\n"), encoding="utf-8")
    report = verify.verify_plan(chain(), pairs(), ranks=3, program=folder, level="static", own_weights=True)
    assert report.verdict is Verdict.REFUTED and "compared with delayed SGD" in report.setting
    assert report.findings[0].code == "version_differs" and "stashing is missing" in str(report.findings[0].cause)
    ran = verify.verify_plan(chain(), pairs(), ranks=3, program=folder, level="run", own_weights=True, depth="quick")
    assert ran.verdict is Verdict.REFUTED and "is overwritten" in ran.findings[0].message


def test_a_stream_is_compared_in_float64() -> None:
    with pytest.raises(NnscalerError, match="float64"):
        verify.verify_plan(
            chain(), pairs(), ranks=2, plan="pp=2", schedule="pipedream", level="run", dtype=torch.float32
        )


def test_a_run_makes_steps() -> None:
    for plan, schedule in ((None, "pipedream"), (Plan((("pp", 2),), schedule="pipedream"), None)):
        with pytest.raises(NnscalerError, match="clips the norm of all gradients to 1") as found:
            _check_steps(plan, schedule, 1.0)
        assert found.value.code == "bad_settings" and "engine.stream" in str(found.value.help)
    _check_steps("pp=2", "1f1b", 1.0)
