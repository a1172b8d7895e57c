"""Small transformers of HuggingFace: traced, checked against eager, and well formed."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nnscaler.ir.print_graph import print_graph
from nnscaler.tracing import run_graph, trace
from tests.graph_invariants import check_graph
from tests.graph_text import parse_graph
from tests.sampling import every

Example = tuple[nn.Module, dict[str, Tensor]]

IDS = torch.randint(3, 64, (2, 8), generator=torch.Generator().manual_seed(1))
IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
SMALL: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
TEXT = {"input_ids": IDS, "labels": IDS}
PICTURES = {"pixel_values": IMAGES, "labels": torch.tensor([1, 2])}


def llama(hf: ModuleType) -> Example:
    config = hf.LlamaConfig(vocab_size=64, num_key_value_heads=2, tie_word_embeddings=True, **SMALL)
    return hf.LlamaForCausalLM(config), TEXT


def gpt2(hf: ModuleType) -> Example:
    config = hf.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=16)
    return hf.GPT2LMHeadModel(config), TEXT


def t5(hf: ModuleType) -> Example:
    sizes: dict[str, Any] = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    config = hf.T5Config(vocab_size=64, decoder_start_token_id=0, **sizes)
    return hf.T5ForConditionalGeneration(config), TEXT


def bert(hf: ModuleType) -> Example:
    mask = torch.ones_like(IDS)
    mask[1, 5:] = 0
    return hf.BertForMaskedLM(hf.BertConfig(vocab_size=64, **SMALL)), {**TEXT, "attention_mask": mask}


def vit(hf: ModuleType) -> Example:
    return hf.ViTForImageClassification(hf.ViTConfig(image_size=32, patch_size=8, num_labels=5, **SMALL)), PICTURES


def swin(hf: ModuleType) -> Example:
    windows: dict[str, Any] = {"depths": [2, 2], "num_heads": [2, 4], "window_size": 4, "drop_path_rate": 0.0}
    config = hf.SwinConfig(image_size=32, patch_size=4, embed_dim=16, num_labels=5, **windows)
    return hf.SwinForImageClassification(config), PICTURES


def resnet(hf: ModuleType) -> Example:
    sizes: dict[str, Any] = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"}
    return hf.ResNetForImageClassification(hf.ResNetConfig(num_labels=5, **sizes)), PICTURES


def perturbed(model: nn.Module) -> nn.Module:
    """Every parameter at random: zero biases and unit norms hide terms."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize("build", every(2, [llama, gpt2, t5, bert, vit, swin, resnet]))
def test_models(hf: ModuleType, build: Callable[[ModuleType], Example]) -> None:
    model, inputs = build(hf)
    traced = trace(perturbed(model), inputs)
    graph = traced.graph
    assert traced.notes == ()
    check_graph(graph)
    assert parse_graph(print_graph(graph)) == graph
    modules = dict(model.named_modules())
    assert all(op.where is not None and op.module in modules for op in graph.operations)
    fqns = [fqn for t in graph.with_role("parameter") for fqn in t.fqns]
    assert sorted(fqns) == sorted(n for n, _ in model.named_parameters(remove_duplicate=False))
    values = run_graph(graph, traced.state, traced.inputs)
    used = {graph.loss}  # the new value of a running statistic has a gradient function, and nothing asks for it
    for op in reversed(graph.operations):
        if not used.isdisjoint(op.outputs):
            used.update(op.inputs)
    for name, tensor in graph.tensors.items():
        assert (values[name].requires_grad and name in used) == tensor.needs_grad, name
        assert (tuple(values[name].shape), str(values[name].dtype)) == (tensor.shape, f"torch.{tensor.dtype}"), name


@pytest.mark.long
def test_tied_weights_are_one_tensor(hf: ModuleType) -> None:
    model, inputs = llama(hf)
    graph = trace(model, inputs).graph
    tied = graph.tensors["model_embed_tokens_weight"]
    assert tied.fqns == ("model.embed_tokens.weight", "lm_head.weight")
    assert {op.operator for op, _ in graph.consumers[tied.name]} == {"aten.embedding.default", "aten.linear.default"}


@pytest.mark.long
def test_rotary_halves_are_one_split(hf: ModuleType) -> None:
    model, inputs = llama(hf)
    operators = [op.operator for op in trace(model, inputs).graph.operations]
    assert operators.count("aten.split_with_sizes.default") == 4
    assert operators.count("aten.slice.Tensor") == 1  # the labels, shifted


@pytest.mark.long
def test_t5_shifts_its_labels(hf: ModuleType) -> None:
    model, inputs = t5(hf)
    graph = trace(model, inputs).graph
    operators = [op.operator for op in graph.operations]
    assert "aten.slice_scatter.default" in operators
    assert graph.consumers["labels"], "the decoder's inputs come from the labels"


@pytest.mark.long
def test_a_model_without_data(hf: ModuleType) -> None:
    model, inputs = llama(hf)
    real = trace(model, inputs).graph
    with torch.device("meta"):
        empty, _ = llama(hf)
    traced = trace(empty, inputs)
    check_graph(traced.graph)
    assert print_graph(traced.graph) == print_graph(real)
    assert "meta" in traced.notes[0]
    assert all(t.is_meta for t in traced.state.values())
    assert trace(empty, {k: v.to("meta") for k, v in inputs.items()}).graph == real


@pytest.mark.long
def test_tracing_is_quick(hf: ModuleType) -> None:
    model, inputs = llama(hf)
    seconds = []
    for _ in range(3):
        start = time.process_time()
        trace(model, inputs)
        seconds.append(time.process_time() - start)
    assert min(seconds) < 2.0
