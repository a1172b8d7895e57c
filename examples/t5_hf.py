"""T5 as `transformers` defines it, with a tiny configuration: an encoder-decoder with relative position biases.

    nnscaler verify-plan examples/t5_hf.py --ranks 4 --plan dp=2,tp=2
    nnscaler verify-plan examples/t5_hf.py --ranks 2 --plan pp=2

Every decoder layer reads the encoder's result, so under `pp` a tensor is consumed several stages after it is made.
Nothing is downloaded; the weights are random.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import T5Config, T5ForConditionalGeneration


def build_model() -> T5ForConditionalGeneration:
    torch.manual_seed(0)
    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=120,
            d_model=48,
            d_kv=10,
            d_ff=112,
            num_layers=2,
            num_decoder_layers=2,
            num_heads=4,
            relative_attention_num_buckets=8,
            relative_attention_max_distance=14,
            dropout_rate=0.0,
            decoder_start_token_id=0,
            use_cache=False,
        )
    )


def sample_inputs(batch: int = 24, source: int = 12, target: int = 9) -> dict[str, Tensor]:
    """One global batch of sources and targets, padded on the right to different lengths."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 120, (batch, source), generator=generator)
    labels = torch.randint(1, 120, (batch, target), generator=generator)
    source_lengths = torch.randint(source // 2, source + 1, (batch, 1), generator=generator)
    target_lengths = torch.randint(target // 2, target + 1, (batch, 1), generator=generator)
    return {
        "input_ids": ids,
        "attention_mask": (torch.arange(source) < source_lengths).long(),
        "labels": labels.masked_fill(torch.arange(target) >= target_lengths, -100),
    }
