"""The vision transformer as `transformers` defines it, with a tiny configuration: a convolution makes the patches.

    nnscaler verify-plan examples/vit_hf.py --ranks 4 --plan dp=2,tp=2

Nothing is downloaded; the weights are random.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import ViTConfig, ViTForImageClassification


def build_model() -> ViTForImageClassification:
    torch.manual_seed(0)
    return ViTForImageClassification(
        ViTConfig(
            image_size=18,
            patch_size=6,
            num_channels=3,
            hidden_size=48,
            intermediate_size=112,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_labels=14,
            problem_type="single_label_classification",
        )
    )


def sample_inputs(batch: int = 24) -> dict[str, Tensor]:
    """One global batch of images and their classes."""
    generator = torch.Generator().manual_seed(0)
    return {
        "pixel_values": torch.randn(batch, 3, 18, 18, generator=generator),
        "labels": torch.randint(0, 14, (batch,), generator=generator),
    }
