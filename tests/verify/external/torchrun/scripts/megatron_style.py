"""Tensor parallelism by hand: autograd functions for the two collectives, and weights cut out of whole ones.

--broken: "copy" leaves out the all_reduce of the backward pass, "bias" adds the bias on every rank, "seed" drops other
elements of what every rank has whole.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn


class Copy(torch.autograd.Function):
    @staticmethod
    def forward(_, x):
        return x.clone()

    @staticmethod
    def backward(_, gradient):
        gradient = gradient.clone()
        if args.broken != "copy":
            dist.all_reduce(gradient)
        return gradient


class Reduce(torch.autograd.Function):
    @staticmethod
    def forward(_, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(_, gradient):
        return gradient


class Mlp(nn.Module):
    def __init__(self, size, hidden):
        super().__init__()
        rank, world = dist.get_rank(), dist.get_world_size()
        self.up = nn.Parameter((torch.randn(hidden, size) / 3).chunk(world)[rank].clone())
        self.down = nn.Parameter((torch.randn(size, hidden) / 3).chunk(world, 1)[rank].clone())
        self.bias = nn.Parameter(torch.randn(size))
        self.drop = nn.Dropout(0.2)

    def forward(self, x):
        h = torch.relu(Copy.apply(x) @ self.up.T)
        y = Reduce.apply(h @ self.down.T + (self.bias if args.broken == "bias" else 0))
        return self.drop(y if args.broken == "bias" else y + self.bias)


parser = argparse.ArgumentParser()
parser.add_argument("--broken", default="")
args = parser.parse_args()
dist.init_process_group("nccl")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(5, 6), Mlp(6, 12), nn.Linear(6, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(dist.get_rank() if args.broken == "seed" else 1)
data = torch.Generator().manual_seed(2)
for _ in range(4):
    x, y = torch.randn(7, 5, generator=data), torch.randn(7, 2, generator=data)
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
