"""The scripts on the pages of docs/ that need files, or a model, that the pages do not show: as they stand there, in
one process. All other blocks: tests/pages/."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pages.blocks import read_blocks
from tests.sampling import every

DOCS = Path(__file__).parents[3] / "docs"
POINTS = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, inputs, values):
        return nn.functional.mse_loss(self.layers(inputs), values)

def points(count):
    generator = torch.Generator().manual_seed(count)
    inputs = torch.rand(count, 2, generator=generator)
    return [{"inputs": row, "values": row.sum()[None]} for row in inputs]
"""
TOKENS = """
import random
import torch
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

torch.manual_seed(0)
sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
LlamaForCausalLM(LlamaConfig(vocab_size=32, num_hidden_layers=1, **sizes)).save_pretrained("runs/llama")
words = Tokenizer(models.WordLevel({str(i): i for i in range(32)}, unk_token="0"))
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", unk_token="0")
rng = random.Random(0)
dataset = [{"input_ids": [rng.randrange(1, 32) for _ in range(rng.choice([14, 16]))]} for _ in range(64)]
"""
BACK = """
back = AutoModelForCausalLM.from_pretrained("tuned").state_dict()
assert all(torch.equal(back[name], tensor) for name, tensor in engine.state_dict().items() if name in back)
"""


def block(page: str, first: str) -> str:
    """Return the code block of a page that begins with this line."""
    return next(block.text for block in read_blocks(DOCS / page) if block.text.startswith(f"{first}\n"))


@pytest.mark.parametrize(
    ("page", "first", "files", "before", "after"),
    every(
        4,
        [
            ("train.md", "import nnscaler", {"model.py": POINTS}, "", "assert result.ended == 'finished'"),
            ("train.md", "import os", {"model.py": POINTS}, "", "assert step == 40 and loss < 0.1"),
            ("train.md", "from os import environ", {}, "", "assert step == 10 and loss < 2.0, (step, loss)"),
            (
                "integrations.md",
                "import os",
                {},
                TOKENS,
                BACK,
            ),
        ],
    ),
)
def test_a_script_of_the_manuals_runs(
    tmp_path: Path, page: str, first: str, files: dict[str, str], before: str, after: str
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "script.py").write_text(f"{before}\n{block(page, first)}\n{after}\nprint('done')\n")
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("done\n")
