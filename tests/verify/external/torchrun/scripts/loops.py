"""Loops of training, each with DDP. The first argument:

    counts   the loss is divided by the number of labels of all ranks, a Python number (--tensor: a tensor); --slices:
             rows are slices of a table, which are others on one rank; --norm: by a batch norm, "own" or "all" rows
    penalty  a critic with a penalty on its gradient between true and made rows, whose shares are drawn
    two      an optimizer for matrices and one for vectors, after one backward pass
    closure  the step runs model and backward pass, as those of Lightning do
    inside   an optimizer for each parameter, which steps within the backward pass
    bf16     gradients are sent in bfloat16, by a hook of DDP that asks for NCCL
    again    a layer that casts and drops is computed again in the backward pass; --reentrant: in torch's old way
    join     ranks have other numbers of batches
    resume   after a step, model and optimizer are made anew from what they have saved

--broken: "own" counts a rank's own labels, "sync" averages no gradients, "decay" decays weights on rank 0 alone,
"state" leaves out what the optimizer saved on rank 1.
"""

import argparse
import copy
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms import Join
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

parser = argparse.ArgumentParser()
parser.add_argument("loop")
parser.add_argument("--tensor", action="store_true")
parser.add_argument("--slices", action="store_true")
parser.add_argument("--norm", default="")
parser.add_argument("--reentrant", action="store_true")
parser.add_argument("--broken", default="")
args = parser.parse_args()
dist.init_process_group("gloo")
world = dist.get_world_size()
torch.manual_seed(0)


class Again(nn.Module):
    def forward(self, x):
        return checkpoint(self.dropped, x, use_reentrant=args.reentrant)

    def dropped(self, x):
        return nn.functional.dropout(x.float() * x.float().pow(2).mean(-1, keepdim=True).rsqrt(), 0.2).type_as(x)


def made():
    middle = Again() if args.loop == "again" else nn.BatchNorm1d(16) if args.norm else nn.GELU()
    parts = nn.Sequential(nn.Linear(6, 16), middle, nn.Linear(16, 1 if args.loop == "penalty" else 4))
    return nn.SyncBatchNorm.convert_sync_batchnorm(parts) if args.norm == "all" else parts


plain = made()
by_hand = args.loop == "inside" or args.broken == "sync"
model = plain if by_hand else DistributedDataParallel(plain)
if args.loop == "bf16":
    model.register_comm_hook(None, bf16_compress_hook)
groups = [[p for p in plain.parameters() if (p.dim() > 1) == matrix] for matrix in (True, False)]
if args.loop == "inside":
    groups = [[p] for p in plain.parameters()]
elif args.loop != "two":
    groups = [list(plain.parameters())]
decay = 0.0 if args.broken == "decay" and dist.get_rank() > 0 else 0.1
optimizers = [torch.optim.AdamW(group, lr=1e-2, weight_decay=decay) for group in groups]


def step_inside(parameter):
    dist.all_reduce(parameter.grad)
    parameter.grad /= 1 if args.broken == "sync" else world
    optimizers[[group[0] is parameter for group in groups].index(True)].step()
    parameter.grad = None


def loss_of(x, y):
    if args.loop == "counts":
        y[y == 3 if args.slices else torch.rand(len(y), generator=data) < 0.4] = -100
        count = (y != -100).sum()
        if args.broken != "own":
            dist.all_reduce(count)
        terms = cross_entropy(model(x), y, ignore_index=-100, reduction="sum")
        return terms * (1 if args.broken == "own" else world) / (count if args.tensor else count.item())
    if args.loop == "penalty":
        true, share = torch.randn(len(x), 6, generator=data), torch.rand(len(x), 1, generator=data)
        between = (share * true + (1 - share) * x).requires_grad_(True)
        (slope,) = torch.autograd.grad(plain(between).sum(), between, create_graph=True)
        return model(x).mean() - model(true).mean() + ((slope.norm(dim=1) - 1) ** 2).mean()
    return cross_entropy(model(x), y)


def forward_and_backward():
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss = loss_of(x, y)
    loss.backward()
    return loss


if args.loop == "inside":
    for parameter in plain.parameters():
        parameter.register_post_accumulate_grad_hook(step_inside)
data = torch.Generator().manual_seed(10 + dist.get_rank())
table = torch.randn(96, 6), torch.randint(0, 4, (96,))


def resumed():
    saved, states = copy.deepcopy(plain.state_dict()), copy.deepcopy(optimizers[0].state_dict())
    new = made()
    new.load_state_dict(saved)
    optimizer = torch.optim.AdamW(new.parameters(), lr=1e-2, weight_decay=0.1)
    if args.broken != "state" or dist.get_rank() != 1:
        optimizer.load_state_dict(states)
    return new, DistributedDataParallel(new), [optimizer]


joined = Join([model]) if args.loop == "join" else nullcontext()
with joined:
    for step in range(3 + dist.get_rank() * (args.loop == "join")):
        x, y = torch.randn(8, 6, generator=data), torch.randint(0, 4, (8,), generator=data)
        if args.slices:
            first = 8 * (step * world + dist.get_rank())
            x, y = (whole[first : first + 8].clone() for whole in table)
        if args.loop == "closure":
            optimizers[0].step(forward_and_backward)
            continue
        forward_and_backward()
        for optimizer in optimizers if args.loop != "inside" else ():
            optimizer.step()
        if args.loop == "resume" and step == 0:
            plain, model, optimizers = resumed()
