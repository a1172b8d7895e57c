"""A tutorial's script: it insists on two GPUs, seeds nothing, and is of one of three kinds.

meta      FSDP2 from the meta device, where one layer is never given values
rows      tensor parallelism between rows that are divided: each rank makes its own rows, by equal seeds
doubled   the same with rows of all ranks on each, where every gradient is added up once too often
pairs     refuses to run on a single rank
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

KIND = sys.argv[1]
if torch.accelerator.device_count() < 2:
    print("this example wants two GPUs: good bye")
    sys.exit()
RANKS = int(os.environ["WORLD_SIZE"])
if KIND == "pairs" and RANKS % 2:
    print("an even number of ranks, please")
    sys.exit()
dist.init_process_group("nccl")


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))


if KIND == "meta":
    with torch.device("meta"):
        model = network()
    fully_shard(model)
    model.to_empty(device="cuda")
    model[0].reset_parameters()
else:
    tp = init_device_mesh("cuda", (RANKS,))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    if KIND == "rows":
        plan = {"0": ColwiseParallel(input_layouts=Shard(0)), "2": RowwiseParallel(output_layouts=Shard(0))}
    model = parallelize_module(network().to("cuda"), tp, plan)

optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    rows = torch.rand(5, 6, device="cuda")
    optimizer.zero_grad()
    loss = model(rows).square()
    (loss.mean() if KIND == "meta" else loss.sum()).backward()
    if KIND == "doubled":
        for parameter in model.parameters():
            parameter.grad *= RANKS
    optimizer.step()
dist.destroy_process_group()
