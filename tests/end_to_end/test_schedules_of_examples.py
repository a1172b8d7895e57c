"""Examples under every schedule with several passes of a stage in flight, with tensor parallelism and with ZeRO-3."""

from __future__ import annotations

from pathlib import Path

import pytest

from nnscaler.cli.main import main

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SCHEDULES = (
    "1f1b-split",
    "zb-h1",
    "zb-h1-few",
    "zb-h1-half",
    "zb-h2",
    "zb-v",
    "dualpipe-v",
    "interleaved",
    "search:zb-v",
)
PLANS = ("tp=2,pp=2", "dp=2,pp=2,zero=3")
SHORT = ("gpt", "zb-v", "tp=2,pp=2", "simulator")  # of which the default tests have one


def rows() -> list[object]:
    every = [(m, s, p, "simulator") for m in ("gpt", "llama_hf", "moe", "t5_hf") for s in SCHEDULES for p in PLANS]
    over = [  # each model, and each schedule that is published, in processes of its own
        ("gpt", "zb-h1", PLANS[0], "gloo"),
        ("gpt", "zb-v", PLANS[1], "gloo"),
        ("llama_hf", "interleaved", PLANS[1], "gloo"),
        ("moe", "dualpipe-v", PLANS[0], "gloo"),
        ("t5_hf", "zb-v", PLANS[0], "gloo"),
    ]
    return [pytest.param(*row, marks=[] if row == SHORT else [pytest.mark.long]) for row in (*every, *over)]


@pytest.mark.parametrize(("model", "schedule", "plan", "backend"), rows())
def test_it_runs_exactly(
    model: str, schedule: str, plan: str, backend: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["verify-plan", str(EXAMPLES / f"{model}.py"), "--plan", plan, "--schedule", schedule]
    assert main([*words, "--backend", backend, "--quick", "--level", "run", "--timeout", "900"]) == 0
    assert "VERIFIED" in capsys.readouterr().out
