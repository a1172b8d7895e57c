"""Llama 3 with its real shapes, on the meta device: nothing of it is allocated, and every rank's program comes out.

    nnscaler compile examples/llama_405b.py::llama_8b --ranks 8 --plan dp=2,tp=2,pp=2 --micro-batches 2 --out build/
    nnscaler compile examples/llama_405b.py::llama_405b --ranks 8192 --plan dp=64,pp=16,tp=8 --micro-batches 16 \
        --replicate '*layernorm' --replicate model.norm --out build/

The layers of norm are left whole here, which is Megatron's pattern: an all_reduce after attention and after the MLP.
Without `--replicate` the planner splits the residual stream, and its sums become reduce_scatters.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY = 128256
TOKENS = 8192


def llama_405b(layers: int = 126) -> LlamaForCausalLM:
    """Llama 3 405B: 126 layers, 128 heads, 8 heads of keys and values."""
    return on_meta(hidden=16384, intermediate=53248, heads=128, layers=layers)


def llama_8b(layers: int = 32) -> LlamaForCausalLM:
    """Llama 3 8B: 32 layers, 32 heads, 8 heads of keys and values."""
    return on_meta(hidden=4096, intermediate=14336, heads=32, layers=layers)


build_model = llama_8b


def on_meta(*, hidden: int, intermediate: int, heads: int, layers: int) -> LlamaForCausalLM:
    """A model without data, in bfloat16."""
    with torch.device("meta"):
        return LlamaForCausalLM(config(VOCABULARY, hidden, intermediate, heads, 8, layers)).to(torch.bfloat16)


def config(vocabulary: int, hidden: int, intermediate: int, heads: int, groups: int, layers: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        max_position_embeddings=TOKENS,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        use_cache=False,
    )


def sample_inputs(batch: int = 1024, tokens: int = TOKENS) -> dict[str, Tensor]:
    """One global batch: shapes, without data."""
    ids = torch.empty(batch, tokens, dtype=torch.long, device="meta")
    return {"input_ids": ids, "labels": torch.empty_like(ids)}


def tiny() -> LlamaForCausalLM:
    """The same structure with data, to run."""
    torch.manual_seed(0)
    return LlamaForCausalLM(config(120, 48, 112, 4, 2, 4))


def tiny_inputs(batch: int = 24, tokens: int = 10) -> dict[str, Tensor]:
    """A batch for `tiny`."""
    ids = torch.randint(0, 120, (batch, tokens), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids}
