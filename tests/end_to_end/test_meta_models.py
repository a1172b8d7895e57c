"""Models without data: traced, compiled for any number of ranks, and saved without a state."""

from __future__ import annotations

import json
import resource
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

from nnscaler.cli.main import main
from nnscaler.compile import WantedPlan, compile_traced, parallelize
from nnscaler.runtime.program.import_role_and_user_files import load_user_module
from nnscaler.tracing import trace


@pytest.fixture(scope="module")
def example(examples: Path) -> ModuleType:
    return load_user_module(str(examples / "llama_405b.py"))


@pytest.mark.long
def test_a_meta_model_gives_the_program_of_the_model_with_data(example: ModuleType) -> None:
    model = example.tiny()
    plan = {"ranks": 8, "plan": "dp=2,tp=2,pp=2", "micro_batches": 3, "model": {"name": "tiny"}}
    real = parallelize(model, example.tiny_inputs(), **plan)
    with torch.device("meta"):
        empty = type(model)(model.config)
    inputs = {name: tensor.to("meta") for name, tensor in example.tiny_inputs().items()}
    meta = parallelize(empty, inputs, **plan)
    assert dict(meta.sources) == dict(real.sources)
    hashed = {name: replace(entry, sha256=None) for name, entry in real.manifest.state.items()}
    assert {name: replace(entry, sha256=None) for name, entry in meta.manifest.state.items()} == hashed
    assert replace(meta.manifest, state={}, batch={}) == replace(real.manifest, state={}, batch={})
    assert all(tensor.is_meta for tensor in meta.state.values() if tensor.numel() > 100)


def test_the_trace_says_that_it_was_not_checked(example: ModuleType) -> None:
    assert (
        "the trace is not checked: the module has no data (meta device)"
        in trace(example.llama_8b(2), example.sample_inputs(batch=8)).notes
    )


def test_real_shapes_on_thousands_of_ranks(example: ModuleType) -> None:
    """11 layers of 405B's shapes over 4 stages: uneven, and nothing grows with the ranks but their list."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    traced = trace(example.llama_405b(11), example.sample_inputs(batch=1024))
    sizes = []
    for dp in (2, 64):
        program = compile_traced(
            traced,
            WantedPlan(dp * 32, f"dp={dp},pp=4,tp=8", micro_batches=8, replicate=("*layernorm", "model.norm")),
            model={"name": "llama"},
        )
        lines = [line for text in program.sources.values() for line in text.splitlines()]
        sizes.append(sum(len(line) for line in lines if "ranks" not in line.lower() and "peers=" not in line))
    assert abs(sizes[1] - sizes[0]) < 0.02 * sizes[0]
    assert sum(text.count("comm.all_reduce(linear_") for text in program.sources.values()) == 2 * 11
    # 11 layers have 140 GB of parameters
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2 * 2**20


@pytest.mark.long
def test_the_command_writes_a_program_without_a_state(
    examples: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "two_layers.py"
    text = (examples / "llama_405b.py").read_text()
    file.write_text(text.replace("layers: int = 32", "layers: int = 2"))
    out = tmp_path / "program"
    arguments = ["compile", f"{file}::llama_8b", "--ranks", "256", "--plan", "dp=32,tp=4,pp=2", "--out", str(out)]
    assert main([*arguments, "--micro-batches", "4"]) == 0
    assert not (out / "state.pt").exists() and "has no data (meta device)" in capsys.readouterr().out
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["ranks"] == 256 and len(manifest["roles"]) == 2
    assert manifest["memory"][0]["parameters"] > 10**8
