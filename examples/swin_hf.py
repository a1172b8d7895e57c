"""The Swin transformer as `transformers` defines it, with a tiny configuration: attention in shifted windows.

    nnscaler verify-plan examples/swin_hf.py --ranks 4 --plan dp=2,tp=2

Its windows are made by views and permutations that mix the batch with the image's dims, and every stage halves the
image and doubles the width. Nothing is downloaded; the weights are random.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import SwinConfig, SwinForImageClassification


def build_model() -> SwinForImageClassification:
    torch.manual_seed(0)
    return SwinForImageClassification(
        SwinConfig(
            image_size=32,
            patch_size=4,
            num_channels=3,
            embed_dim=24,
            depths=[2, 2],
            num_heads=[4, 8],
            window_size=4,
            mlp_ratio=3.0,
            drop_path_rate=0.0,
            num_labels=14,
            problem_type="single_label_classification",
        )
    )


def sample_inputs(batch: int = 12) -> dict[str, Tensor]:
    """One global batch of images and their classes."""
    generator = torch.Generator().manual_seed(0)
    return {
        "pixel_values": torch.randn(batch, 3, 32, 32, generator=generator),
        "labels": torch.randint(0, 14, (batch,), generator=generator),
    }
