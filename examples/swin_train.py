"""A Swin transformer of `transformers` that learns to tell six shapes apart, on pictures that are drawn here.

    nnscaler train examples/swin.toml
    nnscaler train examples/swin.toml --ranks=2 --plan=dp=2,zero=1
    nnscaler train examples/swin.toml --ranks=2 --plan=tp=2

In less than a minute on two cores the loss on pictures that it has not seen falls below 0.3 nats; one that guesses has
ln 6 = 1.79. Under `tp=2`, which cuts heads, windows and the places in them, a run takes two minutes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import SwinConfig, SwinForImageClassification

SIZE = 32  # of a picture for Swin, in pixels
NOISE = 0.2
SHAPES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {  # coordinates, of which a shape fills -1 to 1 -> is it there
    "circle": lambda x, y: x * x + y * y < 1,
    "ring": lambda x, y: ((x * x + y * y) - 0.65).abs() < 0.35,
    "square": lambda x, y: torch.maximum(x.abs(), y.abs()) < 0.85,
    "diamond": lambda x, y: x.abs() + y.abs() < 1.1,
    "triangle": lambda x, y: (y < 0.8) & (2 * x.abs() < y + 1),
    "cross": lambda x, y: (torch.minimum(x.abs(), y.abs()) < 0.3) & (torch.maximum(x.abs(), y.abs()) < 1),
}


def build_model() -> SwinForImageClassification:
    """Two stages of two layers, about 95,000 parameters. The second layer of the first stage shifts its windows."""
    config = SwinConfig(
        image_size=SIZE,
        patch_size=4,
        num_channels=3,
        embed_dim=32,
        depths=[2, 2],
        num_heads=[2, 4],
        window_size=4,
        mlp_ratio=2.0,
        drop_path_rate=0.1,
        num_labels=len(SHAPES),
        problem_type="single_label_classification",
    )
    return SwinForImageClassification(config)


class Pictures(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Pictures first, first + 1, ...: each is drawn from its number alone."""

    def __init__(self, first: int, count: int, size: int = SIZE) -> None:
        self._first, self._count, self._size = first, count, size
        self._columns = torch.arange(size).float().expand(size, size)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """A shape of random place, size and colour, on a darker background of another colour, under noise."""
        generator = torch.Generator().manual_seed(self._first + index)
        label = torch.randint(len(SHAPES), (), generator=generator)
        share, across, down = torch.rand(3, generator=generator)
        radius = self._size * (0.2 + 0.2 * share)
        room = self._size - 1 - 2 * radius
        x, y = (self._columns - radius - room * across) / radius, (self._columns.T - radius - room * down) / radius
        shown = list(SHAPES.values())[int(label)](x, y)
        background, colour = torch.rand(2, 3, 1, 1, generator=generator)
        noise = NOISE * torch.randn(3, self._size, self._size, generator=generator)
        return {"pixel_values": torch.where(shown, colour + 0.2, background - 1) + noise, "labels": label}


def datasets() -> tuple[Pictures, Pictures]:
    """Pictures to train on, and others for validation."""
    return Pictures(0, 100_000), Pictures(100_000, 600)
