"""Data parallelism by hand: every rank takes its slice of each batch, and gradients are averaged by an all_reduce.

--broken: "reduce" leaves it out, "average" does not divide, "group" averages in pairs of ranks, "late" reduces only the
first parameter, "init" starts every rank from other values.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--broken", default="")
parser.add_argument("--loss", choices=("mean", "sum"), default="mean")
args = parser.parse_args()

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo")
torch.manual_seed(rank if args.broken == "init" else 0)
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
data = torch.Generator().manual_seed(3)
inputs, targets = torch.randn(48, 6, generator=data), torch.randn(48, 1, generator=data)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
group = dist.group.WORLD
if args.broken == "group":
    pairs = [dist.new_group(list(range(first, min(first + 2, world)))) for first in range(0, world, 2)]
    group = pairs[rank // 2]

for step in range(4):
    rows = slice(step * 12, (step + 1) * 12)
    x, y = inputs[rows].chunk(world)[rank], targets[rows].chunk(world)[rank]
    optimizer.zero_grad()
    gap = (model(x) - y) ** 2
    loss = gap.mean() if args.loss == "mean" else gap.sum()
    loss.backward()
    for number, parameter in enumerate(model.parameters()):
        if args.broken == "reduce" or (args.broken == "late" and number):
            continue
        dist.all_reduce(parameter.grad, group=group)
        if args.loss == "mean" and args.broken != "average":
            parameter.grad /= dist.get_world_size(group)
    optimizer.step()
    print("step", step, "loss", loss.item())
dist.destroy_process_group()
