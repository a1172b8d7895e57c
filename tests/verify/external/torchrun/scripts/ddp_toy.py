"""A toy under DDP in the style of a first tutorial: an accelerator is asked for, data are drawn on each rank."""

import os

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel


class ToyModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.net1 = nn.Linear(10, 10)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(10, 5)

    def forward(self, x):
        return self.net2(self.relu(self.net1(x)))


def demo():
    torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    accelerator = torch.accelerator.current_accelerator()
    backend = torch.distributed.get_default_backend_for_device(accelerator)
    dist.init_process_group(backend)
    rank = dist.get_rank()
    device = rank % torch.accelerator.device_count()
    model = ToyModel().to(device)
    wrapped = DistributedDataParallel(model, device_ids=[device])
    loss_fn = nn.MSELoss()
    optimizer = optim.SGD(wrapped.parameters(), lr=0.001)
    for _ in range(5):
        optimizer.zero_grad()
        outputs = wrapped(torch.randn(20, 10))
        labels = torch.randn(20, 5).to(device)
        loss_fn(outputs, labels).backward()
        optimizer.step()
    dist.destroy_process_group()
    print(f"Finished on rank {rank}.")


if __name__ == "__main__":
    demo()
