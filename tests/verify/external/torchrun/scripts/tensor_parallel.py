"""Tensor parallelism in the style of its tutorial: a plan of column and row parallel layers, with sequence parallelism.

--broken: "norm" leaves the gradient of the norm unreduced, "seed" draws other words on every rank.
"""

import argparse
import os

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module


class FeedForward(nn.Module):
    def __init__(self, size, hidden):
        super().__init__()
        self.w1, self.w2 = nn.Linear(size, hidden, bias=False), nn.Linear(hidden, size, bias=False)
        self.w3 = nn.Linear(size, hidden, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.norm = nn.RMSNorm(size)
        self.feed_forward = FeedForward(size, 4 * size)

    def forward(self, x):
        return x + self.feed_forward(self.norm(x))


class Model(nn.Module):
    def __init__(self, words=48, size=12, layers=2):
        super().__init__()
        self.tok_embeddings = nn.Embedding(words, size)
        self.layers = nn.ModuleList(Block(size) for _ in range(layers))
        self.norm, self.output = nn.RMSNorm(size), nn.Linear(size, words, bias=False)

    def forward(self, tokens):
        h = self.tok_embeddings(tokens)
        for layer in self.layers:
            h = layer(h)
        return self.output(self.norm(h))


parser = argparse.ArgumentParser()
parser.add_argument("--broken", default="")
args = parser.parse_args()
world = int(os.environ["WORLD_SIZE"])
mesh = init_device_mesh(device_type="cuda", mesh_shape=(world,))
torch.manual_seed(0)
model = Model().to("cuda")
model = parallelize_module(
    model,
    mesh,
    {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    },
)
for block in model.layers:
    parallelize_module(
        block,
        mesh,
        {
            "norm": SequenceParallel(),
            "feed_forward.w1": ColwiseParallel(input_layouts=Shard(1)),
            "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
            "feed_forward.w3": ColwiseParallel(input_layouts=Shard(1)),
        },
    )
if args.broken == "norm":
    for layer in model.layers:
        with torch.no_grad():
            layer.norm.weight = nn.Parameter(layer.norm.weight.to_local())
        layer.norm.forward = lambda x, norm=layer.norm: F.rms_norm(x.to_local(), (12,), norm.weight)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=False)
for step in range(10):
    torch.manual_seed(step + (10 * mesh.get_rank() if args.broken == "seed" else 0))
    tokens = torch.randint(0, 48, (4, 12), device="cuda")
    logits = model(tokens)
    loss = F.cross_entropy(logits.flatten(0, 1), tokens.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
