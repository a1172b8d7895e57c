"""Tensor parallelism of attention whose heads stay DTensors; `--context`: torch divides the sequence."""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

dist.init_process_group("gloo")
parser = argparse.ArgumentParser()
parser.add_argument("--context", action="store_true")
CONTEXT = parser.parse_args().context


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        rows = [part(x).unflatten(-1, (-1, 4)).transpose(1, 2) for part in (self.q, self.k, self.v)]
        return self.out(F.scaled_dot_product_attention(*rows, is_causal=True).transpose(1, 2).flatten(2))


def main():
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(5)
    model = Attention()
    if not CONTEXT:
        plan = {name: ColwiseParallel(use_local_output=False) for name in ("q", "k", "v")}
        parallelize_module(model, mesh, {**plan, "out": RowwiseParallel()})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        x, y = torch.randn(2, 2, 8, 8)
        if CONTEXT and dist.get_world_size() > 1:
            with context_parallel(mesh, buffers=[x, y], buffer_seq_dims=[1, 1], no_restore_buffers={x, y}):
                F.mse_loss(model(x), y).backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad, dist.ReduceOp.SUM)
                parameter.grad /= dist.get_world_size()
        else:
            F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


main()
