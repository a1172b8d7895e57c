"""What runs on a GPU: commands as users give them, in processes of their own. Ranks share one where there are fewer."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU: nothing here was checked"),
]


def run(*words: str) -> str:
    """Run a command, and return what it printed. It must succeed."""
    done = subprocess.run(
        [sys.executable, "-m", "nnscaler", *words], cwd=ROOT, capture_output=True, text=True, timeout=600, check=False
    )
    told = done.stdout + done.stderr
    assert done.returncode == 0, told
    return told


def losses(told: str) -> list[float]:
    return [float(found) for found in re.findall(r"^step \d+  loss (\S+)$", told, re.MULTILINE)]


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("gpt", "--ranks 4 --plan dp=2,tp=2"),
        ("gpt", "--ranks 2 --plan dp=2,zero=3"),
        ("gpt", "--ranks 2 --plan pp=2 --schedule zb-v"),
        ("gpt", "--ranks 2 --plan cp=2"),
        ("llama_hf", "--ranks 4 --plan tp=2,pp=2"),
        ("moe", "--ranks 2 --plan ep=2"),
        ("gpt", "--ranks 1 --backend nccl"),
        ("gpt", "--ranks 1 --backend nccl --compile"),
        ("gpt", "--ranks 2 --plan tp=2 --compile"),
        ("gpt", "--ranks 2 --plan dp=2,zero=1 --train --train-backend gloo"),
    ],
)
def test_programs_equal_the_model(model: str, words: str) -> None:
    told = run("verify-plan", f"examples/{model}.py", *words.split(), "--quick", "--level", "run")
    assert f"VERIFIED  {model}.py" in told


def test_training_in_bfloat16_learns_and_goes_on_without_a_gpu(tmp_path: Path) -> None:
    course = ["examples/gpt.toml", f"--checkpoints.folder={tmp_path / 'run'}", "--schedule.total_steps=60"]
    shared = ["--ranks=2", "--plan=dp=2,zero=1", "--precision.param=bfloat16", "--device=cuda"]
    found = losses(run("train", *course, *shared, "--steps=40"))
    assert len(found) == 40 and sum(found[-5:]) < 0.95 * sum(found[:5])
    after = losses(run("train", *course, "--steps=44", "--device=cpu"))
    assert len(after) == 4 and max(after) < 1.05 * found[-1]


def test_compiled_training_has_the_same_losses() -> None:
    words = ["train", "examples/gpt.toml", "--ranks=1", "--steps=8", "--device=cuda"]
    plain, compiled = losses(run(*words)), losses(run(*words, "--compile=true"))
    assert len(plain) == 8 and compiled == pytest.approx(plain, rel=2e-4)
