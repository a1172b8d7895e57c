"""Scripts that do not end as they should, by the one argument: how."""

import ctypes
import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn

how = sys.argv[1]
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo")
model = nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
if how == "argparse":
    sys.exit(2)
if how == "early":
    sys.exit()
for _ in range(3):
    loss = model(torch.ones(2, 3)).mean()
    loss.backward()
    if how == "exit" and rank == world - 1 and world > 1:
        sys.exit(1)
    if how == "crash" and rank == world - 1 and world > 1:
        ctypes.string_at(0)
    if how == "raise" and rank == world - 1 and world > 1:
        raise ValueError("rows are missing")
    if how == "everywhere":
        raise ValueError("rows are missing on every rank")
    if how == "loop" and rank == 0:
        while True:
            time.sleep(0.01)
    if how == "missing" and rank == 0 and world > 1:
        continue
    if how == "order" and rank == 0:
        dist.all_reduce(torch.ones(1))
        dist.broadcast(torch.ones(1), 0)
    elif how == "order":
        dist.broadcast(torch.ones(1), 0)
        dist.all_reduce(torch.ones(1))
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= world
    try:
        optimizer.step()
    except Exception:  # noqa: BLE001
        print("never")
dist.destroy_process_group()
