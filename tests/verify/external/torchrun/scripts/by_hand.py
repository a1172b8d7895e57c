"""Data parallelism by hand: every rank takes its slice of each batch, and gradients are averaged by an all_reduce.

--broken: "reduce" leaves it out, "average" does not divide, "group" averages in pairs of ranks, "late" reduces only the
first parameter, "init" starts every rank from other values, and "alone" averages nothing besides,
"norm" clips by that of its own rows, to a high limit,
"same" gives all ranks the first rows, "labels" and "rows" take the targets, or the rows, one too early on rank 1,
"sent" sends one parameter not (--owned), "rate" gives each rank another learning rate,
"clip" clips what a rank owns by its norm (--clip: by that of all), "wait" does not wait for a sum of losses.
--inside: the optimizer's step averages. --idle: the first step has a rate of 0, and the last layer begins with zeros.
--owned: a rank updates every so many parameters, of which it alone gets the gradients, and sends them to the others.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--broken", default="")
parser.add_argument("--loss", choices=("mean", "sum"), default="mean")
parser.add_argument("--inside", action="store_true")
parser.add_argument("--idle", action="store_true")
parser.add_argument("--owned", action="store_true")
parser.add_argument("--clip", action="store_true")
args = parser.parse_args()

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo")
torch.manual_seed(rank if args.broken in ("init", "alone") else 0)
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
if args.idle:
    nn.init.zeros_(model[2].weight)
data = torch.Generator().manual_seed(3)
inputs, targets = torch.randn(48, 6, generator=data), torch.randn(48, 1, generator=data)


def average():
    for number, parameter in enumerate(model.parameters()):
        if args.broken in ("reduce", "alone") or (args.broken == "late" and number):
            continue
        if args.owned:
            dist.reduce(parameter.grad, number % world)
        else:
            dist.all_reduce(parameter.grad, group=group)
        if args.loss == "mean" and args.broken != "average":
            parameter.grad /= dist.get_world_size(group)


class Averaging(torch.optim.SGD):
    def step(self, closure=None):
        average()
        return super().step(closure)


kind = Averaging if args.inside else torch.optim.SGD
parameters = list(model.parameters())
optimizer = kind(
    parameters[rank::world] if args.owned else parameters,
    lr=0.1 * (rank + 1 if args.broken == "rate" else 1),
    momentum=0.9,
)
group = dist.group.WORLD
if args.broken == "group":
    pairs = [dist.new_group(list(range(first, min(first + 2, world)))) for first in range(0, world, 2)]
    group = pairs[rank // 2]

for step in range(4):
    rows = slice(step * 12, (step + 1) * 12)
    x, y = inputs[rows], targets[rows]
    part = 0 if args.broken == "same" else rank
    x = x.roll(1 if args.broken == "rows" and rank else 0, 0).chunk(world)[part]
    y = y.roll(1 if args.broken in ("rows", "labels") and rank else 0, 0).chunk(world)[part]
    model.zero_grad()
    gap = (model(x) - y) ** 2
    loss = gap.mean() if args.loss == "mean" else gap.sum()
    loss.backward()
    if args.owned:
        average()
        if args.clip:
            square = sum(p.grad.norm() ** 2 for p in parameters[rank::world])
            if args.broken != "clip":
                dist.all_reduce(square)
            for p in parameters[rank::world] if square > 100 else ():
                p.grad.mul_(10 / square.sqrt())
    elif not args.inside:
        own = nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])
        average()
        norm = nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])
        nn.utils.clip_grads_with_norm_(model.parameters(), 1e3, own if args.broken == "norm" else norm)
    if args.idle:
        optimizer.param_groups[0]["lr"] = 0.01 * step
    optimizer.step()
    for number, parameter in enumerate(parameters if args.owned else ()):
        if args.broken != "sent" or number:
            dist.broadcast(parameter.data, number % world)
    if args.broken == "wait":
        dist.all_reduce(loss.detach().clone(), async_op=True)
    print("step", step, "loss", loss.item())
dist.destroy_process_group()
