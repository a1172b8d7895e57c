"""Llama as `transformers` defines it, with a tiny configuration: rotary positions, grouped keys and values, SwiGLU.

    nnscaler verify-plan examples/llama_hf.py --ranks 4 --plan dp=2,tp=2

Nothing is downloaded; the weights are random.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM


def build_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=120,
            hidden_size=48,
            intermediate_size=112,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=32,
            tie_word_embeddings=False,
            use_cache=False,
        )
    )


def sample_inputs(batch: int = 24, tokens: int = 10) -> dict[str, Tensor]:
    """One global batch, padded on the right to different lengths; padding is masked and has no label."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 120, (batch, tokens), generator=generator)
    lengths = torch.randint(tokens // 2, tokens + 1, (batch, 1), generator=generator)
    present = torch.arange(tokens) < lengths
    return {"input_ids": ids, "attention_mask": present.long(), "labels": ids.masked_fill(~present, -100)}
