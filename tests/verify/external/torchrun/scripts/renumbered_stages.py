"""A pipeline whose stages are cut out of a list of layers, so that each stage counts its layers from 0 again.

Norms start from ones and zeros on every stage, which no value tells apart. --sharded: over pairs of ranks, by FSDP2.
--tied: words enter and leave by one table, of which the first and the last stage have a copy.
--broken: "norm" doubles the gradients of the later stage's norms, "tied" leaves out the sum over the table's copies.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

parser = argparse.ArgumentParser()
parser.add_argument("--broken", default="")
parser.add_argument("--sharded", action="store_true")
parser.add_argument("--tied", action="store_true")
args = parser.parse_args()
dist.init_process_group()
world_size = dist.get_world_size()
stages = min(2, world_size)
mesh = init_device_mesh("cpu", (world_size // stages, stages), mesh_dim_names=("dp", "pp"))
number = mesh["pp"].get_local_rank()
first, last = number == 0, number == stages - 1

torch.manual_seed(0)
layers = [nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Tanh()) for _ in range(4)]
table, out = nn.Embedding(12, 8), nn.Linear(8, 12, bias=False)
with torch.no_grad():
    out.weight.copy_(table.weight)
if stages == 1:
    out.weight = table.weight
each = len(layers) // stages
mine = layers[number * each : (number + 1) * each]
if args.tied:
    mine = [table] * first + mine + [out] * last
model = nn.Sequential(*mine)
if args.sharded:
    fully_shard(model, mesh=mesh["dp"])


def loss_of(output, target):
    if args.tied:
        return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())
    return nn.functional.mse_loss(output, target)


stage = PipelineStage(model, number, stages, torch.device("cpu"), group=mesh.get_group("pp"))
schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=loss_of)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(1 + mesh["dp"].get_local_rank())
for _ in range(3):
    if args.tied:
        words = torch.randint(0, 12, (4, 6))
        rows, target = words[:, :-1], words[:, 1:]
    else:
        rows, target = torch.randn(4, 8), torch.randn(4, 8)
    optimizer.zero_grad()
    schedule.step(*([rows] if first else []), **({"target": target} if last else {}))
    if args.broken == "norm" and not first:
        for layer in model:
            layer[1].weight.grad.mul_(2)
    if args.tied and args.broken != "tied" and stages > 1:
        dist.all_reduce((table if first else out).weight.grad)
    optimizer.step()
dist.destroy_process_group()
