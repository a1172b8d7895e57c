"""Gradients that hooks take out of `.grad` into a buffer, which is averaged and limited by hand, below what they are.

--broken: "late" averages all but the last parameter, "norm" limits by the norm of a rank's own rows, "twice" divides
once too often.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--broken", default="")
broken = parser.parse_args().broken
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
parameters = list(model.parameters())
optimizer = torch.optim.AdamW(parameters, lr=1e-2)


def take(parameter):
    parameter.main_grad += parameter.grad
    parameter.grad = None


for parameter in parameters:
    parameter.register_post_accumulate_grad_hook(take)
data = torch.Generator().manual_seed(10 + rank)
for _ in range(3):
    for parameter in parameters:
        parameter.main_grad = torch.zeros_like(parameter)
    for _ in range(2):
        x, y = torch.randn(4, 6, generator=data), torch.randint(0, 3, (4,), generator=data)
        (nn.functional.cross_entropy(model(x), y) / 2).backward()
    own = torch.stack([parameter.main_grad.norm() for parameter in parameters]).norm()
    for parameter in parameters[:-1] if broken == "late" else parameters:
        dist.all_reduce(parameter.main_grad)
        parameter.main_grad /= world**2 if broken == "twice" else world
    norm = torch.stack([parameter.main_grad.norm() for parameter in parameters]).norm()
    limit = torch.clamp(0.05 / (own if broken == "norm" else norm), max=1.0)
    for parameter in parameters:
        parameter.grad = parameter.main_grad * limit
    optimizer.step()
    optimizer.zero_grad()
