"""Pictures of shapes, as small as those of vit_hf.py: swin_train.py draws them.

nnscaler train examples/vit.toml
nnscaler train examples/vit.toml --ranks=2 --plan=dp=2,zero=1
"""

from __future__ import annotations

from swin_train import Pictures

SIZE = 18


def datasets() -> tuple[Pictures, Pictures]:
    """Pictures to train on, and others for validation."""
    return Pictures(0, 100_000, SIZE), Pictures(100_000, 480, SIZE)
