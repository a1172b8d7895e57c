"""DDP with a DistributedSampler that shuffles, an epoch loop, arguments and a learning rate that grows with the ranks.

--broken: "sampler" leaves it out, "pairs" gives two ranks the same rows, "seed" shuffles on each rank by a
seed of its own; "frozen" steps a model that is not the one that DDP wraps. --evaluate: after each step, on other rows.
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Trainer:
    def __init__(self, model, loader, optimizer, schedule, held_out):
        self.model, self.loader, self.optimizer, self.schedule = model, loader, optimizer, schedule
        self.held_out = held_out

    def epoch(self, number):
        if isinstance(self.loader.sampler, DistributedSampler):
            self.loader.sampler.set_epoch(number)
        for source, targets in self.loader:
            self.optimizer.zero_grad()
            F.cross_entropy(self.model(source), targets).backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
            self.optimizer.step()
            self.schedule.step()
            if self.held_out is not None:
                self.evaluate()

    def evaluate(self):
        self.model.eval()
        wrong, count = torch.zeros(()), torch.zeros(())
        for source, targets in self.held_out:
            with torch.no_grad():
                wrong += (self.model(source).argmax(-1) != targets).sum()
                count += len(targets)
        dist.all_reduce(wrong)
        dist.all_reduce(count)
        print("wrong", (wrong / count).item())
        self.model.train()


def main(args):
    dist.init_process_group(backend="nccl")
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    generator = torch.Generator().manual_seed(7)
    data = TensorDataset(torch.randn(240, 12, generator=generator), torch.randint(0, 4, (240,), generator=generator))
    pairs = {"num_replicas": (dist.get_world_size() + 1) // 2, "rank": dist.get_rank() // 2}
    more = {"pairs": pairs, "seed": {"seed": dist.get_rank()}}.get(args.broken, {})
    sampler = None if args.broken == "sampler" else DistributedSampler(data, **more)
    torch.manual_seed(1)
    loader = DataLoader(data, batch_size=args.batch_size, sampler=sampler, shuffle=sampler is None, pin_memory=True)
    model = nn.Sequential(nn.Linear(12, 16), nn.Dropout(0.3), nn.GELU(), nn.Linear(16, 4)).to(local)
    model = DistributedDataParallel(model, device_ids=[local])
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr * dist.get_world_size())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=args.epochs * len(loader))
    held_out = DataLoader(data, 30, sampler=DistributedSampler(data, shuffle=False)) if args.evaluate else None
    trainer = Trainer(model, loader, optimizer, schedule, held_out)
    for number in range(args.epochs):
        trainer.epoch(number)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--broken", default="")
    parser.add_argument("--evaluate", action="store_true")
    main(parser.parse_args())
