"""Small models, each with one thing that a wrong program gets wrong. No two sizes are equal, and no count is even."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WORDS, WIDTH, HEADS, HIDDEN, TOKENS, BATCH = 20, 12, 2, 28, 5, 16
IGNORED = -1


class Attention(nn.Module):
    """Packed projection: a third each of queries, keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.middle = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.down(F.gelu(self.up(self.middle(x))))


class Transformer(nn.Module):
    """Blocks between an embedding and a head that share a weight. The loss is a mean over the labels that count."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.last = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.last(x)).flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


def transformer() -> nn.Module:
    torch.manual_seed(0)
    return Transformer(2)


def one_block() -> nn.Module:
    torch.manual_seed(0)
    return Transformer(1)


def text() -> dict[str, Tensor]:
    """Rows end at different lengths: no rank and no micro-batch has as many labels as another."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, WORDS, (BATCH, TOKENS), generator=generator)
    labels = torch.randint(0, WORDS, (BATCH, TOKENS), generator=generator)
    lengths = torch.tensor([5, 1, 2, 3, 4, 1, 2, 2, 5, 5, 4, 4, 5, 3, 5, 2])
    return {"ids": ids, "labels": labels.masked_fill(torch.arange(TOKENS) >= lengths[:, None], IGNORED)}


class Normed(nn.Module):
    """Batch norm between two convolutions, a constant that the model's code makes, and a parameter without any use."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 6, 3)
        self.norm = nn.BatchNorm2d(6)
        self.second = nn.Conv2d(6, 5, 2)
        self.spare = nn.Parameter(torch.ones(3))
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 5).view(5, 1, 1))

    scale: Tensor

    def forward(self, pixels: Tensor, labels: Tensor) -> Tensor:
        x = F.relu(self.norm(self.first(pixels)))
        weights = torch.tensor([0.5, 2.0, 1.25, 0.75, 3.0])
        return F.cross_entropy((self.second(x) * self.scale).mean((2, 3)) * weights, labels)


def normed() -> nn.Module:
    torch.manual_seed(0)
    return Normed()


def images() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randn(8, 3, 7, 6, generator=generator)
    return {"pixels": pixels, "labels": torch.randint(0, 5, (8,), generator=generator)}


class Perceptron(nn.Module):
    """Nothing but two linear layers: what is quick to start in processes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(7, 10), nn.Linear(10, 5)])

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        first, second = self.layers
        return (second(torch.tanh(first(x))) - y).square().mean()


def perceptron() -> nn.Module:
    torch.manual_seed(0)
    return Perceptron()


def points() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {"x": torch.randn(12, 7, generator=generator), "y": torch.randn(12, 5, generator=generator)}


class Shuffled(nn.Module):
    """Rows that become a factor of a longer dim, and one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return torch.pixel_shuffle(x * self.w, 2).sum()


def shuffled() -> nn.Module:
    return Shuffled()


def maps() -> dict[str, Tensor]:
    return {"x": torch.randn(4, 8, 12, 10, generator=torch.Generator().manual_seed(1))}


# What the command line looks for.
build_model, sample_inputs = perceptron, points
