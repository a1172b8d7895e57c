"""A pipeline by hand: stages that send activations and gradients, words tied over both ends, a norm over all stages.

--broken: "half" averages the gradients of the tied words, "norm" limits by the norm of a stage's own gradients.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--limit", type=float, default=0.5)
parser.add_argument("--broken", default="")
args = parser.parse_args()
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
first, last = rank == 0, rank == world - 1
WORDS, WIDTH, LENGTH, MICRO = 20, 12, 6, 2


class Stage(nn.Module):
    def __init__(self):
        super().__init__()
        words = nn.Embedding(WORDS, WIDTH)
        layers = {str(i): nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh()) for i in range(4)}
        size = len(layers) // world
        self.words = words if first or last else None
        self.layers = nn.ModuleDict({str(i): layers[str(i)] for i in range(rank * size, (rank + 1) * size)})

    def forward(self, x):
        x = self.words(x) if first else x
        for layer in self.layers.values():
            x = x + layer(x)
        return x @ self.words.weight.T if last else x


torch.manual_seed(0)
stage = Stage()
optimizer = torch.optim.AdamW(stage.parameters(), lr=1e-2)
ends = dist.new_group(sorted({0, world - 1}))
data = torch.Generator().manual_seed(1)


def forward(rows, labels):
    if not first:
        rows = torch.empty(len(labels), LENGTH, WIDTH)
        dist.recv(rows, rank - 1)
        rows.requires_grad_(True)
    made = stage(rows)
    if last:
        return rows, nn.functional.cross_entropy(made.flatten(0, 1), labels.flatten()) / MICRO
    dist.send(made.detach(), rank + 1)
    return rows, made


def backward(rows, made):
    gradient = None
    if not last:
        gradient = torch.empty_like(made)
        dist.recv(gradient, rank + 1)
    made.backward(gradient)
    if not first:
        dist.send(rows.grad, rank - 1)


def limit():
    own = [p.grad for n, p in stage.named_parameters() if first or not n.startswith("words")]
    square = torch.stack([gradient.pow(2).sum() for gradient in own]).sum()
    if args.broken != "norm":
        dist.all_reduce(square)
    for parameter in stage.parameters():
        parameter.grad *= torch.clamp(args.limit / (square.sqrt() + 1e-6), max=1.0)


for _ in range(3):
    ids = torch.randint(0, WORDS, (4, LENGTH + 1), generator=data)
    pairs = zip(ids[:, :-1].chunk(MICRO), ids[:, 1:].chunk(MICRO), strict=True)
    for made in [forward(rows, labels) for rows, labels in pairs]:
        backward(*made)
    if world > 1 and (first or last):
        dist.all_reduce(stage.words.weight.grad, group=ends)
        stage.words.weight.grad /= 2 if args.broken == "half" else 1
    limit()
    optimizer.step()
    optimizer.zero_grad()
