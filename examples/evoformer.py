"""The Evoformer of AlphaFold 2: a sequence alignment and a table of residue pairs inform each other.

    nnscaler verify-plan examples/evoformer.py --ranks 4 --plan dp=2,tp=2
    nnscaler verify-plan examples/evoformer.py::build_with_recycling --ranks 2 --plan pp=2 --schedule 3f1b

A block is: row attention biased by pairs, column attention, a transition, the outer product mean that carries the
alignment into the pairs, two triangle multiplications, two triangle attentions, a transition of the pairs (Jumper et
al. 2021, supplement 1.6). Two heads follow: masked residues and binned distances. The sizes are all different.

With recycling (supplement 1.10) the whole runs several times, and each run starts from what the one before found. Only
the last one is differentiated.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

IGNORED = -100  # a residue that was not masked, a distance that is not known
FAR = -1e9  # added to the attention logits of what is not there


@dataclass(frozen=True)
class EvoformerConfig:
    residues: int = 22  # kinds of residue
    alignment: int = 36  # channels of the alignment
    pairs: int = 24  # channels of a pair
    heads: int = 6
    pair_heads: int = 2
    outer: int = 10  # channels of the outer product
    triangle: int = 20  # hidden channels of a triangle multiplication
    bins: int = 14
    reach: int = 3  # relative positions beyond it are alike
    blocks: int = 2
    dropout: float = 0.0
    pair_dropout: float = 0.0
    recycles: int = 0  # runs without gradient before the one that is trained


class Recycling(nn.Module):
    """Adds what the run before found to the first row of the alignment, the target's, and to the pairs."""

    def __init__(self, config: EvoformerConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.alignment)
        self.pair_norm = nn.LayerNorm(config.pairs)

    def forward(self, rows: Tensor, pairs: Tensor, seen: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        first = rows[:, :1] + self.norm(seen[0][:, :1])
        return torch.cat([first, rows[:, 1:]], dim=1), pairs + self.pair_norm(seen[1])


class SharedDropout(nn.Module):
    """Dropout with one mask for all entries along `dim`: whole rows or columns fall."""

    def __init__(self, chance: float, dim: int) -> None:
        super().__init__()
        self.dim = dim
        self.dropout = nn.Dropout(chance)

    def forward(self, x: Tensor) -> Tensor:
        shape = list(x.shape)
        shape[self.dim] = 1
        return x * self.dropout(x.new_ones(shape))


class GatedAttention(nn.Module):
    """Attention along the second last dim of [*, length, width], with a gate on each channel of its heads."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, width, bias=False)
        self.v = nn.Linear(width, width, bias=False)
        self.gate = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        """`bias` is added to the logits [*, heads, length, length]."""
        q, k, v = (layer(x).unflatten(-1, (self.heads, -1)).transpose(-2, -3) for layer in (self.q, self.k, self.v))
        logits = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        weights = torch.softmax(logits + bias, dim=-1)
        attended = (weights @ v).transpose(-2, -3).flatten(-2)
        return self.out(torch.sigmoid(self.gate(x)) * attended)


class RowAttention(nn.Module):
    """Within each sequence of [batch, sequences, length, width]; the pairs bias who looks at whom."""

    def __init__(self, config: EvoformerConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.alignment)
        self.pair_norm = nn.LayerNorm(config.pairs)
        self.bias = nn.Linear(config.pairs, config.heads, bias=False)
        self.attention = GatedAttention(config.alignment, config.heads)

    def forward(self, rows: Tensor, pairs: Tensor, absent: Tensor) -> Tensor:
        bias = self.bias(self.pair_norm(pairs)).permute(0, 3, 1, 2)
        return self.attention(self.norm(rows), bias[:, None] + absent[:, :, None, None, :])


class ColumnAttention(nn.Module):
    """Within each column: the same residue in all sequences."""

    def __init__(self, config: EvoformerConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.alignment)
        self.attention = GatedAttention(config.alignment, config.heads)

    def forward(self, rows: Tensor, absent: Tensor) -> Tensor:
        columns = self.norm(rows).transpose(1, 2)
        bias = absent.transpose(1, 2)[:, :, None, None, :]
        return self.attention(columns, bias).transpose(1, 2)


class Transition(nn.Module):
    def __init__(self, width: int, factor: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, factor * width)
        self.down = nn.Linear(factor * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.up(self.norm(x))))


class OuterProductMean(nn.Module):
    """Over the sequences, the mean of the outer products of two residues' channels."""

    def __init__(self, config: EvoformerConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.alignment)
        self.left = nn.Linear(config.alignment, config.outer)
        self.right = nn.Linear(config.alignment, config.outer)
        self.out = nn.Linear(config.outer**2, config.pairs)

    def forward(self, rows: Tensor, present: Tensor) -> Tensor:
        normal = self.norm(rows)
        left = self.left(normal) * present[..., None]
        right = self.right(normal) * present[..., None]
        product = torch.einsum("bsic,bsjd->bijcd", left, right).flatten(-2)
        count = torch.einsum("bsi,bsj->bij", present, present)[..., None]
        return self.out(product) / (count + 1e-3)


class TriangleMultiplication(nn.Module):
    """A pair (i, j) learns from the pairs (i, k), (j, k) that leave both, or from (k, i), (k, j) that arrive."""

    def __init__(self, config: EvoformerConfig, outgoing: bool) -> None:
        super().__init__()
        self.equation = "bikc,bjkc->bijc" if outgoing else "bkic,bkjc->bijc"
        self.norm = nn.LayerNorm(config.pairs)
        self.left = nn.Linear(config.pairs, config.triangle)
        self.right = nn.Linear(config.pairs, config.triangle)
        self.left_gate = nn.Linear(config.pairs, config.triangle)
        self.right_gate = nn.Linear(config.pairs, config.triangle)
        self.out_norm = nn.LayerNorm(config.triangle)
        self.out = nn.Linear(config.triangle, config.pairs)
        self.gate = nn.Linear(config.pairs, config.pairs)

    def forward(self, pairs: Tensor, present: Tensor) -> Tensor:
        normal = self.norm(pairs)
        left = present[..., None] * torch.sigmoid(self.left_gate(normal)) * self.left(normal)
        right = present[..., None] * torch.sigmoid(self.right_gate(normal)) * self.right(normal)
        closed = self.out_norm(torch.einsum(self.equation, left, right))
        return torch.sigmoid(self.gate(normal)) * self.out(closed)


class TriangleAttention(nn.Module):
    """Pairs that start at the same residue attend to each other, biased by the third side; or pairs that end there."""

    def __init__(self, config: EvoformerConfig, starting: bool) -> None:
        super().__init__()
        self.starting = starting
        self.norm = nn.LayerNorm(config.pairs)
        self.bias = nn.Linear(config.pairs, config.pair_heads, bias=False)
        self.attention = GatedAttention(config.pairs, config.pair_heads)

    def forward(self, pairs: Tensor, absent: Tensor) -> Tensor:
        if not self.starting:
            pairs, absent = pairs.transpose(1, 2), absent.transpose(1, 2)
        normal = self.norm(pairs)
        bias = self.bias(normal).permute(0, 3, 1, 2)
        attended = self.attention(normal, bias[:, None] + absent[:, :, None, None, :])
        return attended if self.starting else attended.transpose(1, 2)


class Block(nn.Module):
    def __init__(self, config: EvoformerConfig) -> None:
        super().__init__()
        self.row = RowAttention(config)
        self.column = ColumnAttention(config)
        self.transition = Transition(config.alignment, 4)
        self.outer = OuterProductMean(config)
        self.outgoing = TriangleMultiplication(config, outgoing=True)
        self.incoming = TriangleMultiplication(config, outgoing=False)
        self.starting = TriangleAttention(config, starting=True)
        self.ending = TriangleAttention(config, starting=False)
        self.pair_transition = Transition(config.pairs, 3)
        self.drop_rows = SharedDropout(config.dropout, dim=1)
        self.drop_pair_rows = SharedDropout(config.pair_dropout, dim=1)
        self.drop_pair_columns = SharedDropout(config.pair_dropout, dim=2)

    def forward(self, rows: Tensor, pairs: Tensor, present: Tensor) -> tuple[Tensor, Tensor]:
        both = torch.einsum("bsi,bsj->bij", present, present).clamp(max=1.0)
        rows_absent, pairs_absent = FAR * (1 - present), FAR * (1 - both)
        rows = rows + self.drop_rows(self.row(rows, pairs, rows_absent))
        rows = rows + self.column(rows, rows_absent)
        rows = rows + self.transition(rows)
        pairs = pairs + self.outer(rows, present)
        pairs = pairs + self.drop_pair_rows(self.outgoing(pairs, both))
        pairs = pairs + self.drop_pair_rows(self.incoming(pairs, both))
        pairs = pairs + self.drop_pair_rows(self.starting(pairs, pairs_absent))
        pairs = pairs + self.drop_pair_columns(self.ending(pairs, pairs_absent))
        return rows, pairs + self.pair_transition(pairs)


class Evoformer(nn.Module):
    """A masked alignment, what is present of it, the masked residues and binned distances to the sum of both losses."""

    def __init__(self, config: EvoformerConfig) -> None:
        super().__init__()
        self.reach, self.recycles = config.reach, config.recycles
        self.residue = nn.Embedding(config.residues, config.alignment)
        self.left = nn.Embedding(config.residues, config.pairs)
        self.right = nn.Embedding(config.residues, config.pairs)
        self.relative = nn.Embedding(2 * config.reach + 1, config.pairs)
        self.recycling = Recycling(config) if config.recycles else None
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.blocks))
        self.residue_head = nn.Linear(config.alignment, config.residues)
        self.distance_head = nn.Linear(config.pairs, config.bins)

    def forward(self, alignment: Tensor, present: Tensor, masked: Tensor, distances: Tensor) -> Tensor:
        seen: tuple[Tensor, Tensor] | None = None
        for run in range(self.recycles + 1):
            with torch.set_grad_enabled(torch.is_grad_enabled() and run == self.recycles):
                target = alignment[:, 0]
                places = torch.arange(target.shape[1], device=target.device)
                offsets = (places[:, None] - places[None, :]).clamp(-self.reach, self.reach) + self.reach
                rows = self.residue(alignment)
                pairs = self.left(target)[:, :, None] + self.right(target)[:, None, :] + self.relative(offsets)
                if self.recycling is not None and seen is not None:
                    rows, pairs = self.recycling(rows, pairs, seen)
                for block in self.blocks:
                    rows, pairs = block(rows, pairs, present)
                seen = rows, pairs
        residues = self.residue_head(rows)
        logits = self.distance_head(pairs + pairs.transpose(1, 2))
        loss = F.cross_entropy(residues.flatten(0, 2), masked.flatten(), ignore_index=IGNORED)
        return loss + F.cross_entropy(logits.flatten(0, 2), distances.flatten(), ignore_index=IGNORED)


