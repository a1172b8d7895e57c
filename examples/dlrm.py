"""A recommendation model (DLRM): many embedding tables, pairwise interactions, a click to predict.

    nnscaler verify-plan examples/dlrm.py --ranks 4 --plan dp=2,tp=2

Some features are one id each, others are bags of ids that are summed (Naumov et al. 2019). Vectors of all features and
of the dense ones are multiplied pair by pair, and one triangle of the products joins the dense vector.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SINGLE = (50, 36, 104)  # rows of the tables whose feature is one id
BAGS = (70, 28)  # rows of the tables whose feature is a bag
BAG = 5  # ids in a bag
DENSE = 13


def perceptron(sizes: list[int], last: nn.Module | None = None) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inner, outer in pairwise(sizes):
        layers += [nn.Linear(inner, outer), nn.ReLU()]
    return nn.Sequential(*layers[:-1], *([last] if last is not None else []))


class DLRM(nn.Module):
    """Dense numbers, ids and bags of ids to the binary cross-entropy of the clicks."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, width) for rows in SINGLE)
        self.bags = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="sum") for rows in BAGS)
        features = 1 + len(SINGLE) + len(BAGS)
        self.bottom = perceptron([DENSE, 44, 30, width], nn.ReLU())
        self.top = perceptron([width + features * (features - 1) // 2, 52, 38, 1])

    def forward(self, dense: Tensor, ids: Tensor, bags: Tensor, clicks: Tensor) -> Tensor:
        x = self.bottom(dense)
        vectors = [x]
        vectors += [table(ids[:, i]) for i, table in enumerate(self.tables)]
        vectors += [table(bags[:, i]) for i, table in enumerate(self.bags)]
        stacked = torch.stack(vectors, dim=1)
        products = torch.bmm(stacked, stacked.transpose(1, 2))
        rows, columns = torch.triu_indices(len(vectors), len(vectors), offset=1, device=x.device)
        joined = torch.cat([x, products[:, rows, columns]], dim=1)
        return F.binary_cross_entropy_with_logits(self.top(joined).squeeze(-1), clicks)


def build_model() -> DLRM:
    torch.manual_seed(0)
    return DLRM()


def sample_inputs(batch: int = 12) -> dict[str, Tensor]:
    """One global batch: dense numbers, one id a feature, bags of ids, and whether there was a click."""
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(0, rows, (batch,), generator=generator) for rows in SINGLE]
    bags = [torch.randint(0, rows, (batch, BAG), generator=generator) for rows in BAGS]
    return {
        "dense": torch.rand(batch, DENSE, generator=generator),
        "ids": torch.stack(ids, dim=1),
        "bags": torch.stack(bags, dim=1),
        "clicks": torch.randint(0, 2, (batch,), generator=generator).float(),
    }
