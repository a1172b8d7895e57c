"""verify-plan of a stream: it equals delayed SGD, and every report says so; it never equals the model."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

import nnscaler
import verify
from nnscaler.errors import NnscalerError
from nnscaler.scheduling.pipedream import pipedream, written_for
from nnscaler.training.build_from_settings import _check_steps
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


@pytest.fixture
def stream(tmp_path: Path) -> Path:
    return nnscaler.parallelize(chain(), pairs(), ranks=2, plan="pp=2", schedule="pipedream").save(tmp_path / "stream")


def test_roles_that_are_written_for_unequal_numbers_of_batches_are_refuted(stream: Path) -> None:
    text = (stream / "role_1.py").read_text(encoding="utf-8")
    order = " ".join(map(str, pipedream(2, 1, written_for(2) + 1).orders[1]))
    (stream / "role_1.py").write_text(re.sub('SCHEDULE = """.*?"""', f'SCHEDULE = """{order}"""', text, flags=re.S))
    report = verify.verify_plan(chain(), pairs(), ranks=2, program=stream, level="static", own_weights=True)
    assert report.verdict is Verdict.REFUTED
    assert "is written for 4 batches, and that of role_0.py for 3" in report.findings[0].message


def test_a_stream_is_one_however_its_declarations_are_set(stream: Path) -> None:
    for file in ("role_0.py", "role_1.py"):
        text = (stream / file).read_text(encoding="utf-8")
        assert "    staleness = " in text
        (stream / file).write_text(text.replace("    staleness = ", "    staleness="), encoding="utf-8")
    report = verify.verify_plan(chain(), pairs(), ranks=2, program=stream, level="static", own_weights=True)
    assert report.verdict.passes and "delayed SGD" in report.setting and "not the model's training" in report.notes[0]


class Undefined(Chain):
    """Its loss is 0 / 0."""

    def forward(self, *given: Tensor, **named: Tensor) -> Tensor:
        loss = super().forward(*given, **named)
        return (loss - loss) / (loss - loss)


def test_what_is_no_number_equals_nothing() -> None:
    torch.manual_seed(0)
    report = verify.verify_plan(Undefined(), pairs(), ranks=2, plan="pp=2", schedule="pipedream", level="run")
    assert report.verdict is Verdict.INCONCLUSIVE
    assert [f.code for f in report.findings] == ["reference_not_finite"]


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