def build_model() -> Evoformer:
    torch.manual_seed(0)
    return Evoformer(EvoformerConfig())


def build_small() -> Evoformer:
    """One block."""
    torch.manual_seed(0)
    return Evoformer(EvoformerConfig(blocks=1))


def build_with_dropout() -> Evoformer:
    """With the paper's chances: 0.15 for rows of the alignment, 0.25 for those of pairs."""
    torch.manual_seed(0)
    return Evoformer(EvoformerConfig(blocks=1, dropout=0.15, pair_dropout=0.25))


def build_with_recycling() -> Evoformer:
    """Three runs, the last one differentiated."""
    torch.manual_seed(0)
    return Evoformer(EvoformerConfig(recycles=2))


def sample_inputs(batch: int = 4, sequences: int = 5, length: int = 9) -> dict[str, Tensor]:
    """One global batch of alignments with gaps, with unequal numbers of masked residues and of known distances."""
    generator = torch.Generator().manual_seed(0)
    shape = (batch, sequences, length)
    truth = torch.randint(0, EvoformerConfig.residues - 1, shape, generator=generator)
    hidden = torch.rand(shape, generator=generator) < 0.3
    distances = torch.randint(0, EvoformerConfig.bins, (batch, length, length), generator=generator)
    unknown = torch.rand(distances.shape, generator=generator) < 0.2
    present = (torch.rand(shape, generator=generator) > 0.15).float()
    present[:, 0] = 1.0  # the target sequence has no gaps
    return {
        "alignment": truth.masked_fill(hidden, EvoformerConfig.residues - 1),
        "present": present,
        "masked": truth.masked_fill(~hidden, IGNORED),
        "distances": distances.masked_fill(unknown, IGNORED),
    }
