"""Weights in and out as others have them: safetensors and `transformers`, under any plan, bit by bit."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

import nnscaler
from nnscaler.cli.main import main
from nnscaler.codegen.compiled_program import Program
from nnscaler.compile import WantedPlan, compile_traced
from nnscaler.errors import NnscalerError
from nnscaler.runtime.communication.simulator import Simulator
from nnscaler.runtime.program.import_role_and_user_files import load_user_module
from nnscaler.runtime.shards import shard
from nnscaler.runtime.tensor_bits_and_differences import same_bits
from nnscaler.tracing import Traced, trace
from nnscaler.training.engine import Engine
from nnscaler.training.program_on_rank import EngineSettings
from nnscaler.training.saving import weights
from nnscaler.training.saving.checkpoints import Checkpoints
from nnscaler.training.saving.export import Export, export, open_checkpoint
from tests.nnscaler.training.test_engine import Model, compiled


def llama(seed: int) -> LlamaForCausalLM:
    """With a tied table and half-precision weights, of two layers."""
    torch.manual_seed(seed)
    sizes = {"vocab_size": 30, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 16}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, tie_word_embeddings=True, use_cache=False)).bfloat16()


@pytest.fixture(scope="module")
def traced() -> Traced:
    ids = torch.arange(24).view(4, 6)
    return trace(llama(0), {"input_ids": ids, "labels": ids})


@pytest.mark.long
@pytest.mark.parametrize("plan", ["tp=2", "pp=2"])
def test_transformers_in_and_out(traced: Traced, plan: str, tmp_path: Path) -> None:
    """What save_pretrained wrote in several files, read by two ranks, saved, and read by from_pretrained."""
    original = llama(1)
    original.save_pretrained(tmp_path / "original", max_shard_size="6KB")
    assert (tmp_path / "original" / weights.INDEX).is_file()
    program = compile_traced(traced, WantedPlan(2, plan, micro_batches=None), model={"name": "llama"})

    def work(communicator: Any) -> int:
        engine = Engine(program, communicator, EngineSettings(device="cpu"))
        lacking = nnscaler.load_weights(engine, tmp_path / "original")
        assert all("inv_freq" in name for name in lacking)
        state = original.state_dict()
        for entry in engine.stored():
            if entry.kind == "parameter":
                right = shard(state[entry.fqn], entry.states, entry.sizes, entry.coordinates)
                assert same_bits(entry.tensor.detach(), right), entry.fqn
        Checkpoints(tmp_path / "run", every=1).save(1, engine)
        return len(engine.stored())

    assert sum(Simulator(2).run(work)) > 20
    how = Export("transformers", config=str(tmp_path / "original"), file_bytes=6000)
    files = export(open_checkpoint(tmp_path / "run"), tmp_path / "out", how)
    assert {"config.json", weights.INDEX} <= {file.name for file in files} and len(files) > 4
    again = LlamaForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    found = again.state_dict()
    assert all(same_bits(tensor, found[name]) for name, tensor in original.state_dict().items())
    assert again.lm_head.weight is again.model.embed_tokens.weight


@pytest.fixture
def program() -> Iterator[Program]:
    torch.manual_seed(0)
    yield compiled(Model(), "dp=1", 1)


def started(program: Program) -> Engine:
    return Engine(program, None, EngineSettings(device="cpu"))


def test_formats(program: Program, tmp_path: Path) -> None:
    engine = started(program)
    Checkpoints(tmp_path / "run", every=1).save(3, engine)
    folder = open_checkpoint(tmp_path / "run")
    [file] = export(folder, tmp_path / "model.pt", Export("torch"))
    model = Model()
    model.load_state_dict(torch.load(file, weights_only=True))
    right = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    export(folder, tmp_path / "files", Export(dtype="bfloat16", prefix="layers."))
    for parameter in engine.parameters.values():
        parameter.data.zero_()
    told = r"has no `layers.0.up.weight`\n  help: it has `0.up.weight`: prefix='layers.'"
    with pytest.raises(NnscalerError, match=told):
        nnscaler.load_weights(engine, tmp_path / "files")
    nnscaler.load_weights(engine, tmp_path / "run" / "last")
    assert all(torch.equal(right[name], parameter) for name, parameter in engine.parameters.items())
    with pytest.raises(NnscalerError, match="is none of safetensors, transformers, torch"):
        export(folder, tmp_path / "x", Export("onnx"))
    with pytest.raises(NnscalerError, match=r"nothing/config.json|nothing does not exist"):
        export(folder, tmp_path / "x", Export("transformers", config=str(tmp_path / "nothing")))
    (tmp_path / "file").write_text("")
    with pytest.raises(NnscalerError, match="cannot write"):
        export(folder, tmp_path / "file" / "x")


def test_other_dtypes_and_one_file(program: Program, tmp_path: Path) -> None:
    state = {name: torch.randn_like(t).to(torch.bfloat16) for name, t in Model().state_dict().items()}
    save_file(state, tmp_path / "w.safetensors")
    engine = started(program)
    assert nnscaler.load_weights(engine, tmp_path / "w.safetensors") == []
    assert all(torch.equal(state[name].float(), p) for name, p in engine.parameters.items())
    for name, dtype in {"I64": torch.int64, "U8": torch.uint8, "BOOL": torch.bool, "F16": torch.float16}.items():
        assert weights._dtype(name) is dtype


def test_two_tensors_are_not_taken_for_a_tied_one(tmp_path: Path) -> None:
    """torch would keep the second one, and a reader of the first name that one."""

    class Tied(Model):
        def __init__(self) -> None:
            super().__init__()
            self.again = torch.nn.Linear(10, 3, bias=False)
            self.again.weight = self.head.weight

    engine = started(compiled(Tied(), "dp=1", 1))
    for added, told in ((0.0, None), (1.0, "`head.weight` and `again.weight` are one tensor in the model, and differ")):
        state = {name: t.clone() for name, t in Tied().state_dict().items()}
        save_file({**state, "again.weight": state["head.weight"] + added}, tmp_path / "model.safetensors")
        if told is None:
            assert nnscaler.load_weights(engine, tmp_path) == []
        else:
            with pytest.raises(NnscalerError, match=told):
                nnscaler.load_weights(engine, tmp_path)


def test_files_that_do_not_fit(program: Program, tmp_path: Path) -> None:
    engine = started(program)
    with pytest.raises(NnscalerError, match="holds neither a checkpoint nor safetensors"):
        nnscaler.load_weights(engine, tmp_path)
    state = Model().state_dict()
    save_file({**state, "head.weight": torch.ones(10, 3)}, tmp_path / "model.safetensors")
    told = r"another model: `head.weight` is float32\[10, 3\] in it, and the program's is float32\[3, 10\]"
    with pytest.raises(NnscalerError, match=told):
        nnscaler.load_weights(engine, tmp_path)
    save_file({n: t for n, t in state.items() if n != "head.weight"}, tmp_path / "model.safetensors")
    with pytest.raises(NnscalerError, match=r"it has no `head\.weight`"):
        nnscaler.load_weights(engine, tmp_path)
    save_file({f"module.{n}": t for n, t in state.items()}, tmp_path / "model.safetensors")
    with pytest.raises(NnscalerError) as caught:
        nnscaler.load_weights(engine, tmp_path)
    assert "n.removeprefix('module.')" in (caught.value.help or "")
    save_file({**state, "more.weight": torch.ones(3)}, tmp_path / "model.safetensors")
    with pytest.warns(UserWarning, match="has 1 tensors that the model does not have: `more.weight`"):
        nnscaler.load_weights(engine, tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\0" * 20)
    with pytest.raises(NnscalerError, match="cannot be read, it may be cut short"):
        nnscaler.load_weights(engine, tmp_path)
    (tmp_path / weights.INDEX).write_text("{}")
    with pytest.raises(NnscalerError, match=r"index.json cannot be read: KeyError"):
        nnscaler.load_weights(engine, tmp_path)


@pytest.mark.long
def test_the_example_goes_from_weights_to_weights(
    examples: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is saved is the state dict, without the buffers that the model makes itself."""
    for file in ("examples/finetune_llama.py", "examples/finetune_llama.toml", "docs/train.md"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        shutil.copyfile(examples.parent / file, tmp_path / file)
    shutil.copyfile(tmp_path / "docs/train.md", tmp_path / "docs/validation.md")
    monkeypatch.chdir(tmp_path)
    module = load_user_module("examples/finetune_llama.py")
    module.main()
    run = ["train", "examples/finetune_llama.toml", "--batch-size=4", "--validation.batches=1"]
    assert main([*run, "--steps=1", "--lr=1e-30"]) == 0
    [file] = nnscaler.export_weights("runs/finetuned", "weights.pt", format="torch")
    before, after = LlamaForCausalLM.from_pretrained("runs/llama"), module.build_model()
    after.load_state_dict(torch.load(file, weights_only=True))
    right = before.state_dict()
    assert all(same_bits(tensor, right[name]) for name, tensor in after.state_dict().items())
    assert main([*run, "--steps=8", "--checkpoints.folder=runs/b"]) == 0
    losses = [float(text) for text in re.findall(r"validation loss (\S+)", capsys.readouterr().out)]
    assert len(losses) == 2 and losses[1] < losses[0] - 0.1, "it learns"


def test_a_file_of_torch_is_named_so(tmp_path: Path) -> None:
    torch.save({"w": torch.zeros(2)}, tmp_path / "w.pt")
    with pytest.raises(NnscalerError, match=r"w.pt is no file of safetensors, but one of torch.save"):
        weights.SafetensorFiles(tmp_path / "w.pt")


class WithTable(torch.nn.Module):
    """Has a buffer that it does not save."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
        self.register_buffer("table", torch.ones(4), persistent=False)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.layer(x) * self.table + self.count).square().mean()


def test_the_state_is_that_which_the_module_loads() -> None:
    model, batch = WithTable(), {"x": torch.ones(2, 4)}
    engine = nnscaler.start(nnscaler.parallelize(model, batch, ranks=1, plan="dp=1"))
    assert engine.state_dict().keys() == model.state_dict().keys()
    assert any(entry.fqn == "table" for entry in engine.stored())
    model.load_state_dict(engine.state_dict())
