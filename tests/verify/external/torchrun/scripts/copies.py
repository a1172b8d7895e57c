"""An optimizer over copies of parameters, of which biases start at zeros. Copies get averages of gradients.

--groups: weights first, then biases. --padded: each copy is flat, and two elements longer. --broken: "divide" does not
divide the sum of gradients, which Adam hides in its updates; "biases" does not divide that of biases. On one rank it
is a plain optimizer over the parameters.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--groups", action="store_true")
parser.add_argument("--padded", action="store_true")
parser.add_argument("--broken", default="")
args = parser.parse_args()
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
for layer in (model[0], model[2]):
    nn.init.zeros_(layer.bias)
parameters = list(model.parameters())
if args.groups:
    parameters.sort(key=lambda parameter: -parameter.dim())


def copied(tensor):
    return nn.functional.pad(tensor.detach().flatten(), (0, 2)) if args.padded else tensor.detach().clone()


copies = [copied(parameter) for parameter in parameters]
optimizer = torch.optim.Adam(parameters if world == 1 else copies, lr=1e-2)
data = torch.Generator().manual_seed(10 + rank)
for _ in range(3):
    x, y = torch.randn(4, 6, generator=data), torch.randint(0, 3, (4,), generator=data)
    nn.functional.cross_entropy(model(x), y).backward()
    for parameter, copy in zip(parameters, copies, strict=True) if world > 1 else ():
        copy.grad = copied(parameter.grad)
        dist.all_reduce(copy.grad)
        if args.broken != "divide" and (args.broken != "biases" or parameter.dim() > 1):
            copy.grad /= world
    optimizer.step()
    for parameter, copy in zip(parameters, copies, strict=True):
        parameter.grad = None
        if world > 1:
            parameter.data.copy_(copy.flatten()[: parameter.numel()].view_as(parameter))
