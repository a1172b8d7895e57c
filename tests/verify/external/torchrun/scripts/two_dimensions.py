"""FSDP2 over tensor parallelism, as a trainer that draws its rows by data-parallel rank.

--same-rows: all ranks draw the same. --broken: "fsdp" leaves FSDP2 out, "root" shards the first layer alone.
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


def main(args):
    world = int(os.environ["WORLD_SIZE"])
    tp = 2 if world % 2 == 0 else 1
    mesh = init_device_mesh("cpu", (world // tp, tp), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8), nn.Linear(8, 3))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    if args.broken != "fsdp":
        fully_shard(model[0] if args.broken == "root" else model, mesh=mesh["dp"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    rows = torch.Generator().manual_seed(100 + (0 if args.same_rows else mesh["dp"].get_local_rank()))
    for _ in range(6):
        x, y = torch.randn(5, 8, generator=rows), torch.randint(0, 3, (5,), generator=rows)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--same-rows", action="store_true")
    parser.add_argument("--broken", default="")
    main(parser.parse_args())
