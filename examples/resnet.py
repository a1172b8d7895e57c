"""A ResNet with group norm, whose blocks are plain attributes: no part of it is numbered.

    nnscaler verify-plan examples/resnet.py --ranks 3 --plan pp=3
    nnscaler verify-plan examples/resnet.py --ranks 4 --plan dp=2,pp=2 --schedule interleaved

A pipeline is cut by cost and by the bytes that go from stage to stage: between blocks, where nothing but a block's
result is sent, unless stages would be uneven. Inside of a block the skip connection is sent as well. (Batch norm would
couple micro-batches; group norm does not.)
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

COLOURS = 3
CLASSES = 10


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions; the input is added (by a 1x1 where channels or resolution change)."""

    def __init__(self, inner: int, width: int, outer: int, stride: int, groups: int) -> None:
        super().__init__()
        self.reduce = nn.Conv2d(inner, width, 1, bias=False)
        self.norm_1 = nn.GroupNorm(groups, width)
        self.conv = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
        self.norm_2 = nn.GroupNorm(groups, width)
        self.expand = nn.Conv2d(width, outer, 1, bias=False)
        self.norm_3 = nn.GroupNorm(groups, outer)
        same = inner == outer and stride == 1
        self.shortcut = nn.Identity() if same else nn.Conv2d(inner, outer, 1, stride=stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.norm_1(self.reduce(x)))
        h = F.relu(self.norm_2(self.conv(h)))
        return F.relu(self.norm_3(self.expand(h)) + self.shortcut(x))


class ResNet(nn.Module):
    """[batch, COLOURS, height, width] and labels [batch] to the cross-entropy."""

    def __init__(self, groups: int = 4) -> None:
        super().__init__()
        self.stem = nn.Conv2d(COLOURS, 24, 3, padding=1, bias=False)
        self.norm = nn.GroupNorm(groups, 24)
        self.narrow_a = Bottleneck(24, 12, 48, 1, groups)
        self.narrow_b = Bottleneck(48, 12, 48, 1, groups)
        self.middle_a = Bottleneck(48, 20, 80, 2, groups)
        self.middle_b = Bottleneck(80, 20, 80, 1, groups)
        self.wide_a = Bottleneck(80, 28, 112, 2, groups)
        self.wide_b = Bottleneck(112, 28, 112, 1, groups)
        self.head = nn.Linear(112, CLASSES)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = F.relu(self.norm(self.stem(images)))
        x = self.narrow_b(self.narrow_a(x))
        x = self.middle_b(self.middle_a(x))
        x = self.wide_b(self.wide_a(x))
        return F.cross_entropy(self.head(x.mean(dim=(2, 3))), labels)


def build_model() -> ResNet:
    torch.manual_seed(0)
    return ResNet()


def sample_inputs(batch: int = 12) -> dict[str, Tensor]:
    """One global batch of images and their classes."""
    generator = torch.Generator().manual_seed(0)
    return {
        "images": torch.randn(batch, COLOURS, 16, 12, generator=generator),
        "labels": torch.randint(0, CLASSES, (batch,), generator=generator),
    }
