"""A small model with everything that can go wrong: tied weights, a buffer, a frozen parameter, dropout, two stages."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import nnscaler
from nnscaler.codegen.compiled_program import Program

WORDS, WIDTH, HIDDEN, TOKENS, BATCH = 36, 8, 24, 5, 12


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


class Tiny(nn.Module):
    """The embedding and the head share one weight; `unused` has no gradient, `frozen` is not trained."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight
        self.unused = nn.Parameter(torch.ones(3))
        self.frozen = nn.Parameter(torch.ones(WIDTH), requires_grad=False)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.words(ids) * self.scale + self.frozen
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten(), ignore_index=-1)


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return Tiny()


def sample_inputs() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, WORDS, (BATCH, TOKENS), generator=generator)
    labels = torch.randint(0, WORDS, (BATCH, TOKENS), generator=generator)
    labels[0, :4] = -1  # unequal counts per rank
    return {"ids": ids, "labels": labels}


@pytest.fixture(autouse=True)
def _models_are_traced_once(traced_once: None) -> None:
    """Programs, not traces, are asked about."""


@pytest.fixture(scope="session")
def tiny() -> Callable[[], nn.Module]:
    """The factory of the small model."""
    return build_model


@pytest.fixture(scope="session")
def batch() -> dict[str, Tensor]:
    """Its sample batch."""
    return sample_inputs()


@pytest.fixture(scope="session")
def compiled() -> Program:
    """Tiny on 8 ranks: dp=2, tp=2, pp=2, 2 micro-batches."""
    plan = "dp=2,tp=2,pp=2"
    return nnscaler.parallelize(build_model(), sample_inputs(), ranks=8, plan=plan, micro_batches=2)


@pytest.fixture
def program(compiled: Program, tmp_path: Path) -> Path:
    """The program in a folder of its own, to be edited."""
    return compiled.save(tmp_path / "program")
