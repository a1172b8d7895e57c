"""DDP with state beside its parameters: a temperature outside of the module, a running mean, an average of the weights.

--broken: "temperature" does not average its gradient, "mean" is that of a rank's own rows, "weights" averages weights
otherwise on every rank, "start" copies them before they are made equal; --twice keeps two averages that look alike.
"""

import argparse
import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--broken", default="")
parser.add_argument("--twice", action="store_true")
args = parser.parse_args()
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 4)
        self.spare = nn.Parameter(torch.ones(2))  # no data reach it
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        made = self.linear(x)
        with torch.no_grad():
            mean = made.mean(0)
            if args.broken != "mean":
                dist.all_reduce(mean)
                mean /= world
            self.mean.lerp_(mean, 0.1)
        return made + 0.0 * self.spare.sum()


torch.manual_seed(rank if args.broken == "start" else 0)
model = Model()
average = copy.deepcopy(model).requires_grad_(False)
others = [copy.deepcopy(average)] if args.twice else []
model = DistributedDataParallel(model, broadcast_buffers=False)
temperature = nn.Parameter(torch.ones(()))
optimizer = torch.optim.Adam([*model.parameters(), temperature], lr=0.1)
data = torch.Generator().manual_seed(3)
for _ in range(3):
    x, y = torch.randn(12, 6, generator=data), torch.randint(0, 4, (12,), generator=data)
    x, y = x.chunk(world)[rank], y.chunk(world)[rank]
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x) * temperature, y).backward()
    if args.broken != "temperature":
        dist.all_reduce(temperature.grad)
        temperature.grad /= world
    optimizer.step()
    with torch.no_grad():
        share = 0.1 * (1 + rank if args.broken == "weights" else 1)
        for kept in (average, *others):
            for slow, fast in zip(kept.parameters(), model.parameters(), strict=True):
                slow.lerp_(fast, share)
