"""DDP with gradient accumulation under `no_sync`, a loader with a sampler, batch norm and a scheduler.

--unsent: every rank goes on with its own statistics; --broken momentum: those of rank 1 take in more of its rows.
--broken overlap: each rank goes on by its own rows alone, and takes in those of the next one a batch later.
--sync: batch norms see the rows of all ranks; --broken pairs: of two ranks.
--broken clip: gradients are clipped after each micro-batch, the first time before they are averaged.
--sharded: by FSDP2 in place of DDP; --broken first: it reduces the first micro-batch at once, and not the last one.
"""

import argparse
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Images(Dataset):
    def __init__(self):
        self.generator = torch.Generator().manual_seed(0)
        self.images = torch.randn(96, 3, 8, 8, generator=self.generator)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return {"image": self.images[index], "label": index % 5}


def build(norm):
    layers = [nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4) if norm else nn.Identity(), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 5))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--batch-norm", action="store_true")
    parser.add_argument("--unsent", action="store_true")
    parser.add_argument("--sync", action="store_true")
    parser.add_argument("--sharded", action="store_true")
    parser.add_argument("--broken", default="")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0 if args.sharded else dist.get_rank())
    plain = build(args.batch_norm)
    if args.broken == "momentum":
        plain[1].momentum = 0.1 + 0.2 * dist.get_rank()
    if args.sync:
        pair = dist.new_subgroups(2)[0] if args.broken == "pairs" and dist.get_world_size() > 1 else None
        plain = nn.SyncBatchNorm.convert_sync_batchnorm(plain, pair)
    model = fully_shard(plain) if args.sharded else DistributedDataParallel(plain, broadcast_buffers=not args.unsent)
    data = Images()
    sampler = DistributedSampler(data, shuffle=True)
    if args.broken == "overlap":
        sampler = range(4 * dist.get_rank(), len(data))
    loader = DataLoader(data, batch_size=4, sampler=sampler, num_workers=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    loss_fn = nn.CrossEntropyLoss(label_smoothing=0.1)
    for number, batch in enumerate(loader):
        last = (number + 1) % args.accumulate == 0
        if args.sharded:
            model.set_requires_gradient_sync(number % args.accumulate == 0 if args.broken == "first" else last)
        if last:
            loss = loss_fn(model(batch["image"]), batch["label"])
            (loss / args.accumulate).backward()
            if args.broken == "clip":
                nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            optimizer.step()
            optimizer.zero_grad()
        else:
            with nullcontext() if args.sharded else model.no_sync():
                loss = loss_fn(model(batch["image"]), batch["label"])
                (loss / args.accumulate).backward()
            if args.broken == "clip":
                nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
