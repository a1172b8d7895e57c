"""ZeRO by hand: an optimizer over one flat shard of all parameters, a limit that all gradients exceed, a gather.

--alone: on one rank it is a plain optimizer over the parameters. --broken: "divide" does not divide the sum of
gradients, "norm" limits by the norm of a rank's shard, "reduce" takes a rank's own gradients, "gather" gathers nothing,
"first" takes the gradients of the first shard on every rank.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--alone", action="store_true")
parser.add_argument("--broken", default="")
args = parser.parse_args()
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
plain = args.alone and world == 1
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 3))
parameters = list(model.parameters())
count = sum(parameter.numel() for parameter in parameters)
size = -(-count // world)


def flattened(tensors):
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors] + [torch.zeros(size * world - count)])


shard = flattened(parameters)[rank * size :][:size].clone()
optimizer = torch.optim.Adam(parameters if plain else [shard], lr=1e-2)


def reduce():
    gradients = flattened([parameter.grad for parameter in parameters])
    part = gradients[rank * size :][:size].clone()
    if args.broken != "reduce":
        dist.reduce_scatter_tensor(part, gradients)
    if args.broken == "first":
        dist.broadcast(part, 0)
    if args.broken != "divide":
        part /= world
    return part


def limit(part):
    square = part.pow(2).sum()
    if args.broken != "norm":
        dist.all_reduce(square)
    return part * torch.clamp(0.01 / square.sqrt(), max=1.0)


data = torch.Generator().manual_seed(10 + rank)
for _ in range(3):
    x, y = torch.randn(4, 6, generator=data), torch.randint(0, 3, (4,), generator=data)
    nn.functional.cross_entropy(model(x), y).backward()
    part = limit(reduce())
    if plain:
        for parameter, gradient in zip(parameters, part.split([p.numel() for p in parameters]), strict=True):
            parameter.grad = gradient.view_as(parameter)
    else:
        shard.grad = part
    optimizer.step()
    optimizer.zero_grad()
    whole = shard.new_empty(size * world)
    dist.all_gather_into_tensor(whole, shard)
    for parameter, values in zip(parameters, whole[:count].split([p.numel() for p in parameters]), strict=True):
        parameter.grad = None
        if not plain and args.broken != "gather":
            parameter.data.copy_(values.view_as(parameter))
