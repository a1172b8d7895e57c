"""DDP over padded rows, of which all count as many labels, by chance. The first argument says by what the loss divides:

    ranks  the labels of all ranks
    mean   a rank's own, as cross entropy does
    own    a rank's own, by hand

--pad: the label that is ignored. --drawn: the script draws its rows, and no loader brings them. --inverse: it
multiplies by the inverse of that number. --lengths: rows have several, and are
padded to the longest of a batch.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("divisor")
parser.add_argument("--pad", type=int, default=-100)
parser.add_argument("--drawn", action="store_true")
parser.add_argument("--inverse", action="store_true")
parser.add_argument("--lengths", action="store_true")
args = parser.parse_args()
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)


def rows(count, generator):
    words = torch.randint(1, 20, (count, 10), generator=generator)
    labels = words.roll(-1, 1).clone()
    labels[:, :3] = args.pad
    return words, labels


def batches():
    if args.drawn:
        own = torch.Generator().manual_seed(5 + rank)
        return [rows(4, own) for _ in range(3)]
    data = TensorDataset(*rows(32, torch.Generator().manual_seed(5)))
    sampler = DistributedSampler(data, shuffle=False)
    return DataLoader(data, batch_size=8 // world, sampler=sampler, collate_fn=padded if args.lengths else None)


def padded(batch):
    cut = [[part[: 5 + int(words[0]) % 6] for part in (words, labels)] for words, labels in batch]
    words, labels = zip(*cut, strict=True)
    joined = nn.utils.rnn.pad_sequence
    return joined(words, batch_first=True), joined(labels, batch_first=True, padding_value=args.pad)


model = DistributedDataParallel(nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 20)))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for words, labels in batches():
    count, scale = (labels != args.pad).sum(), 1
    if args.divisor == "ranks":
        dist.all_reduce(count)
        scale = world
    if args.divisor == "mean":
        count = 1
    optimizer.zero_grad()
    reduction = "mean" if args.divisor == "mean" else "sum"
    made = model(words).flatten(0, 1)
    loss = nn.functional.cross_entropy(made, labels.flatten(), ignore_index=args.pad, reduction=reduction)
    (loss * (scale / count) if args.inverse else loss * scale / count).backward()
    optimizer.step()
