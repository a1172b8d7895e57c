"""A U-Net that predicts the noise of a diffusion model: skips, down- and up-sampling, attention at the bottleneck.

    nnscaler verify-plan examples/unet.py --ranks 4 --plan dp=2,tp=2

A skip joins two stacks of channels by `cat`, and group norm keeps whole groups together: under tensor parallelism the
channels of every convolution are divided. Images are higher than they are wide; all sizes are different.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

COLOURS = 3
STEPS = 50  # of the diffusion


def time_embedding(steps: Tensor, width: int) -> Tensor:
    """[batch] whole numbers to sines and cosines [batch, width]."""
    half = width // 2
    frequencies = torch.exp(-math.log(10000.0) * torch.arange(half, device=steps.device) / half)
    angles = steps[:, None].float() * frequencies[None, :]
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


class ResidualBlock(nn.Module):
    """Two convolutions; the time enters between them, and the input is added (by a 1x1 where channels change)."""

    def __init__(self, inner: int, outer: int, time: int, groups: int) -> None:
        super().__init__()
        self.norm_1 = nn.GroupNorm(groups, inner)
        self.conv_1 = nn.Conv2d(inner, outer, 3, padding=1)
        self.time = nn.Linear(time, outer)
        self.norm_2 = nn.GroupNorm(groups, outer)
        self.dropout = nn.Dropout(0.0)
        self.conv_2 = nn.Conv2d(outer, outer, 3, padding=1)
        self.shortcut = nn.Conv2d(inner, outer, 1) if inner != outer else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        h = self.conv_1(F.silu(self.norm_1(x)))
        h = h + self.time(F.silu(time))[:, :, None, None]
        h = self.conv_2(self.dropout(F.silu(self.norm_2(h))))
        return self.shortcut(x) + h


class SpatialAttention(nn.Module):
    """Every position attends to every other."""

    def __init__(self, channels: int, heads: int, groups: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.GroupNorm(groups, channels)
        self.qkv = nn.Conv1d(channels, 3 * channels, 1)
        self.proj = nn.Conv1d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        batch, channels, height, width = x.shape
        flat = self.norm(x).reshape(batch, channels, height * width)
        q, k, v = self.qkv(flat).chunk(3, dim=1)
        q, k, v = (t.reshape(batch, self.heads, -1, height * width).transpose(2, 3) for t in (q, k, v))
        attended = F.scaled_dot_product_attention(q, k, v).transpose(2, 3)
        return x + self.proj(attended.reshape(batch, channels, -1)).reshape(batch, channels, height, width)


class UNet(nn.Module):
    """Two resolutions down, a bottleneck, two up. [batch, COLOURS, height, width] and times [batch] to noise."""

    def __init__(self, channels: int = 24, time: int = 40, groups: int = 4, heads: int = 4) -> None:
        super().__init__()
        wide = 2 * channels
        self.width = channels
        self.time = nn.Sequential(nn.Linear(channels, time), nn.SiLU(), nn.Linear(time, time))
        self.first = nn.Conv2d(COLOURS, channels, 3, padding=1)
        self.down_1 = ResidualBlock(channels, channels, time, groups)
        self.shrink = nn.Conv2d(channels, channels, 3, stride=2, padding=1)
        self.down_2 = ResidualBlock(channels, wide, time, groups)
        self.pool = nn.AvgPool2d(2)
        self.middle_1 = ResidualBlock(wide, wide, time, groups)
        self.attention = SpatialAttention(wide, heads, groups)
        self.middle_2 = ResidualBlock(wide, wide, time, groups)
        self.grow_2 = nn.ConvTranspose2d(wide, wide, 2, stride=2)
        self.up_2 = ResidualBlock(2 * wide, wide, time, groups)
        self.grow_1 = nn.Conv2d(wide, channels, 3, padding=1)
        self.up_1 = ResidualBlock(2 * channels, channels, time, groups)
        self.norm = nn.GroupNorm(groups, channels)
        self.last = nn.Conv2d(channels, COLOURS, 3, padding=1)

    def forward(self, x: Tensor, steps: Tensor) -> Tensor:
        time = self.time(time_embedding(steps, self.width))
        high = self.down_1(self.first(x), time)
        low = self.down_2(self.shrink(high), time)
        h = self.middle_1(self.pool(low), time)
        h = self.middle_2(self.attention(h), time)
        h = self.up_2(torch.cat([self.grow_2(h), low], dim=1), time)
        h = self.grow_1(F.interpolate(h, scale_factor=2, mode="nearest"))
        h = self.up_1(torch.cat([h, high], dim=1), time)
        return self.last(F.silu(self.norm(h)))


class Diffusion(nn.Module):
    """Images, noise and times to the mean squared error of the predicted noise."""

    kept: Tensor  # the share of an image's variance that is left at each time

    def __init__(self) -> None:
        super().__init__()
        self.unet = UNet()
        self.register_buffer("kept", torch.cumprod(1 - torch.linspace(1e-4, 0.05, STEPS), dim=0))

    def forward(self, images: Tensor, noise: Tensor, steps: Tensor) -> Tensor:
        kept = self.kept[steps][:, None, None, None]
        noisy = kept.sqrt() * images + (1 - kept).sqrt() * noise
        return F.mse_loss(self.unet(noisy, steps), noise)


def build_model() -> Diffusion:
    torch.manual_seed(0)
    return Diffusion()


def sample_inputs(batch: int = 12) -> dict[str, Tensor]:
    """One global batch of images, their noise and their times."""
    generator = torch.Generator().manual_seed(0)
    shape = (batch, COLOURS, 16, 8)
    return {
        "images": torch.randn(shape, generator=generator),
        "noise": torch.randn(shape, generator=generator),
        "steps": torch.randint(0, STEPS, (batch,), generator=generator),
    }
