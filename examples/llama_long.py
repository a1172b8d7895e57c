"""Llama 3 8B on sequences of 131,072 tokens, on the meta device: fewer sequences than ranks, so tokens are divided.

nnscaler plan examples/llama_long.py --ranks 32 --cluster h100x8
nnscaler compile examples/llama_long.py --ranks 32 --plan cp=4,tp=8 --out build/
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY = 128256
TOKENS = 131072


def build_model(layers: int = 32) -> LlamaForCausalLM:
    """A model without data, in bfloat16: 32 layers, 32 heads, 8 heads of keys and values."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=TOKENS,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        use_cache=False,
    )
    with torch.device("meta"):
        return LlamaForCausalLM(config).to(torch.bfloat16)


def sample_inputs(batch: int = 4, tokens: int = TOKENS) -> dict[str, Tensor]:
    """One global batch: shapes, without data."""
    ids = torch.empty(batch, tokens, dtype=torch.long, device="meta")
    return {"input_ids": ids, "labels": torch.empty_like(ids)}
